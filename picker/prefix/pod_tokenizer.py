"""Token ids from the pods themselves: their own /tokenize, vLLM's and the worker's, over HTTP."""

from __future__ import annotations

from itertools import count, islice
from typing import Any

import aiohttp
import msgspec

from picker.pool import Endpoint, Pool
from picker.prefix.asks import ChatAsk, Missed, MissedError, TextAsk
from picker.prefix.given_ids import read_ids
from text.encoding import Ids

MAX_ANSWER = 32 << 20  # bytes
PODS = 2  # that are asked before giving up
_PER_POD = 8  # connections
_UNUSABLE = frozenset((404, 408, 429))  # of a pod; other refusals are of the prompt


class PodTokenizer:
    """Asks the endpoints of a pool in turn."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._turn = count()
        self._http: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit_per_host=_PER_POD),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def stop(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def ask(self, body: bytes, authorization: str | None) -> bytes:
        """The answer to a POST of `body_of`, to be read by `ids_of`.

        Raises:
            MissedError: no pod answers, or it refuses the prompt.
        """
        headers = {"content-type": "application/json"}
        if authorization is not None:  # the pod that is picked will see it too
            headers["authorization"] = authorization
        for endpoint in self._next():
            answer = await self._post(endpoint, body, headers)
            if answer is not None:
                return answer
        raise MissedError(Missed.FAILED)

    def _next(self) -> list[Endpoint]:
        endpoints = self._pool.endpoints
        if not endpoints:
            return []
        first = next(self._turn) % len(endpoints)
        chosen = list(islice(endpoints.values(), first, first + PODS))
        return chosen + list(islice(endpoints.values(), min(PODS - len(chosen), first)))

    async def _post(self, endpoint: Endpoint, body: bytes, headers: dict[str, str]) -> bytes | None:
        """A pod's answer; None if another one may do better."""
        assert self._http is not None, "started"
        url = f"http://{endpoint.address}/tokenize"
        try:
            async with self._http.post(
                url, data=body, headers=headers, allow_redirects=False
            ) as response:
                if response.status == 200:
                    answer = bytearray()
                    async for chunk in response.content.iter_any():
                        answer += chunk
                        if len(answer) > MAX_ANSWER:
                            raise MissedError(Missed.LONG)
                    return bytes(answer)
                if 400 <= response.status < 500 and response.status not in _UNUSABLE:
                    raise MissedError(Missed.TEMPLATE)
        except (aiohttp.ClientError, OSError):
            pass
        return None


class _Answer(msgspec.Struct):
    tokens: msgspec.Raw


_ANSWER = msgspec.json.Decoder(_Answer)


def body_of(ask: TextAsk | ChatAsk) -> bytes:
    """The body of a request for the tokens of an ask. Without a model, it is the pods' own."""
    if isinstance(ask, TextAsk):
        return msgspec.json.encode(
            {"prompt": ask.text, "add_special_tokens": ask.add_special_tokens}
        )
    template = ask.template
    continues = template.continue_final_message
    body: dict[str, Any] = {
        "messages": ask.messages,
        "tools": template.tools,
        # Both at once would be refused.
        "add_generation_prompt": template.add_generation_prompt and not continues,
        "continue_final_message": continues,
        "add_special_tokens": template.add_special_tokens,
        "chat_template_kwargs": template.kwargs,
    }
    return msgspec.json.encode({name: value for name, value in body.items() if value is not None})


def ids_of(answer: bytes) -> Ids:
    """The token ids in an answer.

    Raises:
        MissedError: there are none in it.
    """
    try:
        return read_ids(bytes(_ANSWER.decode(answer).tokens))
    except msgspec.DecodeError:
        raise MissedError(Missed.FAILED) from None
