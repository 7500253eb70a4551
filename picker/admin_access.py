"""Who may read the admin pages: in Kubernetes, whom RBAC lets."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from aiohttp import web

from picker.refusal import Refusal

if TYPE_CHECKING:
    from picker.kubernetes.reviews import Reviews

log = logging.getLogger(__name__)

OPEN = frozenset(("/healthz", "/readyz"))  # for probes, which have no token
CHALLENGE = [("www-authenticate", "Bearer")]

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def guard(reviews: Reviews) -> Any:
    """A middleware: all pages but those of probes need a bearer token that may read them."""
    from picker.kubernetes.reviews import Unreviewed  # its package need not be installed

    told: set[str] = set()  # problems that were logged since it last worked

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in OPEN or request.match_info.http_exception is not None:
            return await handler(request)
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            token = ""
        try:
            found = await reviews.of(token.strip(), request.method.lower(), request.path)
        except Unreviewed as problem:
            if str(problem) not in told:
                told.add(str(problem))
                log.error("Admin pages are closed, since no token can be reviewed: %s", problem)
            why = "the token cannot be reviewed now"
            raise Refusal(503, "unreviewed", why, retry_after=1) from None
        if found is HTTPStatus.UNAUTHORIZED:
            raise Refusal(401, "unauthorized", "send a bearer token", headers=CHALLENGE)
        if found is not HTTPStatus.OK:
            raise Refusal(403, "forbidden", "the token may not read this page")
        told.clear()
        return await handler(request)

    return guarded
