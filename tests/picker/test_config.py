"""warmpath.yaml: what is read, and what an error tells."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from picker.config import Config, Duration, Size, as_data, load, parse
from picker.document import MAX_NODES, ConfigError, Document, plain
from picker.units import num_bytes, seconds

WHOLE = """
listen: {grpc: 0, health: 1, http: 2, admin: 3, host: "::1"}
pool:
  name: demo
  endpoints:
  - {address: "127.0.0.1:8001", labels: {role: both}}
  - address: 127.0.0.1:8002
models: [llama, "1"]
metrics: {engine: sglang, interval: 250ms, idleInterval: 2s, timeout: 1.5, staleAfter: 1m}
prefix: {blockBytes: 1KiB, maxBlocks: 64}
scheduling:
  filters: [fresh, {label: {role: both}}]
  scorers: {prefix: 3, queue: {weight: 2}}
  picker: {type: softmax, fallbacks: 2, temperature: 0.5}
sessions: {header: x-user, ttl: 1h}
identity: {keys: true, claim: org.id, payload: jwt, header: x-tenant, default: rest, required: true}
flow:
  enabled: true
  order: deadline
  ttl: 0s
  maxRequests: 10
  maxBytes: 1MiB
  tenantBytes: 0
  objectives: {chat: 5, batch: -1}
  weights: {alice: 2, bob: 0.5}
  cost: {input: 2.1, output: 1, product: 0.04, outputSquared: 0.032, request: 11.46}
  scaleFromZero: queue
  saturation: {waiting: 3, kv: 0.9, inflight: 64}
envoy: {listen: 80, profile: lean, failOpen: true, timeout: 5m, retries: 0}
maxBody: 1000Mi
usage: false
drain: 0
"""


def problem(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text, "w.yaml")
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_whole_file_is_read() -> None:
    config = parse(WHOLE)
    assert (config.listen.grpc, config.listen.admin, config.listen.host) == (0, 3, "::1")
    assert [endpoint.address for endpoint in config.pool.endpoints] == [
        "127.0.0.1:8001",
        "127.0.0.1:8002",
    ]
    assert config.pool.endpoints[0].labels == {"role": "both"}
    assert config.models == ["llama", "1"]
    metrics = config.metrics
    assert (metrics.interval, metrics.idle_interval, metrics.timeout) == (0.25, 2, 1.5)
    assert metrics.stale_after == 60
    assert config.prefix.block_bytes == 1024
    assert config.scheduling.scorers == {"prefix": 3, "queue": {"weight": 2}}
    assert config.scheduling.filters == ["fresh", {"label": {"role": "both"}}]
    assert config.sessions.ttl == 3600
    assert (config.identity.claim, config.identity.header) == ("org.id", "x-tenant")
    flow = config.flow
    assert (flow.enabled, flow.ttl, flow.max_bytes, flow.tenant_bytes) == (True, 0, 1 << 20, 0)
    assert (flow.objectives, flow.weights["bob"]) == ({"chat": 5, "batch": -1}, 0.5)
    assert (flow.cost.output_squared, flow.saturation.inflight) == (0.032, 64)
    assert (config.envoy.fail_open, config.envoy.profile) == (True, "lean")
    assert (config.max_body, config.usage, config.drain) == (1000 << 20, False, 0)


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "metrics:\nlisten: {grpc: }\n"])
def test_what_says_nothing_is_left_at_its_default(text: str) -> None:
    assert parse(text) == Config()


def test_what_is_shown_as_the_configuration_in_force_can_be_read_again() -> None:
    config = parse(WHOLE)
    assert parse(plain(as_data(config))) == config
    assert "failOpen: true" in plain(as_data(config))


def test_load_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    path.write_text("drain: 2s\n")
    assert load(path).drain == 2
    path.write_text("\n\ndrain: soon\n")
    with pytest.raises(ConfigError, match=rf"^{path}:3: drain: 'soon' is not a duration"):
        load(path)
    path.write_bytes(b"pool: {name: \xff}")
    with pytest.raises(ConfigError, match="byte 13 is not UTF-8"):
        load(path)
    with pytest.raises(ConfigError, match=r"missing\.yaml: cannot be read: No such file"):
        load(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lisen: {}", "w.yaml:1: lisen: unknown key; did you mean 'listen'?"),
        ("\nlisten:\n  gprc: 3", "w.yaml:3: listen.gprc: unknown key; did you mean 'grpc'?"),
        (
            "metrics: {idle_interval: 1}",
            "w.yaml:1: metrics.idle_interval: unknown key; did you mean 'idleInterval'?",
        ),
        (
            "pool:\n  endpoints:\n  - {address: '1.2.3.4:5'}\n  - {adress: x}",
            "w.yaml:4: pool.endpoints[1].adress: unknown key; did you mean 'address'?",
        ),
        (
            "pool: {zzz: }",
            "w.yaml:1: pool.zzz: unknown key; known: endpoints, ignoreSubset, kubernetes, name",
        ),
        ("drain: 1\nusage: true\ndrain: 2", "w.yaml:3: drain: this key stands here twice"),
        (
            "pool:\n  endpoints:\n  - labels: {a: x}\n",
            "w.yaml:3: pool.endpoints[0]: the key 'address' is missing",
        ),
        (
            "scheduling: {picker: {type: maxscore}}",
            "scheduling.picker.type: 'maxscore' is unknown; did you mean 'maxScore'?",
        ),
        ("flow: {order: edf}", "flow.order: 'edf' is unknown; known: deadline, fcfs"),
        ("flow: {ttl: -1}", "flow.ttl: -1 must be between 0s and 168h"),
        ("flow: {saturation: {kv: 0}}", "flow.saturation.kv: expected a number, at least 0.01"),
        ("flow: {cost: {inputs: 1}}", "flow.cost.inputs: unknown key; did you mean 'input'?"),
        ("identity: {key: true}", "identity.key: unknown key; did you mean 'keys'?"),
        ("metrics: {engine: tgi}", "'tgi' is unknown; known: sglang, triton, trtllm, vllm"),
        ("listen: {grpc: 65536}", "listen.grpc: expected a whole number, at most 65535, got 65536"),
        ("listen: {grpc: -1}", "expected a whole number, at least 0, got -1"),
        ("listen: {grpc: '9002'}", "expected a whole number (without quotes), got '9002'"),
        ("listen: {grpc: true}", "expected a whole number, got True"),
        ("listen: 9002", "w.yaml:1: listen: expected keys with values, got 9002"),
        ("models: llama", "w.yaml:1: models: expected a list, got 'llama'"),
        ("models:\n- a\n- on", "w.yaml:3: models[1]: expected text"),
        (
            "pool:\n  endpoints:\n  - address: 1.2.3.4:5\n    labels:\n      a: x\n      b: 2",
            "w.yaml:6: pool.endpoints[0].labels.b: expected text",
        ),
        (
            "scheduling: {scorers: {prefix: high}}",
            "scheduling.scorers.prefix: expected a number or keys with values, got 'high'",
        ),
        ("metrics: {interval: 0}", "metrics.interval: 0 must be between 5ms and 1m"),
        ("metrics: {interval: 1ms}", "metrics.interval: '1ms' must be between 5ms and 1m"),
        ("metrics: {interval: .nan}", "nan is not a duration"),
        ("metrics: {interval: 5 minutes}", "'5 minutes' is not a duration: write 50ms"),
        ("drain: -1s", "'-1s' is not a duration"),
        ("drain: yes", "True is not a duration"),
        ("maxBody: 16MB", "'16MB' is not a size: write 256, 64KiB, 16MiB or 1GiB"),
        ("maxBody: 1GiB", "maxBody: '1GiB' must be between 1KiB and 1000MiB"),
        ("prefix: {maxBlocks: 0}", "prefix.maxBlocks: expected a whole number, at least 1, got 0"),
        ("scheduling: {picker: {fallbacks: -1}}", "expected a whole number, at least 0, got -1"),
        ("prefix: {mode: precise}", "prefix.mode: 'precise' is unknown; "),
        ("scheduling: {picker: {temperature: 0}}", "0 must be between 0.000001 and 1000000"),
        ("[1, 2]", "w.yaml:1: expected keys with values, got [1, 2]"),
        ("a: [1,\nb: }", "w.yaml:2: this is not YAML: "),
        ("a: 1\n--- \nb: 2", "w.yaml:2: this is not YAML: expected a single document"),
        ("a: *b", "w.yaml:1: this is not YAML: found undefined alias"),
        ("a: !!python/object/apply:os.system [x]", "w.yaml:1: a: unknown key"),
        ("drain: !!python/name:os.system ''", "w.yaml:1: drain: ''"),
        ("? [a, b]\n: 1", "w.yaml:1: a key must be a single word"),
        ("a: \x07", "w.yaml: the character #x0007 may not stand in YAML"),
    ],
)
def test_an_error_says_where_and_what(text: str, message: str) -> None:
    assert message in problem(text)


def test_a_long_value_is_cut() -> None:
    assert len(problem(f"drain: {'x' * 10_000}")) < 250


def test_a_word_that_a_check_refuses_is_shown_where_it_stands() -> None:
    def check(config: Config) -> None:
        raise ValueError("unknown scorer 'prefx'; did you mean 'prefix'?")

    text = "prefix: {}\nscheduling:\n  scorers:\n    queue: 2\n    prefx: 3\n"
    with pytest.raises(ConfigError) as caught:
        parse(text, "w.yaml", check)
    assert str(caught.value) == (
        "w.yaml:5: scheduling.scorers.prefx: unknown scorer 'prefx'; did you mean 'prefix'?"
    )
    with pytest.raises(ConfigError, match=r"^w\.yaml:1: unknown scorer"):
        parse("prefix: {}", "w.yaml", check)


def test_aliases_are_followed_and_bombs_are_not() -> None:
    labels = "pool: {endpoints: [{address: '1.2.3.4:5', labels: &l {a: b}}, "
    config = parse(labels + "{address: '1.2.3.4:6', labels: *l}]}")
    assert config.pool.endpoints[1].labels == {"a": "b"}
    assert "nested deeper" in problem("models: &a [*a]")
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10)
    )
    assert f"more than {MAX_NODES:,} values" in problem(bomb)
    assert "nested deeper" in problem("[" * 20_000)
    assert "at most 4 MiB" in problem("#" * (4 << 20) + "#")


@given(st.text(max_size=60))
def test_any_text_is_a_configuration_or_an_error_in_one_line(text: str) -> None:
    try:
        config = parse(text)
    except ConfigError as error:
        assert "\n" not in str(error)
    else:
        assert config == Config()


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
names = st.sampled_from([*as_data(Config()), *as_data(Config())["metrics"], "x", "weight"])
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4),
    max_leaves=12,
)


@given(trees)
def test_any_tree_is_a_configuration_or_an_error_that_names_the_file(tree: object) -> None:
    try:
        config = parse(yaml.safe_dump(tree), "w.yaml")
    except ConfigError as error:
        assert str(error).startswith("w.yaml")
    else:
        assert parse(plain(as_data(config))) == config


@pytest.mark.parametrize(
    ("written", "value"),
    [("50ms", 0.05), ("2s", 2), ("1.5m", 90), ("1h", 3600), ("3", 3), (4, 4), (0.5, 0.5)],
)
def test_durations(written: object, value: float) -> None:
    assert seconds(written) == pytest.approx(value)


@pytest.mark.parametrize(
    ("written", "value"), [("64KiB", 65536), ("16Mi", 16 << 20), ("0.5GiB", 1 << 29), (256, 256)]
)
def test_sizes(written: object, value: int) -> None:
    assert num_bytes(written) == value


@pytest.mark.parametrize(
    "written", ["", "s", "1d", "1 s s", "1_000s", "1e3s", "∞s", "٣s", "-1s", True, None, [], 1e999]
)
def test_no_durations(written: object) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        seconds(written)


def test_numbers_keep_their_types() -> None:
    config = parse("drain: 3\nmaxBody: 2048")
    assert type(config.drain) is Duration
    assert type(config.max_body) is Size


def test_lines_are_kept_for_every_place() -> None:
    document = Document("a:\n- b\n- c: 1\n  d: 2\n", "w")
    places = {("a",): 1, ("a", 0): 2, ("a", 1, "d"): 4, ("a", 1, "d", "gone"): 4, ("z",): 1}
    assert {place: document.line(place) for place in places} == places
