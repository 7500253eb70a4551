"""What a client is told when a request fails: OpenAI's error object, as vLLM fills it."""

from __future__ import annotations

import msgspec

MAX_MESSAGE = 500  # characters: an answer to bad input stays small, however large the input
MAX_VALUE = 40  # characters of a client's value repeated to it

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class ApiError(Exception):
    """A request that cannot be served, with the HTTP status to say so.

    `param` names the field at fault; `retry_after` is in seconds.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = _cut(message, MAX_MESSAGE)
        self.status = status
        self.param = param
        self.retry_after = retry_after

    def body(self) -> bytes:
        """The JSON object `{"error": {message, type, param, code}}`."""
        error = {
            "message": self.message,
            "type": _TYPES.get(self.status, "APIError"),
            "param": self.param,
            "code": self.status,
        }
        return msgspec.json.encode({"error": error})


def require(condition: bool, name: str, rule: str, value: object) -> None:
    """Raise a 400 unless `condition`: "`name` must be `rule`, got `value`"."""
    if not condition:
        shown = show(value)
        raise ApiError(
            f"{name} must be {rule}, got {shown}. (parameter={name}, value={shown})", param=name
        )


def show(value: object) -> str:
    """A client's value, short enough to be repeated in a message."""
    return _cut(str(value), MAX_VALUE)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."
