"""Keeps the objects of one kind as the cluster has them: list, then watch, for ever.

kubernetes-asyncio's own Watch is not used: it answers 410 by asking for the same version again,
waits for ever on a connection that is half open, and decodes each object whole.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import StrEnum
from typing import Generic, TypeVar

import aiohttp
import msgspec

from picker.kubernetes.client import Api
from picker.kubernetes.errors import ApiError, KindAbsent, NoAnswer, Status
from picker.kubernetes.objects import Bare, Identity, Thing
from picker.kubernetes.pace import Backoff, Pace
from picker.kubernetes.resource import Resource

log = logging.getLogger(__name__)

PAGE = 100  # objects of one answer: about a megabyte of pods
MAX_LINE = 8 << 20  # bytes of an event; etcd holds no object of more than 1.5 MiB
MAX_OBJECTS = 16_384
MAX_WARNED = 100  # objects that are not understood, whose names are kept to warn once
GONE = 410
# Of HTTP: the version that we know may still be right, and who is asked may answer later.
_PASSING = (401, 403, 429)

T = TypeVar("T", bound=Thing)


class Phase(StrEnum):
    """How far a reflector is."""

    STARTING = "starting"
    SYNCED = "synced"  # it has had all objects once, and keeps them whatever comes
    ABSENT = "absent"  # the cluster knows no such kind
    FAILING = "failing"  # it has never had them


class _OutOfDate(Exception):
    """Only a list tells what there is now."""


class _ListMeta(msgspec.Struct, frozen=True):
    resource_version: str = msgspec.field(name="resourceVersion", default="")
    continue_: str | None = msgspec.field(name="continue", default=None)


class _Page(msgspec.Struct, frozen=True):
    metadata: _ListMeta
    items: list[msgspec.Raw] | None = None


class _Event(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


_page = msgspec.json.Decoder(_Page).decode
_event = msgspec.json.Decoder(_Event).decode
_bare = msgspec.json.Decoder(Bare).decode
_status = msgspec.json.Decoder(Status).decode
_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Reflector(Generic[T]):
    """The objects of one kind that a selector finds, by name.

    `objects` is replaced as a whole by a list and changed by events. That the API server is away
    empties it never.
    """

    def __init__(
        self,
        api: Api,
        resource: Resource,
        kind: type[T],
        on_change: Callable[[], None],
        pace: Pace,
        *,
        labels: Mapping[str, str] | None = None,
        name: str = "",
    ) -> None:
        """
        Args:
            kind: what of an object is read.
            on_change: called when anything told here may have changed.
            labels: that objects must have.
            name: of the only object, if it is one.
        """
        self.resource = resource
        self.objects: dict[str, T] = {}
        self.phase = Phase.STARTING
        self.version = ""  # resourceVersion up to which all is known; empty: a list is needed
        self.error = ""  # of the last attempt; empty: it is well
        self.heard: float | None = None  # when, by time.monotonic; None: never
        self.watches = 0  # that were begun
        self.lists = 0  # that were complete
        self.revision = 0  # grows whenever `objects` may have changed
        self._api = api
        self._decode = msgspec.json.Decoder(kind).decode
        self._on_change = on_change
        self._pace = pace
        self._backoff = Backoff(pace)
        self.selection: dict[str, str | int] = {}  # as a query: labelSelector, fieldSelector
        if labels:
            terms = (f"{key}={value}" for key, value in sorted(labels.items()))
            self.selection["labelSelector"] = ",".join(terms)
        if name:
            self.selection["fieldSelector"] = f"metadata.name={name}"
        self._absent_since: float | None = None
        self._warned: set[str] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            try:
                if not self.version:
                    await self._list()
                await self._watch()
            except _OutOfDate as why:
                log.info("%s: %s; they are listed anew", self.resource, why)
                self.version = ""
            except KindAbsent as absent:
                if self._is_absent(absent):
                    await asyncio.sleep(self._pace.absent_pause)
                    continue
            except ApiError as problem:
                self._fail(problem, Phase.FAILING)
            except Exception as fault:  # of our own: it must not end the watch in silence
                log.exception("%s cannot be followed", self.resource)
                self.version = ""
                self._fail(ApiError(f"{type(fault).__name__}: {fault}"), Phase.FAILING)
            await asyncio.sleep(self._backoff.pause())

    def _is_absent(self, absent: KindAbsent) -> bool:
        """Whether the cluster really knows no such kind: one that it knew takes a while."""
        now = time.monotonic()
        if self._absent_since is None:
            self._absent_since = now
        if self.phase is Phase.SYNCED and now < self._absent_since + self._pace.absent_after:
            self._fail(absent, Phase.FAILING)
            return False
        self.revision += 1
        self.objects, self.version = {}, ""  # a CRD takes its objects with it
        self.phase = Phase.ABSENT
        self._fail(absent, Phase.ABSENT)
        return True

    def _fail(self, problem: ApiError, phase: Phase) -> None:
        if str(problem) != self.error:
            level = logging.INFO if phase is Phase.ABSENT else logging.ERROR
            log.log(level, "%s", problem)
        self.error = str(problem)
        if self.phase is not Phase.SYNCED:
            self.phase = phase
        self._on_change()

    def _well(self) -> None:
        """The API server answers as it should."""
        if self.error:
            log.info("%s: Kubernetes' API answers again", self.resource)
        self.error, self._absent_since = "", None
        self.heard = time.monotonic()

    # The list

    async def _list(self) -> None:
        found: dict[str, T] = {}
        query: dict[str, str | int] = {**self.selection, "limit": PAGE}
        while True:
            try:
                answer = await self._api.call("list", self.resource, query=query)
            except ApiError as problem:
                if problem.status == GONE and "continue" in query:
                    raise _OutOfDate("their list took too long") from None
                raise
            try:
                page = _page(answer)
            except _MALFORMED as problem:
                raise ApiError(f"cannot list {self.resource}: no list came: {problem}") from None
            for raw in page.items or ():
                self._put(found, raw)
            self._check_number(found)
            if not page.metadata.continue_:
                break
            query["continue"] = page.metadata.continue_
        if not page.metadata.resource_version:
            raise ApiError(f"cannot list {self.resource}: the list tells no resourceVersion")
        self.objects, self.version = found, page.metadata.resource_version
        self.phase = Phase.SYNCED
        self.lists += 1
        self.revision += 1
        self._well()
        self._on_change()

    def _put(self, objects: dict[str, T], raw: msgspec.Raw) -> str:
        """Take an object in; one that is not understood is as good as none. Returns its version.

        Raises:
            ApiError: it is no object at all.
        """
        try:
            thing = self._decode(raw)
        except _MALFORMED as problem:
            about = self._identity(raw)
            objects.pop(about.name, None)
            if about.name not in self._warned and len(self._warned) < MAX_WARNED:
                self._warned.add(about.name)
                log.warning(
                    "%s %s is not understood and ignored: %s", self.resource, about.name, problem
                )
            return about.resource_version
        objects[thing.metadata.name] = thing
        return thing.metadata.resource_version

    def _identity(self, raw: msgspec.Raw) -> Identity:
        try:
            return _bare(raw).metadata
        except _MALFORMED as problem:
            raise ApiError(f"{self.resource}: no object came: {problem}") from None

    def _check_number(self, objects: dict[str, T]) -> None:
        if len(objects) > MAX_OBJECTS:
            raise ApiError(f"there are more than {MAX_OBJECTS} {self.resource}: select fewer")

    # The watch

    async def _watch(self) -> None:
        query = {
            **self.selection,
            "watch": "true",
            "resourceVersion": self.version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": max(1, round(self._pace.watch)),
        }
        self.watches += 1
        opened = None
        try:
            async with self._api.watch(self.resource, query, silence=self._pace.silence) as stream:
                opened = time.monotonic()
                self._well()
                self._on_change()
                await self._follow(stream)
        except NoAnswer as end:
            if opened is None:
                raise
            log.info("%s: a watch broke off, another begins: %s", self.resource, end)
        except ApiError as problem:
            if problem.status == GONE:
                raise _OutOfDate("what is known is too old to be watched") from None
            if problem.status is not None and 400 <= problem.status < 500:
                self.version = self.version if problem.status in _PASSING else ""
            raise
        finally:
            if opened is not None and time.monotonic() > opened + self._pace.longest_pause:
                self._backoff.reset()

    async def _follow(self, stream: aiohttp.StreamReader) -> None:
        """Take events until the stream ends, which it does every few minutes.

        Raises:
            ApiError: something else than an event came.
        """
        rest = bytearray()
        async for chunk in stream.iter_any():
            rest += chunk
            if b"\n" in chunk:
                *lines, rest = rest.split(b"\n")
                for line in lines:
                    if line.strip():
                        self._take(line)
            if len(rest) > MAX_LINE:
                self.version = ""
                raise ApiError(f"{self.resource}: an event of more than {MAX_LINE} bytes came")

    def _take(self, line: bytearray) -> None:
        try:
            event = _event(line)
        except _MALFORMED as problem:
            self.version = ""
            raise ApiError(f"{self.resource}: no event came: {problem}") from None
        if event.type == "ERROR":
            raise self._told(event.object)
        self.revision += event.type != "BOOKMARK"
        version, self.version = self.version, ""  # whatever goes wrong now needs a list
        if event.type in ("ADDED", "MODIFIED"):
            version = self._put(self.objects, event.object)
            self._check_number(self.objects)
        elif event.type == "DELETED":
            about = self._identity(event.object)
            self.objects.pop(about.name, None)
            version = about.resource_version
        elif event.type == "BOOKMARK":
            version = self._bookmark(event.object)
        else:
            raise ApiError(f"{self.resource}: an event of type {event.type[:40]!r} came")
        self.version = version
        self.heard = time.monotonic()
        self._backoff.reset()
        self._on_change()

    def _bookmark(self, raw: msgspec.Raw) -> str:
        try:
            return msgspec.json.decode(raw, type=_Page).metadata.resource_version
        except _MALFORMED as problem:
            raise ApiError(f"{self.resource}: no bookmark came: {problem}") from None

    def _told(self, raw: msgspec.Raw) -> ApiError:
        """The error that a watch tells by an event."""
        self.version = ""
        try:
            status = _status(raw)
        except _MALFORMED:
            status = Status()
        return ApiError(
            f"cannot watch {self.resource}: {status.message[:200]}", status.code, status.reason
        )
