"""Files as the reference picker's users have them, and what they mean here."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from picker.config import Config
from picker.document import ConfigError
from picker.reference.load import Loaded, load, parse
from picker.service import check_config

FILES = Path(__file__).parent / "files"


def read(name: str) -> Loaded:
    return load(FILES / f"{name}.yaml", check_config)


def config_of(name: str) -> Config:
    return read(name).config


def test_the_default_of_the_reference_picker() -> None:
    loaded = read("gie-default")
    assert loaded.is_reference
    assert loaded.notes == []
    scheduling = loaded.config.scheduling
    assert scheduling.scorers == {
        "queue-scorer": {"type": "queue", "weight": 2},
        "kv-cache-utilization-scorer": {"type": "kv", "weight": 2},
        "prefix-cache-scorer": {"type": "prefix", "weight": 3},
    }
    assert scheduling.filters == []
    assert (scheduling.picker.type, scheduling.picker.fallbacks) == ("maxScore", 0)


def test_without_the_gate_nobody_waits_and_what_is_sheddable_is_shed() -> None:
    flow = config_of("gie-default").flow
    assert (flow.enabled, flow.queue, flow.sheddable) == (True, False, "reject")
    assert (flow.saturation.waiting, flow.saturation.kv) == (5, 0.8)
    assert config_of("gie-default").identity.header == "x-gateway-inference-fairness-id"
    assert "x-gateway-model-name-rewrite" in config_of("gie-default").rewrite_headers


def test_everything_in_one_file() -> None:
    loaded = read("gie-everything")
    config = loaded.config
    assert config.scheduling.scorers == {
        "queue": {"type": "queue", "weight": 2.5},
        "running-requests-size-scorer": {"type": "running", "weight": 1},
        "lora-affinity-scorer": {"type": "lora", "weight": 0},
        "prefix": {"type": "prefix", "weight": 3},
    }
    assert config.scheduling.filters == [
        {"type": "capacity", "waiting": 10.5, "kvUsage": 1.0},
    ]
    assert config.scheduling.picker.fallbacks == 2
    assert (config.prefix.block_bytes, config.prefix.max_blocks) == (128, 4096)
    metrics = config.metrics
    assert (metrics.scheme, metrics.path, metrics.insecure_skip_verify) == (
        "https",
        "/v1/metrics",
        True,
    )
    assert (metrics.engine, metrics.engine_label) == ("mine", "example.com/engine")
    assert metrics.engines["mine"].waiting == 'mine_requests{state="queued"}'
    assert metrics.engines["mine"].kv_usage == "mine_kv_usage"
    flow = config.flow
    assert (flow.enabled, flow.queue, flow.order, flow.ttl) == (True, True, "deadline", 90)
    assert (flow.max_bytes, flow.max_requests) == (4 << 30, 10_000)
    assert (flow.sheddable, flow.scale_from_zero) == ("queue", "queue")
    assert (flow.tenant_requests, flow.tenant_bytes) == (0, 0)
    assert (flow.saturation.waiting, flow.saturation.kv) == (7, 0.9)
    assert loaded.notes == []


def test_files_from_before_there_were_plugins_for_everything() -> None:
    loaded = read("gie-old")
    config = loaded.config
    assert (config.flow.saturation.waiting, config.flow.saturation.kv) == (10, 0.7)
    # No profile: one of all filters, scorers and pickers, with weight 1.
    weights = {name: each["weight"] for name, each in config.scheduling.scorers.items()}
    assert weights == {
        "queue-scorer": 1,
        "kv-cache-utilization-scorer": 1,
        "prefix-cache-scorer": 1,
    }
    assert config.scheduling.picker.type == "random"
    assert config.prefix.block_bytes == 64
    # As much of a prompt is compared as ever, or long warm prompts would seem cold.
    assert config.prefix.max_blocks * config.prefix.block_bytes == 256 << 10
    (note,) = loaded.notes
    assert note.startswith(f"{FILES / 'gie-old.yaml'}:8: plugins[2].parameters: ")
    assert "lruCapacityPerServer is ignored" in note


def test_the_optimized_baseline_of_llm_d() -> None:
    scorers = config_of("llm-d-optimized-baseline").scheduling.scorers
    assert scorers["no-hit-lru-scorer"] == {"type": "noHitLru", "weight": 2}
    assert sum(each["weight"] for each in scorers.values()) == 9


def test_precise_prefixes_of_llm_d() -> None:
    loaded = read("llm-d-precise-prefix")
    config = loaded.config
    assert config.prefix.mode == "events"
    assert (config.prefix.events.port, config.prefix.tokenizer) == (5600, "pods")
    active = config.scheduling.scorers["active-request-scorer"]
    assert active == {"type": "active", "idle": 2, "busy": 0.5, "weight": 4}
    (decode,) = config.scheduling.filters
    assert decode["label"] == "llm-d.ai/role"
    assert decode["missing"] is True
    assert "prefill" not in decode["values"]
    assert [note.partition(": ")[2] for note in loaded.notes] == [
        "plugins[0].parameters: token-producer: its parameters are ignored: with KV events, pods "
        "are asked for their tokens"
    ]


def test_producers_in_a_profile_are_ignored_with_a_warning() -> None:
    """As files of llm-d have them from when its tokenizer was a scorer."""
    text = (
        "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n"
        "- type: tokenizer\n  parameters: {modelName: llama, udsTokenizerConfig: {timeout: 5s}}\n"
        "- {name: inflight, type: inflight-load-producer}\n- type: precise-prefix-cache-scorer\n"
        "schedulingProfiles:\n- name: default\n  plugins:\n"
        "  - {pluginRef: tokenizer, weight: 0}\n  - pluginRef: inflight\n"
        "  - {pluginRef: precise-prefix-cache-scorer, weight: 3}\n"
    )
    loaded = parse(text, "e.yaml", check_config)
    (scorer,) = loaded.config.scheduling.scorers.items()
    assert scorer == ("precise-prefix-cache-scorer", {"type": "prefix", "weight": 3})
    assert loaded.config.prefix.mode == "events"
    assert [note for note in loaded.notes if "a producer needs no profile" in note] == [
        "e.yaml:11: schedulingProfiles[0].plugins[0].pluginRef: 'tokenizer' (tokenizer) is "
        "ignored: a producer needs no profile",
        "e.yaml:12: schedulingProfiles[0].plugins[1].pluginRef: 'inflight' "
        "(inflight-load-producer) is ignored: a producer needs no profile",
    ]


def test_sticky_until_saturated_of_llm_d() -> None:
    loaded = read("llm-d-sticky")
    config = loaded.config
    assert config.scheduling.filters == [
        {
            "type": "label",
            "matchLabels": {"app": "llama"},
            "matchExpressions": [{"key": "gpu", "operator": "NotIn", "values": ["t4"]}],
        },
        {"type": "warm", "share": 0.75, "slack": 20_000, "waitingTokens": 0},
    ]
    scorers = config.scheduling.scorers
    assert scorers["token-load-scorer"]["threshold"] == 4_194_304
    assert scorers["tiers"] == {"type": "label", "header": "x-tier", "label": "tier", "weight": 3}
    assert scorers["zones"]["label"] == "topology.kubernetes.io/zone"
    assert (config.sessions.header, config.sessions.ttl) == ("x-chat-id", 120)
    assert config.scheduling.picker.type == "weightedRandom"
    flow = config.flow
    assert (flow.queue, flow.ttl, flow.saturation.inflight) == (True, 60, 64)
    assert flow.objective_header == "x-llm-d-inference-objective,x-gateway-inference-objective"
    assert flow.saturation.kv == 1  # and no other limit
    assert loaded.notes == []


def test_what_has_no_equivalent_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError) as refused:
        read("llm-d-disaggregated")
    assert str(refused.value) == (
        f"{FILES / 'llm-d-disaggregated.yaml'}:8: plugins[4].type: disagg-profile-handler: "
        "prefill and decode on different pods are not supported: keep one profile, with "
        "decode-filter where pods are labelled by role"
    )


@pytest.mark.parametrize("path", sorted(FILES.glob("*.yaml")), ids=lambda path: path.stem)
def test_what_a_file_means_can_be_written_as_warmpath_yaml(path: Path) -> None:
    if path.stem == "llm-d-disaggregated":
        return
    from picker.config import as_data, parse
    from picker.document import plain

    config = load(path, check_config).config
    assert parse(plain(as_data(config)), check=check_config) == config


def test_what_is_beneath_and_above_a_file(tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    path.write_text("listen: {grpc: 1, host: ''}\nmetrics:\n")
    beneath = {"listen": {"grpc": 2, "health": 3}, "metrics": {"interval": 0.2}}
    above = {"listen": {"admin": 4, "health": 5}}
    loaded = load(path, beneath=beneath, above=above)
    assert not loaded.is_reference
    listen = loaded.config.listen
    assert (listen.grpc, listen.host, listen.health, listen.admin) == (1, "", 5, 4)
    assert loaded.config.metrics.interval == 0.2
    assert load(path).config == msgspec.structs.replace(
        Config(), listen=msgspec.structs.replace(Config().listen, grpc=1, host="")
    )
