"""Takes the usage that a client did not ask for out of a stream of server-sent events.

Asked by `stream_options.include_usage`, a server sends it in an event of its own, without choices,
at the end of the stream. All other bytes pass as they come.
"""

from __future__ import annotations

import re

import msgspec

MAX_EVENT = 1 << 16  # bytes; a longer event passes unread, and so does one that is not ended by LF

_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_DATA = b"data:"
_END = re.compile(rb"\n\r?\n")  # of an event, with lines that end in LF or CRLF


class UsageStripper:
    """Takes the extra event out of one stream, however its bytes are cut.

    Holds back an event whose end has not come, at most `MAX_EVENT` bytes of it, and no other byte.
    """

    __slots__ = ("_before", "_begun")

    def __init__(self) -> None:
        self._begun = b""  # an event whose end has not come
        self._before: bytes | None = None  # of an event that is too long, the last bytes passed

    def feed(self, chunk: bytes) -> bytes:
        """The bytes to pass on, after the next ones came."""
        passed = b""
        if self._before is not None:
            seen = self._before + chunk
            ended = _END.search(seen)
            if ended is None:
                self._before = seen[-2:]
                return chunk
            rest = ended.end() - len(self._before)
            passed, chunk = chunk[:rest], chunk[rest:]
            self._before = None
        data = self._begun + chunk if self._begun else chunk
        whole, self._begun = _split(data)
        if len(self._begun) > MAX_EVENT:
            whole += self._begun
            self._before, self._begun = self._begun[-2:], b""
        return passed + whole if passed else whole

    def finish(self) -> bytes:
        """What is left to pass on at the end of the stream."""
        left, self._begun = self._begun, b""
        return b"" if _is_extra(left) else left


def _split(data: bytes) -> tuple[bytes, bytes]:
    """The complete events but for extra ones, and what comes after them."""
    if data.endswith(b"\n\n") and not _USAGE.search(data):
        return data, b""
    kept: list[bytes] = []
    start = 0
    for end in _END.finditer(data):
        event = data[start : end.end()]
        if _is_extra(event):
            event = event[: len(event) - len(event.lstrip(b"\r\n"))]  # empty lines before it
        kept.append(event)
        start = end.end()
    return b"".join(kept), data[start:]


class _Chunk(msgspec.Struct):
    choices: list[msgspec.Raw] | None = None
    usage: dict[str, msgspec.Raw] | None = None


_CHUNK = msgspec.json.Decoder(_Chunk)


def _is_extra(event: bytes) -> bool:
    """Whether an event tells usage and nothing else."""
    if len(event) > MAX_EVENT or not _USAGE.search(event):
        return False
    data = [line[len(_DATA) :] for line in event.splitlines() if line.startswith(_DATA)]
    try:
        chunk = _CHUNK.decode(b"\n".join(data))
    except (msgspec.DecodeError, RecursionError):
        return False
    return chunk.choices == [] and chunk.usage is not None
