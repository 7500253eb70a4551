"""What Kubernetes' API says no with, in words that tell what to do."""

from __future__ import annotations

import msgspec

from picker.kubernetes.resource import Resource

MAX_SHOWN = 300  # characters of a server's message
_ALSO_NEEDED = {"list": ("list", "watch"), "watch": ("list", "watch")}


class ApiError(Exception):
    """A call of Kubernetes' API failed."""

    def __init__(self, message: str, status: int | None = None, reason: str = "") -> None:
        """
        Args:
            status: of HTTP; None where there was no answer.
            reason: Kubernetes' word for it, such as Conflict or AlreadyExists.
        """
        super().__init__(message)
        self.status = status
        self.reason = reason


class KindAbsent(ApiError):
    """The cluster knows no such kind of objects: its CRD is not installed."""


class NoAnswer(ApiError):
    """The API server cannot be reached, broke off, or was silent for too long."""


class Status(msgspec.Struct, frozen=True):
    """Kubernetes' own object of errors."""

    kind: str = ""
    message: str = ""
    reason: str = ""
    code: int = 0


def read_status(body: bytes) -> Status:
    """An error as an answer or a watch tells it; without anything in it where that is none."""
    try:
        status = msgspec.json.decode(body, type=Status)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Status()
    return status if status.kind == "Status" else Status()


def refused(verb: str, resource: Resource, http: int, body: bytes) -> ApiError:
    """The error for an answer other than a 2xx."""
    status = read_status(body)
    where = f" in namespace {resource.namespace}" if resource.namespace else ""
    said = _one_line(status.message or body.decode(errors="replace"))
    if http == 403:
        verbs = ", ".join(_ALSO_NEEDED.get(verb, (verb,)))
        kind = "Role" if resource.namespace else "ClusterRole"
        return ApiError(
            f"forbidden to {verb} {resource}{where}: grant a {kind} with apiGroups: "
            f'["{resource.group}"], resources: ["{resource.plural}"], verbs: [{verbs}] ({said})',
            http,
            status.reason,
        )
    if http == 401:
        return ApiError(
            f"cannot {verb} {resource}{where}: the API server does not know us; is the service "
            f"account's token, or the kubeconfig's user, still valid? ({said})",
            http,
            status.reason,
        )
    # The answer to a kind that is unknown is plain text, or a Status without an object's name.
    if http == 404 and verb in ("list", "watch"):
        return KindAbsent(
            f"the cluster has no {resource} of version {resource.version}: is the CRD installed?",
            http,
            status.reason,
        )
    return ApiError(f"cannot {verb} {resource}{where}: {http} {said}", http, status.reason)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_SHOWN else line[: MAX_SHOWN - 3] + "..."
