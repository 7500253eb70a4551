"""Prompts that are token ids already, and lists of token ids in JSON."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
import numpy as np

from picker.prefix.asks import Missed, MissedError
from picker.prompt import first_ids
from picker.request import LLMRequest
from text.encoding import Ids

Raw = msgspec.Raw
_UNSET = Raw()


class _Given(msgspec.Struct):
    token_ids: Raw = _UNSET
    input_ids: Raw = _UNSET
    prompt: Raw = _UNSET
    input: Raw = _UNSET


_GIVEN = msgspec.json.Decoder(_Given)
_ID_LIST = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]])
_OPENING = re.compile(rb"\s*\[\s*\[?")
_STEP = 1 << 16  # bytes decoded at a time, so that other threads get their turn


def given_ids(request: LLMRequest) -> Ids | None:
    """The token ids of a request that gives them, of several prompts the first; None: a text.

    They are those that were read with it. If it has `unread` ones, `all_given_ids` reads them.

    Raises:
        MissedError: the engine takes only a part of them.
    """
    ids = first_ids(request.prompt)
    if ids is not None and b'"truncate_prompt_tokens"' in request.body:
        raise MissedError(Missed.FORM)
    return ids


def all_given_ids(request: LLMRequest) -> Ids:
    """As `given_ids`, however many there are.

    Raises:
        MissedError: there is something else among them.
    """
    found = _GIVEN.decode(request.body)
    for raw in (found.token_ids, found.input_ids, found.prompt, found.input):
        if bytes(raw).startswith(b"["):
            return read_ids(bytes(raw))
    raise MissedError(Missed.FORM)


def read_ids(value: bytes) -> Ids:
    """The token ids of a JSON list of them, or of the first list in one of lists.

    Raises:
        MissedError: there is something else in it.
    """
    opening = _OPENING.match(value)
    end = value.find(b"]")
    if opening is None or end < 0:
        raise MissedError(Missed.FORM)
    start = opening.end()
    parts = []
    try:
        while start < end:
            stop = value.find(b",", start + _STEP, end)
            stop = end if stop < 0 else stop
            parts.append(np.array(_ID_LIST.decode(b"[%b]" % value[start:stop]), np.uint32))
            start = stop + 1
    except msgspec.DecodeError:
        raise MissedError(Missed.FORM) from None
    return np.concatenate(parts) if parts else np.empty(0, np.uint32)
