"""warmpath.yaml as types. Field names are camelCase in the file.

Durations are written `50ms`, `2s`, `5m`, `1h`; sizes `16MiB`; both are numbers here, of seconds
and of bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from picker.convert import converted
from picker.document import ConfigError, Document, Place, dotted, nearest, read_text, shown
from picker.units import BYTES, SECONDS, num_bytes, scaled, seconds

MIB = 1 << 20
ENGINES = ("vllm", "sglang", "trtllm", "triton")  # whose metrics are known


class Duration(float):
    """Seconds."""


class Size(int):
    """Bytes."""


Blocks = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
IndexBlocks = Annotated[int, msgspec.Meta(ge=1 << 10, le=1 << 26)]
Few = Annotated[int, msgspec.Meta(ge=0, le=16)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 30)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
Share = Annotated[float, msgspec.Meta(ge=0.01, le=1)]
Price = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Part = Annotated[float, msgspec.Meta(ge=0, le=1)]
HalfShare = Annotated[float, msgspec.Meta(gt=0, le=0.5)]
Replicas = Annotated[int, msgspec.Meta(ge=1, le=10_000)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 30)]
Weight = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class Section(
    msgspec.Struct, rename="camel", forbid_unknown_fields=True, frozen=True, kw_only=True
):
    """A part of the file. Unknown keys are errors."""


class Tls(Section, frozen=True):
    """Of the gRPC port. Gateways expect it, and believe any certificate."""

    mode: Literal["none", "selfSigned", "files"] = "none"
    certificate: str = ""  # PEM files, read again when they change
    key: str = ""
    client_ca: str = ""  # PEM file: only clients with a certificate of these are served


class Listen(Section, frozen=True):
    """Ports of the picker; 0 means any free one."""

    host: str = "127.0.0.1"
    grpc: Port = 9002  # ext_proc, and Envoy's access logs
    health: Port = 9003  # gRPC health
    http: Port = 9004  # ext_authz, the lean profile
    admin: Port = 9090  # metrics and debug pages
    quota: Port = 9005  # gRPC, to administer quotas
    replica: Port = 9006  # gRPC, for other pickers of the pool
    tls: Tls = Tls()
    metrics_auth: Literal["none", "tokenReview"] = "none"  # who may read the admin port


class EventSource(Section, frozen=True):
    """Where one rank of a model server publishes its KV events."""

    address: str  # tcp://10.0.0.7:5557; with * for the host, we listen and the pod connects
    replay: str = ""  # where it sends them again; empty: nowhere


class EndpointSpec(Section, frozen=True):
    """One model server."""

    address: str
    labels: dict[str, str] = {}
    events: list[EventSource] = []  # empty: what the server says, else prefix.events' ports
    name: str = ""  # for people; empty: the address
    incarnation: str = ""  # another one at the same address is another server


class Kubernetes(Section, frozen=True):
    """The pods of an InferencePool, or those that a selector finds."""

    pool: str = ""  # an InferencePool's name
    namespace: str = ""  # empty: the picker's own, or the kubeconfig's
    group: Literal["inference.networking.k8s.io", "inference.networking.x-k8s.io"] = (
        "inference.networking.k8s.io"
    )
    selector: dict[str, str] = {}  # labels of pods, in place of a pool
    target_ports: list[Port] = []  # of these pods, 1 to 8
    kubeconfig: str = ""  # a file; empty: the service account's, else $KUBECONFIG


class PoolSection(Section, frozen=True):
    """The model servers: listed here, or found in Kubernetes."""

    name: str = "default"
    endpoints: list[EndpointSpec] = []
    kubernetes: Kubernetes = Kubernetes()
    ignore_subset: bool = False  # pick among all, whatever subset the gateway names


class EngineMetrics(Section, frozen=True):
    """Where a kind of model server tells its load: `metric` or `metric{label="value"}`.

    Empty: it does not.
    """

    waiting: str = ""
    running: str = ""
    kv_usage: str = ""  # 0 to 1
    adapters: str = ""  # with vLLM's labels
    cache_info: str = ""  # with vLLM's labels


class Metrics(Section, frozen=True):
    """How model servers' load is read."""

    engine: str = "vllm"  # of pods that no label tells it of
    engine_label: str = ""  # of pods; empty: those that the field knows
    engines: dict[str, EngineMetrics] = {}  # more of them, or others than ours of these names
    scheme: Literal["http", "https"] = "http"
    path: str = ""  # empty: the engine's
    port: Port = 0  # 0: the endpoint's
    insecure_skip_verify: bool = False  # of https: believe any certificate
    interval: Duration = Duration(0.05)  # while a pod is busy
    idle_interval: Duration = Duration(1.0)
    timeout: Duration = Duration(1.0)
    stale_after: Duration = Duration(2.0)  # without an answer, a pod is passed over


class Events(Section, frozen=True):
    """Where pods publish their KV events, unless they say or the file does."""

    port: Port = 5557
    replay_port: Port = 5558  # 0: none


class Prefix(Section, frozen=True):
    """How it is known which pod holds a prompt's prefix."""

    mode: Literal["approximate", "events"] = "approximate"
    block_bytes: Size = Size(256)  # of the approximate index
    max_blocks: Blocks = 1024  # of one prompt there; what follows is not matched
    tokenizer: str = "pods"  # or a directory, a GGUF file, a hub name, `simulated`
    index_blocks: IndexBlocks = 1 << 22  # that the precise index holds at most
    fresh: Duration = Duration(2.0)  # that a pick's blocks count before events confirm them
    events: Events = Events()


class PickerSection(Section, frozen=True):
    """How one endpoint is chosen by the scores."""

    type: Literal["maxScore", "weightedRandom", "softmax", "powerOfTwo", "random"] = "maxScore"
    fallbacks: Few = 1  # endpoints named after the first, for retries
    temperature: float = 0.1  # of softmax


class Scheduling(Section, frozen=True):
    """Empty filters and scorers mean the default policy."""

    filters: list[str | dict[str, Any]] = []
    scorers: dict[str, float | dict[str, Any]] = {}
    picker: PickerSection = PickerSection()


class Sessions(Section, frozen=True):
    header: str = "x-session-id"
    ttl: Duration = Duration(300.0)


class Identity(Section, frozen=True):
    """Whose request it is. Of these, the first that tells names the tenant."""

    keys: bool = False  # API keys, which `warmpath quota keys` makes; a wrong one is refused
    claim: str = ""  # of a JWT, from where `payload` is: dots lead into objects; empty: none
    payload: str = "jwt_payload"  # `payload_in_metadata` of Envoy's jwt_authn
    # A header to be believed, such as x-gateway-inference-fairness-id, or several with commas, the
    # first that is there; empty: none. Anybody who reaches the gateway can send one, unless the
    # gateway sets or removes it.
    header: str = ""
    default: str = "default"  # the tenant of requests that nothing names
    required: bool = False  # refuse these with 401 instead

    @property
    def tells(self) -> bool:
        """Whether requests may be refused for whose they are, or are not."""
        return self.keys or self.required


class Cost(Section, frozen=True):
    """What a request of p prompt and o output tokens costs, which is what is shared fairly."""

    input: Price = 1.0  # * p
    output: Price = 2.0  # * o
    product: Price = 0.0  # * p * o
    output_squared: Price = 0.0  # * o * o
    request: Price = 0.0


class Saturation(Section, frozen=True):
    """When a pod takes no more requests. All that is set here holds."""

    waiting: Positive = 5  # requests in its queue
    kv: Share = 0.8  # of its KV cache in use
    inflight: Count = 0  # requests of ours on it; 0: any number


class Flow(Section, frozen=True):
    """The queue in front of busy pods."""

    enabled: bool = False
    queue: bool = True  # False: nobody waits; below priority 0 requests are refused instead
    order: Literal["fcfs", "deadline"] = "fcfs"  # of one tenant's requests
    deadline_header: str = "x-slo-ttft-ms"  # milliseconds to the first token, for `deadline`
    ttl: Duration = Duration(60.0)  # a request waits no longer; 0s: until its client leaves
    max_requests: Count = 5000  # that wait; 0: any number
    max_bytes: Size = Size(1024 * MIB)  # of their bodies; 0: any size
    tenant_requests: Count = 1000  # of these, of one tenant
    tenant_bytes: Size = Size(256 * MIB)
    sheddable: Literal["reject", "queue"] = "reject"  # below priority 0, while all pods are busy
    scale_from_zero: Literal["reject", "queue"] = "reject"  # while there is no pod
    objective_header: str = "x-gateway-inference-objective"
    objectives: dict[str, int] = {}  # what that names -> priority; others have 0
    priority_header: str = ""  # tells the priority itself, to be believed; empty: none
    weights: dict[str, float] = {}  # of tenants; others have 1
    cost: Cost = Cost()
    expect: Literal["none", "history"] = "none"  # charge expected output in advance
    saturation: Saturation = Saturation()


class Leases(Section, frozen=True):
    """Parts of limits that a picker takes at once, to admit from without asking the store."""

    enabled: bool = False
    period: Duration = Duration(1.0)
    share: HalfShare = 0.05  # of each limit, for one picker


class QuotaAdmin(Section, frozen=True):
    """The gRPC service that `warmpath quota --server` asks, on listen.quota."""

    tokens: str = ""  # a file of lines `NAME TOKEN`; empty: there is no service
    certificate: str = ""  # PEM files, for TLS; empty: without
    key: str = ""


class Quota(Section, frozen=True):
    """Who may use how much. Limits themselves are in the store: `warmpath quota set`."""

    enabled: bool = False
    store: str = "sqlite:///var/lib/warmpath/quota.db"  # memory:, sqlite:, redis:
    timeout: Duration = Duration(0.0)  # until a silent store is down; 0: by its kind, see stores.py
    on_failure: Literal["share", "open", "closed"] = "share"  # of limits that do not say
    replicas: Replicas = 1  # pickers that share the limits while the store is down
    zone: str = "UTC"  # of days and months that `warmpath quota` sets with this file, or over it
    reservation_ttl: Duration = Duration(7200.0)  # longer than any request, if its picker lives
    cached_cost: Part = 1.0  # what a prompt token from the cache counts
    expected_output: Tokens = 512  # tokens to reserve where neither request nor history tells
    leases: Leases = Leases()
    admin: QuotaAdmin = QuotaAdmin()


class RewriteTarget(Section, frozen=True):
    model: str
    weight: Weight = 1  # of all its rule's; where all are 0, they share evenly


class Rewrite(Section, frozen=True):
    """Requests for a model are sent as requests for another."""

    targets: list[RewriteTarget]
    models: list[str] = []  # that are asked for; empty: any


class LeaderElection(Section, frozen=True):
    """Only one picker of several is ready, by a Lease in Kubernetes."""

    enabled: bool = False
    lease: str = ""  # its name; empty: as the reference picker's
    duration: Duration = Duration(15.0)
    renew_deadline: Duration = Duration(10.0)
    retry: Duration = Duration(2.0)


class ReplicasSection(Section, frozen=True):
    """Other pickers of this pool, which are told what only we know."""

    peers: list[str] = []  # ip:port of their listen.replica; ours among them does no harm
    service: str = ""  # name:port of a headless service that names them, in place of `peers`
    secret: str = ""  # a file of 16 bytes or more that only they know; empty: whoever asks is told


class PickerAddress(Section, frozen=True):
    """Where Envoy reaches one picker."""

    host: str = "127.0.0.1"
    grpc: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 9002
    http: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 9004


class Envoy(Section, frozen=True):
    """What `warmpath envoy` and `warmpath up` make of it."""

    listen: Port = 8080
    host: str = "127.0.0.1"
    admin: Port = 9901  # on loopback; 0 means any free port
    profile: Literal["standard", "lean"] = "standard"
    fail_open: bool = False  # round robin while the picker is away, instead of 503
    timeout: Duration = Duration(3600.0)  # of a whole response
    idle_timeout: Duration = Duration(600.0)  # between two bytes of one
    retries: Few = 1
    picker_ca: str = ""  # PEM file that verifies the picker; empty: listen.tls.certificate
    certificate: str = ""  # PEM files that the picker is shown, where listen.tls.clientCa asks
    key: str = ""
    pickers: list[PickerAddress] = []  # empty: the one of `listen`


class Config(Section, frozen=True):
    """The whole file."""

    listen: Listen = Listen()
    pool: PoolSection = PoolSection()
    models: list[str] = []  # empty: anything passes
    metrics: Metrics = Metrics()
    prefix: Prefix = Prefix()
    scheduling: Scheduling = Scheduling()
    sessions: Sessions = Sessions()
    identity: Identity = Identity()
    flow: Flow = Flow()
    quota: Quota = Quota()
    rewrites: list[Rewrite] = []  # the first that matches counts
    # Headers to be believed that name the model to send a request as, before any rule, such as
    # x-gateway-model-name-rewrite. Anybody who reaches the gateway can send one, unless the gateway
    # sets or removes it.
    rewrite_headers: list[str] = []
    replicas: ReplicasSection = ReplicasSection()
    leader_election: LeaderElection = LeaderElection()
    envoy: Envoy = Envoy()
    max_body: Size = Size(16 * MIB)
    usage: bool = True  # read token usage from responses
    drain_delay: Duration = Duration(1.0)  # from "not ready" to closed doors, for probes to see it
    drain: Duration = Duration(30.0)  # for streams in flight, at SIGTERM


LEAST_AND_MOST = {  # what a number may be, as it is written
    "metrics.interval": ("5ms", "1m"),
    "metrics.idleInterval": ("5ms", "1h"),
    "metrics.timeout": ("10ms", "1m"),
    "metrics.staleAfter": ("50ms", "1h"),
    "prefix.blockBytes": ("16", "1MiB"),
    "prefix.fresh": ("0s", "1m"),
    "scheduling.picker.temperature": ("0.000001", "1000000"),
    "sessions.ttl": ("1s", "168h"),
    "flow.ttl": ("0s", "168h"),
    "flow.maxBytes": ("0", "1000GiB"),
    "flow.tenantBytes": ("0", "1000GiB"),
    "quota.timeout": ("0s", "10s"),
    "quota.reservationTtl": ("1s", "168h"),
    "quota.leases.period": ("50ms", "1m"),
    "envoy.timeout": ("0s", "168h"),
    "envoy.idleTimeout": ("0s", "168h"),
    "maxBody": ("1KiB", "1000MiB"),  # gRPC's own limit is 2 GiB, for twice of it
    "leaderElection.duration": ("1s", "1h"),
    "leaderElection.renewDeadline": ("200ms", "1h"),
    "leaderElection.retry": ("100ms", "1m"),
    "drainDelay": ("0s", "10m"),
    "drain": ("0s", "1h"),
}


def load(path: str | Path, check: Callable[[Config], object] | None = None) -> Config:
    """The configuration in a file.

    Args:
        path: of a YAML file.
        check: further checks that raise ValueError; its message is shown with the place it names.

    Raises:
        ConfigError: the file cannot be read or used, in one line.
    """
    return parse(read_text(Path(path)), str(path), check)


def parse(
    text: str, name: str = "warmpath.yaml", check: Callable[[Config], object] | None = None
) -> Config:
    """The configuration in a text; `name` is the file's, for errors. See `load`."""
    document = Document(text, name)
    data = {} if document.data is None else document.data
    if not isinstance(data, dict):
        raise document.error((), f"expected keys with values, got {shown(data)}")
    return build(document, data, check)


def build(
    document: Document, data: dict[str, Any], check: Callable[[Config], object] | None = None
) -> Config:
    """The configuration in a document's data, or in data that was made of it. See `load`."""
    config = converted(document, data, Config, _number)
    _check_ranges(document, config)
    engine, engines = config.metrics.engine, {*ENGINES, *config.metrics.engines}
    if engine not in engines:
        where: Place = ("metrics", "engine")
        raise document.error(where, f"{shown(engine)} is unknown; {nearest(engine, engines)}")
    if check is not None:
        try:
            check(config)
        except ConfigError:
            raise
        except ValueError as problem:
            place, what = document.mentioned(str(problem)), str(problem)
            named, colon, rest = what.partition(": ")
            if colon and dotted(place).startswith(named):  # the place is named anyhow
                what = rest
            raise document.error(place, what) from None
    return config


def as_data(config: Config) -> dict[str, Any]:
    """As it would stand in the file: camelCase keys, seconds and bytes as numbers."""
    data = msgspec.to_builtins(config, enc_hook=lambda number: number + 0)
    assert isinstance(data, dict)
    return data


def _number(kind: type, value: object) -> object:
    if kind is Duration:
        return Duration(seconds(value))
    if kind is Size:
        return Size(num_bytes(value))
    raise NotImplementedError(kind)


def check_range(key: str, value: float, written: object) -> None:
    """Check a number against LEAST_AND_MOST; `written` is how it stands in the file.

    Raises:
        ValueError: it is out of range.
    """
    least, most = LEAST_AND_MOST[key]
    if not _bound(least) <= value <= _bound(most):
        raise ValueError(f"{shown(written)} must be between {least} and {most}")


def _check_ranges(document: Document, config: Config) -> None:
    data = as_data(config)
    for key in LEAST_AND_MOST:
        value: Any = data
        place: Place = tuple(key.split("."))
        for part in place:
            value = value[part]
        try:
            check_range(key, value, document.at(place))
        except ValueError as problem:
            raise document.error(place, str(problem)) from None


def _bound(written: str) -> float:
    return scaled(written, SECONDS | BYTES, "a bound", "1s or 1MiB")
