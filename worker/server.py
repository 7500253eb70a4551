"""The OpenAI-compatible HTTP API of a worker, on aiohttp: routes and the small endpoints.

worker/api/endpoints.py runs the model; worker/api/serving.py listens, drains and stops.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from aiohttp import web

from worker.api.bodies import BodyLimits, BodyReader
from worker.api.endpoints import Generate, Tokens, json_response
from worker.api.lifecycle import LIFECYCLE, Lifecycle
from worker.api.middleware import answer_errors, guard, observe
from worker.api.models import Models
from worker.api.params import ModelLimits
from worker.api.prompts import PromptReader, Tokenizer
from worker.api.responses import VERSION
from worker.loop import EngineLoop
from worker.metrics import CONTENT_TYPE, Metrics


def make_app(
    *,
    loop: EngineLoop,
    tokenizer: Tokenizer,
    metrics: Metrics,
    model_names: Sequence[str],
    api_key: str | None = None,
    kv_event_sources: Mapping[str, object] | None = None,
    body_limits: BodyLimits = BodyLimits(),  # noqa: B008  # immutable
) -> web.Application:
    """The application of one worker.

    The first of `model_names` is the model's own, the others are aliases. `kv_event_sources` is
    served as it is.
    """
    lifecycle = Lifecycle()
    limits = ModelLimits(
        max_model_len=loop.config.max_model_len,
        vocab_size=tokenizer.vocab_size,
        eos_ids=tokenizer.eos_ids,
    )
    models = Models(model_names, limits.max_model_len)
    prompts = PromptReader(tokenizer, limits)
    bodies = BodyReader(body_limits)
    generate = Generate(loop, tokenizer, metrics, limits, models, prompts, bodies, lifecycle)
    tokens = Tokens(limits, models, prompts, bodies)
    status = Status(loop, metrics, models, lifecycle, kv_event_sources or {})

    async def close_prompts(app: web.Application) -> AsyncIterator[None]:
        yield
        prompts.close()

    app = web.Application(
        middlewares=[
            observe(metrics, lifecycle),
            answer_errors(lifecycle),
            guard(lifecycle, api_key),
        ]
    )
    app[LIFECYCLE] = lifecycle
    app.cleanup_ctx.append(close_prompts)
    app.add_routes(
        [
            web.post("/v1/completions", generate.completions),
            web.post("/v1/chat/completions", generate.chat),
            web.post("/v1/completions/render", generate.render_completions),
            web.post("/v1/chat/completions/render", generate.render_chat),
            web.post("/tokenize", tokens.tokenize),
            web.post("/detokenize", tokens.detokenize),
            web.get("/v1/models", status.models),
            web.get("/v1/models/{name:.+}", status.model),
            web.get("/health", status.health),
            web.get("/ping", status.health),
            web.post("/ping", status.health),
            web.get("/ready", status.ready),
            web.get("/load", status.load),
            web.get("/metrics", status.metrics),
            web.get("/version", status.version),
            web.get("/kv_event_sources", status.kv_event_sources),
            web.post("/reset_prefix_cache", status.reset_prefix_cache),
        ]
    )
    return app


@dataclass(frozen=True, slots=True)
class Status:
    """The endpoints that tell how the worker is, for probes, scrapers and operators."""

    _loop: EngineLoop
    _metrics: Metrics
    _models: Models
    _lifecycle: Lifecycle
    _kv_event_sources: Mapping[str, object]

    async def health(self, request: web.Request) -> web.Response:
        """200 while the engine lives, draining or not."""
        return web.Response(status=200 if self._loop.healthy else 503)

    async def ready(self, request: web.Request) -> web.Response:
        """200 while new requests are welcome."""
        welcome = self._lifecycle.ready and self._loop.healthy
        return web.Response(status=200 if welcome else 503)

    async def models(self, request: web.Request) -> web.Response:
        return json_response(self._models.cards())

    async def model(self, request: web.Request) -> web.Response:
        return json_response(self._models.card(request.match_info["name"]))

    async def load(self, request: web.Request) -> web.Response:
        """How many requests are being served, this one not counted."""
        return json_response({"server_load": self._lifecycle.num_active - 1})

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def version(self, request: web.Request) -> web.Response:
        return json_response({"version": VERSION})

    async def kv_event_sources(self, request: web.Request) -> web.Response:
        return json_response(self._kv_event_sources)

    async def reset_prefix_cache(self, request: web.Request) -> web.Response:
        """Forget all cached prefixes; `success` is false while requests run."""
        return json_response({"success": await self._loop.reset_prefix_cache()})
