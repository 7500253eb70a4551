"""The endpoints that take prompts: they run the model, or show what it would be given."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from text.detokenizer import Detokenizer
from worker.api.bodies import BodyReader
from worker.api.errors import ApiError
from worker.api.generation import Choice, Generation
from worker.api.lifecycle import Lifecycle
from worker.api.middleware import recover_from_abort, request_id, safe_id, shutting_down
from worker.api.models import Models
from worker.api.params import ModelLimits, check_request, for_choice, sampling_params
from worker.api.prompts import Prompt, PromptReader, Tokenizer
from worker.api.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
    parser,
)
from worker.api.rendered import rendered
from worker.api.responses import DONE, Answer, ChatAnswer, CompletionAnswer, event
from worker.api.sse import EventStream
from worker.loop import EngineLoop, QueueFullError
from worker.metrics import Metrics

log = logging.getLogger(__name__)

QUEUE_RETRY_SECONDS = 1

_parse_completion = parser(CompletionRequest)
_parse_chat = parser(ChatRequest)
_parse_tokenize = parser(TokenizeRequest)
_parse_detokenize = parser(DetokenizeRequest)


def json_response(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


@dataclass(frozen=True, slots=True)
class Generate:
    """Completions and chats."""

    _loop: EngineLoop
    _tokenizer: Tokenizer
    _metrics: Metrics
    _limits: ModelLimits
    _models: Models
    _prompts: PromptReader
    _bodies: BodyReader
    _lifecycle: Lifecycle

    async def completions(self, request: web.Request) -> web.StreamResponse:
        ask, model = await self._completion(request)
        prompts = await self._prompts.of_completion(ask)
        answer = CompletionAnswer(ask, _id(request, ask), model, self._tokenizer)
        return await self._answer(request, prompts, answer)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        ask, model = await self._chat(request)
        prompts = [await self._prompts.of_chat(ask)]
        answer = ChatAnswer(ask, _id(request, ask), model, self._tokenizer)
        return await self._answer(request, prompts, answer)

    async def render_completions(self, request: web.Request) -> web.Response:
        """What the engine would be given, without running it."""
        ask, model = await self._completion(request)
        prompts = await self._prompts.of_completion(ask)
        answer = CompletionAnswer(ask, _id(request, ask), model, self._tokenizer)
        return json_response([self._rendered(answer, prompt) for prompt in prompts])

    async def render_chat(self, request: web.Request) -> web.Response:
        """What the engine would be given, without running it."""
        ask, model = await self._chat(request)
        prompt = await self._prompts.of_chat(ask)
        answer = ChatAnswer(ask, _id(request, ask), model, self._tokenizer)
        return json_response(self._rendered(answer, prompt))

    async def _completion(self, request: web.Request) -> tuple[CompletionRequest, str]:
        ask = _parse_completion(await self._bodies.read(request))
        model = self._models.resolve(ask.model)
        check_request(ask, self._limits)
        return ask, model

    async def _chat(self, request: web.Request) -> tuple[ChatRequest, str]:
        ask = _parse_chat(await self._bodies.read(request))
        model = self._models.resolve(ask.model)
        check_request(ask, self._limits)
        return ask, model

    def _rendered(self, answer: Answer, prompt: Prompt) -> dict[str, Any]:
        params = sampling_params(answer.ask, len(prompt.token_ids), self._limits)
        return rendered(answer, prompt, params)

    async def _answer(
        self, request: web.Request, prompts: list[Prompt], answer: Answer
    ) -> web.StreamResponse:
        with Generation() as generation:
            for prompt in prompts:
                self._submit(generation, prompt, answer.ask)
            if answer.ask.stream:
                return await self._stream(request, generation, answer)
            deltas = await generation.answers()
            if answer.shows_tokens:  # there may be very many
                body = await asyncio.to_thread(answer.whole, generation, deltas)
            else:
                body = answer.whole(generation, deltas)
            return web.Response(body=body, content_type="application/json")

    def _submit(self, generation: Generation, prompt: Prompt, ask: GenerationRequest) -> None:
        """Hand every choice of a prompt to the engine."""
        params = sampling_params(ask, len(prompt.token_ids), self._limits)
        for number in range(ask.num_choices):
            try:
                stream = self._loop.submit(
                    prompt.token_ids,
                    for_choice(params, number),
                    priority=ask.priority or 0,
                    cache_salt=ask.cache_salt,
                )
            except QueueFullError:
                self._metrics.rejected("max_num_queued_reqs")
                raise ApiError(
                    "Too many requests are waiting; try again later",
                    status=503,
                    retry_after=QUEUE_RETRY_SECONDS,
                ) from None
            detokenizer = Detokenizer(
                self._tokenizer,
                prompt.token_ids,
                ask.stop_strings,
                include_stop=bool(ask.include_stop_str_in_output),
                skip_special_tokens=ask.hides_specials,
                min_tokens=params.min_tokens,
            )
            choice = Choice(
                len(generation.choices),
                prompt,
                stream,
                detokenizer,
                own_ends=frozenset() if ask.ignore_eos else self._limits.eos_ids,
                show_stop_token=bool(ask.include_stop_str_in_output),
                prompt_only=isinstance(ask, CompletionRequest) and ask.wants_prompt_only,
            )
            generation.choices.append(choice)

    async def _stream(
        self, request: web.Request, generation: Generation, answer: Answer
    ) -> web.StreamResponse:
        events = EventStream(request)

        async def send(choice: Choice) -> None:
            finished = False
            while not finished:
                delta = await choice.next()
                await events.send(answer.chunks(choice, delta))
                finished = delta.finish_reason is not None

        last = DONE
        try:
            await generation.relay(send)
            if answer.ask.includes_usage:
                last = answer.usage_chunk(generation) + DONE
        except ApiError as error:
            if not events.started:
                raise
            last = event(error.body()) + DONE
        except ConnectionError:
            raise
        except Exception:
            if not events.started:
                raise
            log.exception("%s: an error in the server", request_id.get())
            last = event(ApiError("Internal server error", status=500).body()) + DONE
        except asyncio.CancelledError:
            if not (events.started and recover_from_abort(request, self._lifecycle)):
                raise
            last = event(shutting_down().body()) + DONE
        await events.close(last)
        return events.response


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokenising without running the model."""

    _limits: ModelLimits
    _models: Models
    _prompts: PromptReader
    _bodies: BodyReader

    async def tokenize(self, request: web.Request) -> web.Response:
        ask = _parse_tokenize(await self._bodies.read(request))
        self._models.resolve(ask.model)
        ids = await self._prompts.of_tokenize(ask)
        return json_response(
            {
                "count": len(ids),
                "max_model_len": self._limits.max_model_len,
                "tokens": ids,
                "token_strs": await self._prompts.strings_of(ids)
                if ask.return_token_strs
                else None,
            }
        )

    async def detokenize(self, request: web.Request) -> web.Response:
        ask = _parse_detokenize(await self._bodies.read(request))
        self._models.resolve(ask.model)
        return json_response({"prompt": await self._prompts.text_of(ask.tokens)})


def _id(request: web.Request, ask: GenerationRequest) -> str:
    """The request's id: from its header, else from its body, else made up."""
    if "X-Request-Id" not in request.headers and ask.request_id:
        request_id.set(safe_id(ask.request_id))
    return request_id.get()
