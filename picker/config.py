"""warmpath.yaml as types. Field names are camelCase in the file.

Durations are written `50ms`, `2s`, `5m`, `1h`; sizes `16MiB`; both are numbers here: seconds, bytes.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

MIB = 1 << 20


class Duration(float):
    """Seconds."""


class Size(int):
    """Bytes."""


class Section(
    msgspec.Struct, rename="camel", forbid_unknown_fields=True, frozen=True, kw_only=True
):
    """A part of the file. Unknown keys are errors."""


class Listen(Section):
    """Ports of the picker; 0 means any free one."""

    host: str = "127.0.0.1"
    grpc: int = 9002  # ext_proc, and Envoy's access logs
    health: int = 9003  # gRPC health
    http: int = 9004  # ext_authz, the lean profile
    admin: int = 9090  # metrics and debug pages


class EndpointSpec(Section):
    """One model server."""

    address: str
    labels: dict[str, str] = {}


class PoolSection(Section):
    name: str = "default"
    endpoints: list[EndpointSpec] = []


class Metrics(Section):
    """How model servers' load is read."""

    engine: Literal["vllm", "sglang", "trtllm", "triton"] = "vllm"
    interval: Duration = Duration(0.05)  # while a pod is busy
    idle_interval: Duration = Duration(1.0)
    timeout: Duration = Duration(1.0)
    stale_after: Duration = Duration(2.0)  # without an answer, a pod is passed over


class Prefix(Section):
    mode: Literal["approximate"] = "approximate"
    block_bytes: Size = Size(256)
    max_blocks: int = 1024  # of one prompt; what follows is not matched


class PickerSection(Section):
    """How one endpoint is chosen by the scores."""

    type: Literal["maxScore", "weightedRandom", "softmax", "powerOfTwo"] = "maxScore"
    fallbacks: int = 1  # endpoints named after the first, for retries
    temperature: float = 0.1  # of softmax


class Scheduling(Section):
    """Empty filters and scorers mean the default policy."""

    filters: list[str | dict[str, Any]] = []
    scorers: dict[str, float | dict[str, Any]] = {}
    picker: PickerSection = PickerSection()


class Sessions(Section):
    header: str = "x-session-id"
    ttl: Duration = Duration(300.0)


class Envoy(Section):
    """What `warmpath envoy` and `warmpath up` make of it."""

    listen: int = 8080
    host: str = "127.0.0.1"
    admin: int = 9901  # on loopback; 0 means any free port
    profile: Literal["standard", "lean"] = "standard"
    fail_open: bool = False  # round robin while the picker is away, instead of 503
    timeout: Duration = Duration(3600.0)  # of a whole response
    idle_timeout: Duration = Duration(600.0)  # between two bytes of one
    retries: int = 1


class Config(Section):
    """The whole file."""

    listen: Listen = Listen()
    pool: PoolSection = PoolSection()
    models: list[str] = []  # empty: anything passes
    metrics: Metrics = Metrics()
    prefix: Prefix = Prefix()
    scheduling: Scheduling = Scheduling()
    sessions: Sessions = Sessions()
    envoy: Envoy = Envoy()
    max_body: Size = Size(16 * MIB)
    usage: bool = True  # read token usage from responses
    drain: Duration = Duration(30.0)  # for streams in flight, at SIGTERM
