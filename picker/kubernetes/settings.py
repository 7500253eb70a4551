"""What `pool.kubernetes` may say. It needs no package, so that a file can be checked anywhere."""

from __future__ import annotations

import re

from picker.config import Config, Kubernetes
from picker.kubernetes.objects import MAX_PORTS

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_LABEL_KEY = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")


def is_used(config: Config) -> bool:
    """Whether the pods are found in Kubernetes."""
    return config.pool.kubernetes != Kubernetes()


def check(config: Config) -> None:
    """Raises ValueError where the settings do not say which pods."""
    settings = config.pool.kubernetes
    if not is_used(config):
        return
    if config.pool.endpoints:
        raise ValueError(
            "'kubernetes' and 'endpoints' of the pool exclude each other: pool.kubernetes finds "
            "the pods, pool.endpoints lists them"
        )
    if not settings.pool and not settings.selector:
        raise ValueError(
            "'kubernetes' needs the name of an InferencePool as pool.kubernetes.pool, or "
            "pool.kubernetes.selector with targetPorts"
        )
    for key, name in (("pool", settings.pool), ("namespace", settings.namespace)):
        if name and not _NAME.fullmatch(name):
            raise ValueError(f"pool.kubernetes.{key}: {name!r} cannot be a name in Kubernetes")
    if settings.pool:
        if settings.selector or settings.target_ports:
            raise ValueError(
                "'selector' and targetPorts are what the InferencePool tells: leave out them or "
                "pool.kubernetes.pool"
            )
        return
    for key, value in settings.selector.items():
        if not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
            raise ValueError(f"pool.kubernetes.selector: {key!r}: {value!r} cannot be a label")
    ports = settings.target_ports
    if not 1 <= len(ports) <= MAX_PORTS or len(set(ports)) < len(ports) or 0 in ports:
        raise ValueError(
            f"'targetPorts': {list(ports)} must be 1 to {MAX_PORTS} different ports, none of them 0"
        )
