"""A request that is answered by the picker itself."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus

import msgspec

_TYPES = {
    HTTPStatus.BAD_REQUEST: "invalid_request_error",
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.METHOD_NOT_ALLOWED: "invalid_request_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "invalid_request_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "service_unavailable_error",
}
MAX_MESSAGE = 500  # characters: a message may quote the request


class Refusal(Exception):
    """An answer to a request that goes to no pod.

    `reason` is a short machine-readable word: it becomes the error's code, a metric's label and
    the header `x-warmpath-refused`, so it never holds anything that a client sent.
    """

    def __init__(
        self,
        status: int,
        reason: str,
        message: str,
        *,
        retry_after: int | None = None,
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        super().__init__(message)
        self.status = HTTPStatus(status)
        self.reason = reason
        self.message = message[:MAX_MESSAGE]
        self.retry_after = retry_after  # whole seconds, at least 1
        self._more_headers = tuple(headers)

    @property
    def headers(self) -> list[tuple[str, str]]:
        headers = [("content-type", "application/json"), ("x-warmpath-refused", self.reason)]
        if self.retry_after is not None:
            headers.append(("retry-after", str(self.retry_after)))
        return [*headers, *self._more_headers]

    @property
    def body(self) -> bytes:
        """The error as OpenAI shapes it."""
        error = {
            "message": self.message,
            "type": _TYPES.get(self.status, "api_error"),
            "param": None,
            "code": self.reason,
        }
        return msgspec.json.encode({"error": error})


def unknown_method(method: str) -> Refusal:
    return Refusal(405, "unknown_method", f"the method {method[:40]!r} is unknown")


def body_too_large(limit: int) -> Refusal:
    """`limit`: bytes."""
    why = f"the request body is over the limit of {limit} bytes"
    return Refusal(413, "body_too_large", why)
