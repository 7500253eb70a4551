"""What stands before the pods: Envoy alone, or with a picker, in one of its profiles."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml

from bench.envoys import HOST, envoy, plain
from bench.processes import free_ports, pid, running
from picker.config import Config, EndpointSpec, Envoy, Listen, PoolSection, Prefix, as_data
from picker.up.cluster import warmpath_command
from picker.up.processes import Child


@dataclass(frozen=True, slots=True)
class Setup:
    """A way to route: `profile` is the picker's, None for Envoy's round robin alone."""

    name: str
    profile: str | None
    usage: bool = True  # the picker reads token usage from responses
    tokenizer: str | None = None  # the picker follows KV events, with it; None: it guesses


PLAIN = Setup("plain", None)
LEAN = Setup("lean", "lean")
LEAN_NO_USAGE = Setup("lean, no usage", "lean", usage=False)
STANDARD = Setup("standard", "standard")


@dataclass(frozen=True, slots=True)
class Front:
    """A running set-up."""

    setup: Setup
    port: int  # for clients
    envoy_pid: int
    picker_pid: int | None
    admin_port: int | None  # of the picker


def picker_config(setup: Setup, addresses: Sequence[str], ports: Sequence[int]) -> Config:
    """The defaults but for ports, pods and the set-up's choices."""
    grpc, health, http, admin, listen, envoy_admin = ports
    return Config(
        listen=Listen(grpc=grpc, health=health, http=http, admin=admin),
        pool=PoolSection(endpoints=[EndpointSpec(address=address) for address in addresses]),
        envoy=Envoy(
            listen=listen,
            admin=envoy_admin,
            profile="lean" if setup.profile == "lean" else "standard",
        ),
        prefix=Prefix()
        if setup.tokenizer is None
        else Prefix(mode="events", tokenizer=setup.tokenizer),
        usage=setup.usage,
    )


def picker(config: Config, folder: Path, name: str = "picker") -> Child:
    """`warmpath pick` with this configuration."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(json.loads(json.dumps(as_data(config)))))
    return Child(
        name=name,
        command=[*warmpath_command(), "pick", "-c", str(path), "--log-level", "warning"],
        log=folder / f"{name}.log",
        ready_url=f"http://{HOST}:{config.listen.admin}/readyz",
    )


@asynccontextmanager
async def running_front(
    setup: Setup, addresses: Sequence[str], folder: Path, scheduling: dict[str, Any] | None = None
) -> AsyncIterator[Front]:
    """Envoy on one thread before these pods, with the picker that the set-up asks for.

    Args:
        scheduling: `scheduling.scorers` in place of the default policy.
    """
    if setup.profile is None:
        port, admin = free_ports(2)
        alone = envoy("plain", plain(addresses, port, admin), folder, admin)
        async with running([alone]):
            yield Front(setup, port, pid(alone), None, None)
        return
    from picker.envoy.bootstrap import bootstrap  # takes half a second to import

    config = picker_config(setup, addresses, free_ports(6))
    if scheduling is not None:
        chosen = msgspec.structs.replace(config.scheduling, scorers=scheduling)
        config = msgspec.structs.replace(config, scheduling=chosen)
    picks = picker(config, folder)
    before = envoy("envoy", bootstrap(config), folder, config.envoy.admin)
    async with running([picks]), running([before]):  # Envoy asks at once whether the picker is well
        yield Front(setup, config.envoy.listen, pid(before), pid(picks), config.listen.admin)
