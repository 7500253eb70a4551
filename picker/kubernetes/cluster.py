"""What a picker asks of Kubernetes besides its pods: whether it leads, and who reads its pages."""

from __future__ import annotations

from collections.abc import Callable

from picker.config import Config
from picker.kubernetes.client import Api
from picker.kubernetes.leader import Leader, check_settings
from picker.kubernetes.reviews import Reviews


class Cluster:
    """`connect`, then `stand` when the picker could lead, `resign` and `close`.

    Raises:
        ValueError: the times of leader election do not go together.
    """

    def __init__(self, config: Config, on_change: Callable[[], None]) -> None:
        """`on_change` is called whenever this picker begins or ceases to lead."""
        check_settings(config.leader_election)
        self._config = config
        self._on_change = on_change
        self._api: Api | None = None
        self.leader: Leader | None = None  # where there is an election, once connected
        self.reviews: Reviews | None = None  # where tokens are reviewed, once connected

    @property
    def why_not_leading(self) -> str | None:
        """None: this picker leads, or needs not to."""
        if not self._config.leader_election.enabled:
            return None
        if self.leader is None:
            return "no picker leads yet"
        return None if self.leader.leads else self.leader.why_not

    async def connect(self) -> None:
        """Raises ValueError: there are no credentials for Kubernetes."""
        config = self._config
        self._api = api = await Api.connect(config.pool.kubernetes)
        if config.leader_election.enabled:
            self.leader = Leader(api, config, self._on_change)
        if config.listen.metrics_auth == "tokenReview":
            self.reviews = Reviews(api)

    def stand(self) -> None:
        """Take part in the election."""
        if self.leader is not None:
            self.leader.start()

    async def resign(self) -> None:
        """Lead no more."""
        if self.leader is not None:
            await self.leader.stop()

    async def close(self) -> None:
        await self.resign()
        if self.reviews is not None:
            await self.reviews.stop()
        if self._api is not None:
            await self._api.close()
