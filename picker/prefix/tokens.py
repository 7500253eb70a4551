"""The token ids of prompts, made with the model's own tokenizer and chat template.

A tokenizer on this machine works on threads, so that no prompt holds up the picks of others; short
prompts are done at once, since a thread would take longer than they do. Without one, the pods are
asked: see `pod_tokenizer`. What was made before is remembered: whole prompts by what was asked, and
the pieces of chats.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from picker import config
from picker.document import ConfigError
from picker.pool import Pool
from picker.prefix.asks import ChatAsk, Missed, MissedError, TextAsk, ask_of, key_of
from picker.prefix.given_ids import all_given_ids, given_ids
from picker.prefix.match import Prepare
from picker.prefix.pod_tokenizer import PodTokenizer, body_of, ids_of
from picker.prompt import has_media, is_one
from picker.request import Kind, LLMRequest
from text.chat_messages import ChatTemplateError
from text.encoding import Encoder, Ids, Remembered, open_encoder

T = TypeVar("T")

PODS = "pods"  # the setting that has the pods asked
LARGE_BYTES = 32 << 10  # of JSON; reading more may take a millisecond
INLINE_BYTES = 768  # of a body whose prompt takes a quarter of a millisecond, about
MAX_BYTES = 2 << 20  # of a body; to read more of it at once would hold Python's lock for too long
MAX_WAITING = 64  # prompts that wait for their tokens
MAX_SECONDS = 1.0  # that a prompt waits; then it goes on without its tokens
FIRST_PACE = 5e-7  # seconds that a thread takes for a byte of a body, until it is known
THREADS = max(1, min(4, (os.cpu_count() or 2) - 1))
NICE = 10  # of the tokenizer's threads
PIECES_BYTES = 256 << 20  # remembered of chats
PROMPTS_BYTES = 64 << 20  # remembered of whole prompts
log = logging.getLogger(__name__)


class Tokens:
    """Makes the tokens of requests. `missed` counts those that had none to be had, by reason."""

    def __init__(self, pool: Pool, settings: config.Prefix) -> None:
        self.missed = dict.fromkeys(Missed, 0)
        self._name = settings.tokenizer
        self._pods = PodTokenizer(pool) if settings.tokenizer == PODS else None
        self._encoder: Encoder | None = None
        self._prompts = Remembered(PROMPTS_BYTES)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokens")
        self._waiting = 0
        self._waiting_bytes = 0
        self._pace = FIRST_PACE
        self._faults: set[type[Exception]] = set()  # that were logged

    async def start(self) -> None:
        """Load the tokenizer.

        Raises:
            ConfigError: there is none of the name in the settings, or it cannot be used.
        """
        if self._pods is not None:
            await self._pods.start()
            return
        try:
            self._encoder = await _on_nice_thread(open_encoder, self._name, PIECES_BYTES)
        except ModuleNotFoundError as problem:
            raise ConfigError(
                f"prefix.tokenizer: {self._name!r} needs the Python package {problem.name}: "
                "pip install 'warmpath[events]'"
            ) from problem
        except (ValueError, OSError) as problem:
            raise ConfigError(f"prefix.tokenizer: {problem}") from problem

    async def stop(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._pods is not None:
            await self._pods.stop()

    def prepare(self, request: LLMRequest) -> Prepare | None:
        """Set a request's `token_ids`, and `prompt_tokens` by them, if they can be had.

        Returns:
            What has to be called, and waited for, until then; or None.
        """
        try:
            return self._prepare(request)
        except Exception as problem:
            self._miss(problem)
            return None

    def _prepare(self, request: LLMRequest) -> Prepare | None:
        if request.kind is Kind.OTHER or not request.prompt:
            return None
        if len(request.body) > MAX_BYTES:
            raise MissedError(Missed.LONG)
        ids = given_ids(request)
        if ids is not None and not request.unread:
            request.token_ids = ids
            return None
        if ids is not None:  # very many, which were not all read
            return partial(
                self._wait, request, b"", lambda: self._on_thread(all_given_ids, request)
            )
        if request.unread:
            raise MissedError(Missed.LONG)
        if has_media(request.prompt):
            raise MissedError(Missed.MEDIA)
        key = key_of(request)
        known = self._prompts.get(key)
        if known is not None:
            _take(request, known)
            return None
        if self._pods is not None:
            pods = self._pods
            return partial(self._wait, request, key, lambda: self._from_pod(pods, request))
        encoder = self._encoder
        if encoder is None:
            raise MissedError(Missed.FAILED)
        if len(request.body) <= INLINE_BYTES:
            ask = ask_of(request)
            if isinstance(ask, TextAsk) or ask.template.is_plain:
                self._keep(request, key, _encoded(encoder, ask))
                return None
        # Also what is short but has variables: how long a template takes over them, nobody knows.
        return partial(self._wait, request, key, lambda: self._encode(encoder, request))

    async def _wait(
        self, request: LLMRequest, key: bytes, make: Callable[[], Awaitable[Ids]]
    ) -> None:
        size = len(request.body)
        if self._is_busy(size):
            self.missed[Missed.BUSY] += 1
            return
        self._waiting += 1
        self._waiting_bytes += size
        try:
            async with asyncio.timeout(MAX_SECONDS):
                self._keep(request, key, await make())
        except Exception as problem:
            self._miss(problem)
        finally:
            self._waiting -= 1
            self._waiting_bytes -= size

    def _is_busy(self, size: int) -> bool:
        """Whether a body of so many bytes would wait in vain, behind those that are waiting."""
        if self._waiting == 0:
            return False
        if self._waiting >= MAX_WAITING:
            return True
        seconds = (self._waiting_bytes + size) * self._pace / THREADS
        return self._pods is None and seconds > MAX_SECONDS / 2

    async def _from_pod(self, pods: PodTokenizer, request: LLMRequest) -> Ids:
        large = len(request.body) > LARGE_BYTES
        body = await self._on_thread(_body, request) if large else _body(request)
        answer = await pods.ask(body, request.headers.get("authorization"))
        large = len(answer) > LARGE_BYTES
        return await self._on_thread(ids_of, answer) if large else ids_of(answer)

    async def _encode(self, encoder: Encoder, request: LLMRequest) -> Ids:
        ids, seconds = await self._on_thread(_timed, encoder, request)
        self._pace += 0.1 * (seconds / len(request.body) - self._pace)
        return ids

    async def _on_thread(self, function: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    def _keep(self, request: LLMRequest, key: bytes, ids: Ids) -> None:
        _take(request, ids)
        if key:
            self._prompts.keep(key, ids)

    def _miss(self, problem: Exception) -> None:
        """Count a prompt without tokens. Each kind of fault in code is logged once."""
        reason = _reason(problem)
        self.missed[reason] += 1
        if reason is Missed.FAILED and type(problem) not in self._faults:
            self._faults.add(type(problem))
            fault = None if isinstance(problem, MissedError) else problem
            log.error("The tokens of a prompt could not be made", exc_info=fault)


async def _on_nice_thread(function: Callable[..., T], *args: object) -> T:
    """Call a function on a thread of its own, which lets others have the processor first.

    The tokenizers library starts its own threads when it is first used, and they inherit this: so
    where processors are few, the event loop does not queue behind them. They never hold Python's
    lock. Measured on two busy cores, with twenty prompts of 100 KB a second: the 99th percentile of
    other picks was 1.4 to 2 times what it is without those, and 2.6 to 3.3 times before this.
    """

    def nicely() -> T:
        os.environ.setdefault("RAYON_NUM_THREADS", str(THREADS))  # how many the library starts
        if sys.platform == "linux":  # where a thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        return function(*args)

    thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, nicely)
    finally:
        thread.shutdown(wait=False)


def _take(request: LLMRequest, ids: Ids) -> None:
    request.token_ids = ids
    if is_one(request.prompt):
        request.prompt_tokens = len(ids)


def _timed(encoder: Encoder, request: LLMRequest) -> tuple[Ids, float]:
    """A prompt's tokens, and how many seconds they took."""
    started = time.perf_counter()
    return _encoded(encoder, ask_of(request)), time.perf_counter() - started


def _body(request: LLMRequest) -> bytes:
    return body_of(ask_of(request))


def _encoded(encoder: Encoder, ask: TextAsk | ChatAsk) -> Ids:
    if isinstance(ask, TextAsk):
        return encoder.encode(ask.text, ask.add_special_tokens)
    if not encoder.has_chat_template:
        raise MissedError(Missed.TEMPLATE)
    text = ask.template.render(encoder.renderer, ask.messages)
    if len(text) > MAX_BYTES:
        raise MissedError(Missed.LONG)
    return encoder.encode(text, ask.template.add_special_tokens)


def _reason(problem: Exception) -> Missed:
    if isinstance(problem, MissedError):
        return problem.reason
    if isinstance(problem, ChatTemplateError):
        return Missed.TEMPLATE
    if isinstance(problem, TimeoutError):
        return Missed.SLOW
    return Missed.FORM if isinstance(problem, RecursionError) else Missed.FAILED
