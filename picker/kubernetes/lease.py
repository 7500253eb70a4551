"""A Lease of Kubernetes (coordination.k8s.io/v1), read and written for an election."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from picker.kubernetes.client import Api
from picker.kubernetes.election import NOBODY, Lease
from picker.kubernetes.errors import ApiError
from picker.kubernetes.resource import leases

NOT_FOUND, CONFLICT = 404, 409


class _Spec(msgspec.Struct, rename="camel"):
    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    lease_transitions: int | None = None


class _About(msgspec.Struct, rename="camel"):
    resource_version: str


class _Object(msgspec.Struct):
    metadata: _About
    spec: _Spec = msgspec.field(default_factory=_Spec)


class LeaseObject:
    """One Lease by its name. What others keep in it beside the election is left alone."""

    def __init__(self, api: Api, name: str) -> None:
        self._api = api
        self._name = name
        self._resource = leases(api.namespace)
        self._found: dict[str, Any] = {}  # the whole object as last read or written

    async def read(self) -> Lease:
        """As it is now; NOBODY where there is none.

        Raises:
            ApiError: that cannot be told.
        """
        try:
            return self._taken(await self._api.call("get", self._resource, self._name))
        except ApiError as problem:
            if problem.status != NOT_FOUND:
                raise
            self._found = {}
            return NOBODY

    async def write(self, lease: Lease) -> Lease | None:
        """Put a lease in the place of the one that it was made from. None: that is no more so.

        Raises:
            ApiError: it is not known whether it was written.
        """
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")  # for people; nobody counts by it
        spec = self._found.get("spec") or {}
        spec |= {
            "holderIdentity": lease.holder,
            "leaseDurationSeconds": round(lease.duration),
            "acquireTime": lease.acquired or now,
            "renewTime": now,
            "leaseTransitions": lease.transitions,
        }
        thing = {"apiVersion": self._resource.api_version, "kind": "Lease", **self._found}
        thing["spec"] = spec
        try:
            if lease.version:
                thing["metadata"] = thing["metadata"] | {"resourceVersion": lease.version}
                told = await self._api.call("update", self._resource, self._name, body=thing)
            else:
                thing["metadata"] = {"name": self._name, "namespace": self._api.namespace}
                told = await self._api.call("create", self._resource, body=thing)
        except ApiError as problem:
            if problem.status in (NOT_FOUND, CONFLICT):
                return None
            raise
        return self._taken(told)

    def _taken(self, answer: bytes) -> Lease:
        try:
            found = msgspec.json.decode(answer)
            thing = msgspec.convert(found, _Object)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
            raise ApiError(f"{self._name} is no Lease: {problem}") from None
        self._found = found
        spec = thing.spec
        return Lease(
            holder=spec.holder_identity or "",
            duration=float(spec.lease_duration_seconds or 0),
            version=thing.metadata.resource_version,
            transitions=spec.lease_transitions or 0,
            acquired=spec.acquire_time or "",
        )
