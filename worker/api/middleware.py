"""What every request goes through before and after its handler."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
import time
from contextvars import ContextVar

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from worker.api.errors import ApiError
from worker.api.lifecycle import Lifecycle
from worker.loop import EngineDeadError
from worker.metrics import Metrics

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version", "/ping"})
CLIENT_GONE = 499  # nginx's status for it; only metrics and logs see it
DRAIN_RETRY_SECONDS = 5
MAX_REQUEST_ID = 128

request_id: ContextVar[str] = ContextVar("request_id")

_UNSAFE = re.compile(r"[^A-Za-z0-9._:-]")


def safe_id(wanted: str | None) -> str:
    """A client's request id without characters that harm headers and logs, or a new one."""
    return _UNSAFE.sub("", wanted or "")[:MAX_REQUEST_ID] or secrets.token_hex(8)


def error_response(error: ApiError) -> web.Response:
    response = web.Response(body=error.body(), status=error.status, content_type="application/json")
    if error.retry_after is not None:
        response.headers["Retry-After"] = str(error.retry_after)
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def observe(metrics: Metrics, lifecycle: Lifecycle) -> Middleware:
    """Count and time requests, give each an id, and let go of connections while draining."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        request_id.set(safe_id(request.headers.get("X-Request-Id")))
        started = time.perf_counter()
        status = CLIENT_GONE
        try:
            response = await handler(request)
            status = response.status
            if lifecycle.draining and not response.prepared:
                response.force_close()
            return response
        finally:
            seconds = time.perf_counter() - started
            if request.path not in OPEN_PATHS:
                metrics.http(_route(request), request.method, status, seconds)
            if log.isEnabledFor(logging.DEBUG):
                log.debug(
                    "%s: %s %s -> %d in %.1f ms",
                    request_id.get(),
                    request.method,
                    _route(request),
                    status,
                    seconds * 1000,
                )

    return middleware


def answer_errors(
    lifecycle: Lifecycle,
) -> Middleware:
    """Turn whatever a handler raises into an answer that tells no secrets."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ApiError as error:
            if error.status >= 500:
                log.warning("%s: %d %s", request_id.get(), error.status, error.message)
            return error_response(error)
        except EngineDeadError:
            return error_response(ApiError("The engine has stopped", status=503))
        except web.HTTPException as refusal:  # aiohttp's own: no such route, wrong method
            response = error_response(ApiError(refusal.reason, status=refusal.status))
            if "Allow" in refusal.headers:
                response.headers["Allow"] = refusal.headers["Allow"]
            return response
        except asyncio.CancelledError:
            if not recover_from_abort(request, lifecycle):
                raise
            return error_response(shutting_down())
        except ConnectionError:
            raise
        except Exception:
            log.exception("%s: an error in the server", request_id.get())
            return error_response(ApiError("Internal server error", status=500))

    return middleware


def guard(lifecycle: Lifecycle, api_key: str | None) -> Middleware:
    """Let in who has the key while the server takes requests."""
    expected = (api_key or "").encode()

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in OPEN_PATHS:
            return await handler(request)
        if api_key is not None:
            scheme, _, token = request.headers.get("Authorization", "").partition(" ")
            given = token.strip().encode("utf-8", "surrogateescape")
            if scheme.lower() != "bearer" or not hmac.compare_digest(given, expected):
                raise ApiError("The API key is missing or wrong", status=401)
        if lifecycle.draining:
            raise shutting_down()
        task = asyncio.current_task()
        assert task is not None
        lifecycle.enter(task)
        try:
            return await handler(request)
        finally:
            lifecycle.leave(task)

    return middleware


def shutting_down() -> ApiError:
    return ApiError("The server is shutting down", status=503, retry_after=DRAIN_RETRY_SECONDS)


def recover_from_abort(request: web.Request, lifecycle: Lifecycle) -> bool:
    """Whether a cancelled handler can still answer: the server ended it, not the client."""
    if not lifecycle.aborting or request.transport is None:
        return False
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()
    return True


def _route(request: web.Request) -> str:
    """The route's own path: clients cannot invent labels."""
    resource = request.match_info.route.resource
    return "none" if resource is None else resource.canonical
