"""A request's sequences while the engine runs them: tokens in, text out.

`Generation` owns the sequences of one request and ends them in the engine when it is left,
however that happens: an answer complete, an error, or a client that went away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from types import TracebackType
from typing import Any, Literal, NamedTuple

from text.detokenizer import Detokenizer
from worker.api.errors import ApiError
from worker.api.prompts import Prompt
from worker.loop import Stream
from worker.sequence import FinishReason, Output, TokenLogprobs


class Delta(NamedTuple):
    """What a choice gained since the last one."""

    text: str = ""
    token_ids: list[int] = []  # noqa: RUF012  # never changed
    logprobs: list[TokenLogprobs] = []  # noqa: RUF012
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class Choice:
    """One answer to one prompt, in the making."""

    def __init__(
        self,
        index: int,
        prompt: Prompt,
        stream: Stream,
        detokenizer: Detokenizer,
        *,
        own_ends: frozenset[int],
        show_stop_token: bool,
        prompt_only: bool,
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.num_tokens = 0  # generated and shown
        self.num_cached_tokens = 0  # of the prompt
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._stream = stream
        self._detokenizer = detokenizer
        self._own_ends = own_ends  # stop tokens that are not worth a stop_reason
        self._show_stop_token = show_stop_token
        self._prompt_only = prompt_only

    async def next(self) -> Delta:
        """What came from the engine since the last call; the last has a finish reason.

        Raises:
            ApiError: the engine failed.
        """
        return self._read(await self._stream.next())

    async def whole(self) -> Delta:
        """The complete answer."""
        text: list[str] = []
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        delta = Delta()
        while delta.finish_reason is None:
            delta = await self.next()
            text.append(delta.text)
            token_ids += delta.token_ids
            logprobs += delta.logprobs
        return Delta("".join(text), token_ids, logprobs, delta.finish_reason, delta.stop_reason)

    def end(self, reason: Literal["stop", "abort"]) -> None:
        """Have the engine drop the sequence, unless it has ended."""
        self._stream.end(reason)

    def _read(self, outputs: list[Output]) -> Delta:
        text = ""
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        for output in outputs:
            if output.finish_reason == "error":
                raise ApiError("The engine failed while it generated the answer", status=500)
            if output.num_cached_tokens:
                self.num_cached_tokens = output.num_cached_tokens
            if output.prompt_logprobs is not None:
                self.prompt_logprobs = output.prompt_logprobs
            if self._prompt_only:
                return Delta(finish_reason="length")
            if output.token_id is not None:
                token_ids.append(output.token_id)
                self.num_tokens += 1
                if output.finish_reason != "stop" or self._show_stop_token:
                    text += self._detokenizer.push(output.token_id)
            if output.logprobs is not None:
                logprobs.append(output.logprobs)
            stopped = self._detokenizer.stopped
            if stopped is not None:
                self.end("stop")
                return Delta(text, token_ids, logprobs, "stop", stopped)
            if output.finish_reason is not None:
                text += self._detokenizer.finish()
                stop_reason = None if output.stop_reason in self._own_ends else output.stop_reason
                return Delta(text, token_ids, logprobs, output.finish_reason, stop_reason)
        return Delta(text, token_ids, logprobs)


class Usage(NamedTuple):
    """Tokens of a request, counted."""

    prompt: int
    completion: int
    cached: int  # of the prompt tokens


class Generation:
    """All choices of one request, ordered by prompt and then by number."""

    def __init__(self) -> None:
        self.choices: list[Choice] = []

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for choice in self.choices:
            choice.end("abort")

    def usage(self, choices_per_prompt: int) -> Usage:
        """A prompt counts once, however many answers it gets; its first choice found it cold."""
        firsts = self.choices[::choices_per_prompt]
        return Usage(
            prompt=sum(len(choice.prompt.token_ids) for choice in firsts),
            completion=sum(choice.num_tokens for choice in self.choices),
            cached=sum(choice.num_cached_tokens for choice in firsts),
        )

    async def answers(self) -> list[Delta]:
        """The complete answers."""
        return await together(choice.whole() for choice in self.choices)

    async def relay(self, send: Callable[[Choice], Coroutine[Any, Any, None]]) -> None:
        """Run `send` for every choice, all at the same time."""
        await together(send(choice) for choice in self.choices)


async def together(coroutines: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Await all at once; the first failure cancels the others and is raised as it is."""
    first, *others = coroutines
    if not others:
        return [await first]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in (first, *others)]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
