"""Where a pod publishes its KV events: as the file says, as the pod says, or at the usual ports."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from picker import config

MAX_RANKS = 64  # publishers of one pod
_WILDCARDS = ("*", "0.0.0.0", "::")  # noqa: S104
_TCP = re.compile(
    r"tcp://(?:\[(?P<ip>[0-9A-Fa-f:.]{2,45})\]|(?P<name>[A-Za-z0-9._*-]{1,253})):(?P<port>[0-9]{1,5})"
)


@dataclass(frozen=True, slots=True)
class Address:
    """One publisher, as ZMQ writes addresses."""

    live: str  # tcp://host:port
    replay: str  # empty: it sends nothing again
    bound: bool = False  # we listen at `live`, and the publisher connects


def written(source: config.EventSource) -> Address:
    """The address of an event source in the file.

    Raises:
        ValueError: it says what is wrong with it.
    """
    host, port = _parse(source.address)
    bound = host in _WILDCARDS
    replay = ""
    if source.replay:
        replay_host, replay_port = _parse(source.replay)
        if replay_host in _WILDCARDS:
            raise ValueError(f"event replay address {source.replay!r} must name the pod's host")
        replay = _join(replay_host, replay_port)
    return Address(_join(host, port), replay, bound)


def told(answer: bytes, host: str) -> list[Address] | None:
    """What a pod answers at /kv_event_sources: an address for each rank that publishes.

    A pod knows its own address only as one that it listens on: `*` and loopback are `host` to us.
    None if the answer is none that we understand.
    """
    try:
        ranks = _decode(answer)
        return [
            Address(_seen_from_here(rank.endpoint, host), _replay(rank.replay_endpoint, host))
            for rank in ranks.values()
        ]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        return None


def usual(host: str, events: config.Events) -> Address:
    """Where a pod publishes that does not say."""
    replay = _join(host, events.replay_port) if events.replay_port else ""
    return Address(_join(host, events.port), replay)


class _Rank(msgspec.Struct):
    endpoint: str
    replay_endpoint: str | None = None


_decode = msgspec.json.Decoder(Annotated[dict[str, _Rank], Meta(max_length=MAX_RANKS)]).decode


def _replay(address: str | None, host: str) -> str:
    return _seen_from_here(address, host) if address else ""


def _seen_from_here(address: str, host: str) -> str:
    named, port = _parse(address)
    return _join(host if named in _WILDCARDS or _is_loopback(named) else named, port)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _parse(address: str) -> tuple[str, int]:
    """Host, without brackets, and port. Raises ValueError."""
    match = _TCP.fullmatch(address)
    port = int(match["port"]) if match else 0
    if match is None or not 0 < port < 65536:
        raise ValueError(f"event address {address!r} is not understood: write tcp://host:port")
    return match["ip"] or match["name"], port


def _join(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
