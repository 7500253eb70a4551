"""Reads request bodies within bounds of size, time and memory."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from aiohttp import web

from worker.api.errors import ApiError

# Brackets and commas in one body. JSON of little else takes fifty times its size in memory, and
# seconds to parse; two million allow for 128 prompts of as many tokens as most models take.
MAX_MARKS = 2_000_000


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """What clients may send."""

    max_bytes: int = 32 << 20  # of one body
    max_total_bytes: int = 256 << 20  # of all bodies that are being read
    seconds: float = 60.0  # from a request's headers to the end of its body


class BodyReader:
    """Reads bodies of `application/json`; knows how much memory they take together."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._total = 0

    async def read(self, request: web.Request) -> bytes:
        """The whole body.

        Raises:
            ApiError: it is no JSON, compressed, too large, too slow or broken; or all
                bodies together are too large at this moment.
        """
        self._check_headers(request)
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.seconds):
                async for chunk in request.content.iter_any():
                    self._total += len(chunk)
                    body += chunk
                    self._check_size(len(body))
        except TimeoutError:
            raise ApiError("The request body did not arrive in time", status=408) from None
        except web.RequestPayloadError:
            raise ApiError("The request body is broken") from None
        finally:
            self._total -= len(body)
        if len(body) > MAX_MARKS and sum(map(body.count, (b"[", b"{", b","))) > MAX_MARKS:
            raise ApiError("The request body holds too many values", status=413)
        return bytes(body)

    def _check_headers(self, request: web.Request) -> None:
        if request.content_type != "application/json" or "Content-Type" not in request.headers:
            raise ApiError("Unsupported Media Type: Only 'application/json' is allowed")
        # A few compressed bytes can become gigabytes, and no client of this API compresses.
        encoding = request.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            raise ApiError("Compressed request bodies are not supported", status=415)
        self._check_size(request.content_length or 0)

    def _check_size(self, size: int) -> None:
        if size > self._limits.max_bytes:
            raise ApiError(
                f"The request body is larger than {self._limits.max_bytes} bytes", status=413
            )
        if self._total > self._limits.max_total_bytes:
            raise ApiError("Too many large requests at the same time", status=503, retry_after=1)
