"""A director that sends everything to the same endpoints and remembers what became of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping
from typing import Any

import numpy as np

from picker.director import Pick
from picker.pool import Endpoint
from picker.prefix.match import By
from picker.refusal import Refusal
from picker.request import parse
from picker.rewrites import Rewrites
from picker.schedule import Decision
from picker.splice import ModelRewrite, Splice

ENDPOINTS = ("192.0.2.1:8000", "192.0.2.2:8000")


class RecordingDirector:
    """Makes real picks. `refusal` is raised instead when it is set; `hold` makes picks wait."""

    def __init__(self, *endpoints: str) -> None:
        self.endpoints = endpoints or ENDPOINTS
        self.refusal: Refusal | None = None
        self.splice: Splice | None = None  # of each pick
        self.rewrite: ModelRewrite | None = None
        self.rewrites = Rewrites()
        self.hold: asyncio.Event | None = None
        self.waiting = 0
        self.requests: list[Any] = []
        self.picks: list[Pick] = []
        self.moves: list[str] = []
        self.first_tokens: list[Pick] = []
        self.ends: list[Pick] = []
        self.refusals: list[Refusal] = []

    def route(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | None,
        subset: tuple[str, ...] | None = None,
        claim: str | None = None,
    ) -> Pick | Coroutine[None, None, Pick]:
        try:
            request = parse(method, path, headers, body, subset=subset, claim=claim)
            return self.pick(request) if self.hold is None else self._pick_later(request)
        except Refusal as refusal:
            self.refused(refusal)
            raise

    async def _pick_later(self, request: Any) -> Pick:
        assert self.hold is not None
        self.waiting += 1
        try:
            await self.hold.wait()
        finally:
            self.waiting -= 1
        return self.pick(request)

    def pick(self, request: Any) -> Pick:
        self.requests.append(request)
        if self.refusal is not None:
            raise self.refusal
        host, _, port = self.endpoints[0].rpartition(":")
        pick = Pick(
            request_id=getattr(request, "id", "made-up-id"),
            model=getattr(request, "model", None),
            path=request.path,
            prompt_tokens=10,
            decision=Decision(
                endpoints=self.endpoints,
                candidates=self.endpoints,
                considered=len(self.endpoints),
                dropped=(),
                weights=(),
                _columns=np.zeros((2, len(self.endpoints)), np.float32),
            ),
            endpoint=Endpoint(self.endpoints[0], host, int(port), {}, 0),
            uncached_tokens=10,
            prompt_blocks=0,
            matched_blocks=0,
            matched_by=By.NONE,
            picked_at=time.time(),
            _director=self,  # type: ignore[arg-type]
            _session=b"",
            splice=self.splice,
            rewrite=self.rewrite,
        )
        self.picks.append(pick)
        return pick

    def refused(self, refusal: Refusal) -> None:
        self.refusals.append(refusal)

    def moved(self, pick: Pick, address: str) -> None:
        self.moves.append(address)

    def prefilled(self, pick: Pick) -> None:
        self.first_tokens.append(pick)

    def ended(self, pick: Pick) -> None:
        self.ends.append(pick)
