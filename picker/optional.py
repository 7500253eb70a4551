"""Parts of a picker that are only made where the configuration asks for them.

Their packages need not be installed, so their modules are imported here and nowhere before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from picker.config import Config, Prefix
from picker.flow import Flow
from picker.kubernetes import settings as kubernetes
from picker.pool import Pool

if TYPE_CHECKING:
    from picker.kubernetes.cluster import Cluster
    from picker.kubernetes.follow import KubernetesPool
    from picker.kubernetes.policies import TakeRules
    from picker.prefix.precise import EventsPrefix


def events_prefix(pool: Pool, settings: Prefix) -> EventsPrefix | None:
    """What tells which pod holds a prompt's prefix by KV events; None: that is not wanted.

    Raises:
        ValueError: a package is missing, here and below.
    """
    if settings.mode != "events":
        return None
    try:
        from picker.prefix.precise import EventsPrefix
    except ModuleNotFoundError as missing:
        raise _needs("prefix.mode: events", "events", missing) from missing
    return EventsPrefix(pool, settings)


def kubernetes_pool(
    config: Config, pool: Pool, flow: Flow | None, take_rules: TakeRules
) -> KubernetesPool | None:
    """What keeps the pool as Kubernetes has it; None: that is not wanted."""
    if not kubernetes.is_used(config):
        return None
    try:
        from picker.kubernetes.follow import KubernetesPool
    except ModuleNotFoundError as missing:
        raise _needs("pool.kubernetes", "kubernetes", missing) from missing
    take_priorities = None if flow is None else flow.objectives.update
    return KubernetesPool(config, pool, on_priorities=take_priorities, on_rules=take_rules)


def cluster(config: Config, on_change: Callable[[], None]) -> Cluster | None:
    """Whom to ask in Kubernetes besides the pool; None: nobody."""
    if config.leader_election.enabled:
        key = "leaderElection"
    elif config.listen.metrics_auth == "tokenReview":
        key = "listen.metricsAuth"
    else:
        return None
    try:
        from picker.kubernetes.cluster import Cluster
    except ModuleNotFoundError as missing:
        raise _needs(key, "kubernetes", missing) from missing
    return Cluster(config, on_change)


def _needs(key: str, extra: str, missing: ModuleNotFoundError) -> ValueError:
    return ValueError(
        f"{key} needs the Python package {missing.name}: pip install 'warmpath[{extra}]'"
    )
