"""Asks Kubernetes who a bearer token is, and whether they may read a page.

TokenReview tells the user, SubjectAccessReview whether RBAC allows them a nonResourceURL: `get` of
`/metrics`, say. What was found is kept for a short time, by a hash: no token is.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from hashlib import sha256
from http import HTTPStatus
from typing import Any

import msgspec

from picker.kubernetes.client import Api
from picker.kubernetes.errors import ApiError
from picker.kubernetes.resource import ACCESS_REVIEWS, TOKEN_REVIEWS, Resource

ALLOWED_SECONDS = 60.0  # that a yes is kept, and so how late a revocation may be seen
DENIED_SECONDS = 10.0
MAX_KEPT = 1024
MAX_AT_ONCE = 8  # that are being asked about
SECONDS = 5.0  # for both answers


class Unreviewed(Exception):
    """It cannot be told whether a token may do something. The message is for the log."""


class _User(msgspec.Struct):
    username: str = ""
    uid: str = ""
    groups: list[str] = []
    extra: dict[str, list[str]] = {}


class _TokenStatus(msgspec.Struct):
    authenticated: bool = False
    user: _User = msgspec.field(default_factory=_User)


class _TokenReview(msgspec.Struct):
    status: _TokenStatus = msgspec.field(default_factory=_TokenStatus)


class _AccessStatus(msgspec.Struct):
    allowed: bool = False
    denied: bool = False


class _AccessReview(msgspec.Struct):
    status: _AccessStatus = msgspec.field(default_factory=_AccessStatus)


class Reviews:
    """What tokens may do."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._kept: OrderedDict[bytes, tuple[HTTPStatus, float]] = OrderedDict()  # and until when
        self._asking: dict[bytes, asyncio.Task[HTTPStatus]] = {}

    async def of(self, token: str, verb: str, path: str) -> HTTPStatus:
        """200 if the token may do `verb` (of HTTP, in lower case) to `path`, 401 if it is nobody's,
        403 if they may not.

        Raises:
            Unreviewed: Kubernetes does not answer, or too many wait for it.
        """
        if not token:
            return HTTPStatus.UNAUTHORIZED
        key = sha256("\0".join((verb, path, token)).encode(errors="replace")).digest()
        kept = self._kept.get(key)
        if kept is not None and time.monotonic() < kept[1]:
            return kept[0]
        task = self._asking.get(key)
        if task is None:
            if len(self._asking) >= MAX_AT_ONCE:
                raise Unreviewed(f"{MAX_AT_ONCE} tokens are being reviewed")
            task = self._asking[key] = asyncio.create_task(self._ask(key, token, verb, path))
            task.add_done_callback(lambda _: self._asking.pop(key, None))
        return await asyncio.shield(task)  # others wait for it, too

    async def stop(self) -> None:
        for task in list(self._asking.values()):
            task.cancel()

    async def _ask(self, key: bytes, token: str, verb: str, path: str) -> HTTPStatus:
        try:
            async with asyncio.timeout(SECONDS):
                found = await self._review(token, verb, path)
        except (ApiError, TimeoutError) as problem:
            why = str(problem) or "Kubernetes' API does not answer in time"
            raise Unreviewed(why) from None
        seconds = ALLOWED_SECONDS if found is HTTPStatus.OK else DENIED_SECONDS
        self._kept[key] = found, time.monotonic() + seconds
        self._kept.move_to_end(key)
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return found

    async def _review(self, token: str, verb: str, path: str) -> HTTPStatus:
        told = await self._create(TOKEN_REVIEWS, "TokenReview", {"token": token}, _TokenReview)
        if not told.status.authenticated:
            return HTTPStatus.UNAUTHORIZED
        user = told.status.user
        spec = {
            "user": user.username,
            "uid": user.uid,
            "groups": user.groups,
            "extra": user.extra,
            "nonResourceAttributes": {"path": path, "verb": verb},
        }
        access = await self._create(ACCESS_REVIEWS, "SubjectAccessReview", spec, _AccessReview)
        allowed = access.status.allowed and not access.status.denied
        return HTTPStatus.OK if allowed else HTTPStatus.FORBIDDEN

    async def _create(
        self, resource: Resource, kind: str, spec: dict[str, Any], answer: type[Any]
    ) -> Any:
        review = {"apiVersion": resource.api_version, "kind": kind, "metadata": {}, "spec": spec}
        told = await self._api.call("create", resource, body=review)
        try:
            return msgspec.json.decode(told, type=answer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
            raise ApiError(f"the answer to a {kind} is none: {problem}") from None
