"""What there is in Kubernetes' API: kinds of objects, and the paths that they have."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import quote


class Resource(NamedTuple):
    """A kind of objects, of one namespace or of the whole cluster."""

    group: str  # empty: the core group
    version: str
    plural: str  # as in paths: pods
    namespace: str = ""  # empty: these have none

    @property
    def api_version(self) -> str:
        """As objects of the kind tell it."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, name: str = "") -> str:
        """Of one object, or of the collection."""
        parts = ["apis", self.group] if self.group else ["api"]
        parts.append(self.version)
        if self.namespace:
            parts += ["namespaces", self.namespace]
        parts.append(self.plural)
        if name:
            parts.append(name)
        return "/" + "/".join(quote(part, safe="") for part in parts)

    def __str__(self) -> str:
        """As people and `kubectl` name it: pods, inferencepools.inference.networking.k8s.io."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


def pods(namespace: str) -> Resource:
    return Resource("", "v1", "pods", namespace)


def leases(namespace: str) -> Resource:
    return Resource("coordination.k8s.io", "v1", "leases", namespace)


TOKEN_REVIEWS = Resource("authentication.k8s.io", "v1", "tokenreviews")
ACCESS_REVIEWS = Resource("authorization.k8s.io", "v1", "subjectaccessreviews")
