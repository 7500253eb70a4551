"""The reference picker's flags on `warmpath pick`."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from picker.cli import main
from picker.commands.pick import pick
from picker.commands.reference_flags import FLAGS, IGNORED, Applied, applied
from picker.config import Config
from picker.reference.load import parse
from tests.picker.reference.test_files import FILES


def flags(*args: str) -> Applied:
    with pick.make_context("pick", list(args)) as context:
        return applied(context)


def config_of(*args: str, text: str = "") -> Config:
    result = flags(*args)
    return parse(text, "w.yaml", beneath=result.beneath, above=result.above).config


def check(*args: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(pick, [str(arg) for arg in args] + ["--check"])
    assert "Traceback" not in result.output
    return result.exit_code, result.output


POOL = ("--pool-name", "llama", "--pool-namespace", "models")


def test_its_flags_need_no_command() -> None:
    """As in its chart, which gives an image arguments and no command."""
    for first in ("--pool-name llama", "-pool-name=llama", "-v=1 --pool-name llama"):
        args = [*first.split(), "--pool-namespace", "models", "--zap-encoder", "json", "--check"]
        result = CliRunner().invoke(main, args)
        assert result.exit_code == 0, result.output
        assert "the configuration can be used" in result.output
    result = CliRunner().invoke(main, ["--pool-nam", "llama"])
    assert result.exit_code == 2
    assert "No such option" in result.output
    assert "--pool-name" in result.output
    for option, said in (("-h", "Commands:"), ("--help", "Commands:"), ("--version", "warmpath, ")):
        result = CliRunner().invoke(main, [option])
        assert result.exit_code == 0
        assert said in result.output


def test_a_pool_selects_the_reference_pickers_world() -> None:
    config = config_of(*POOL)
    kubernetes = config.pool.kubernetes
    assert (kubernetes.pool, kubernetes.namespace) == ("llama", "models")
    assert kubernetes.group == "inference.networking.k8s.io"
    assert config.pool.name == "llama"
    listen = config.listen
    assert (listen.host, listen.tls.mode, listen.metrics_auth) == (
        "0.0.0.0",
        "selfSigned",
        "tokenReview",
    )
    assert (listen.grpc, listen.health, listen.admin) == (9002, 9003, 9090)


def test_without_a_pool_nothing_changes_by_itself() -> None:
    assert config_of() == Config()
    assert config_of("--tracing=false", "-v=2") == Config()


def test_a_selector_stands_for_a_pool() -> None:
    config = config_of(
        "--endpoint-selector", "app=llama,tier==chat", "--endpoint-target-ports", "8000,8001,8000"
    )
    assert config.pool.kubernetes.selector == {"app": "llama", "tier": "chat"}
    assert config.pool.kubernetes.target_ports == [8000, 8001]
    assert config.listen.tls.mode == "selfSigned"


def test_the_namespace_is_the_pods_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAMESPACE", "mine")
    assert config_of("--pool-name", "llama").pool.kubernetes.namespace == "mine"
    assert config_of(*POOL).pool.kubernetes.namespace == "models"


def test_what_the_file_says_wins_over_the_world_and_a_flag_over_the_file() -> None:
    text = "listen: {host: 127.0.0.1, tls: {mode: none}, admin: 1}\nmetrics: {interval: 1s}\n"
    config = config_of(*POOL, "--metrics-port=2", text=text)
    listen = config.listen
    assert (listen.host, listen.tls.mode, listen.metrics_auth, listen.admin) == (
        "127.0.0.1",
        "none",
        "tokenReview",
        2,
    )
    assert config_of("--refresh-metrics-interval=100ms", text=text).metrics.interval == 0.1


@pytest.mark.parametrize(
    ("args", "mode"),
    [
        (("--secure-serving=false",), "none"),
        (("--secure-serving=f", "--cert-path=/certs"), "none"),
        (("--secure-serving",), "selfSigned"),
        (("--cert-path", "/certs"), "files"),
        (("--cert-path=/certs", "--secure-serving=T", "--enable-cert-reload"), "files"),
    ],
)
def test_tls(args: tuple[str, ...], mode: str) -> None:
    for more in ((), POOL):
        tls = config_of(*args, *more).listen.tls
        assert tls.mode == mode
        if mode == "files":
            assert (tls.certificate, tls.key) == ("/certs/tls.crt", "/certs/tls.key")


def test_the_other_flags_have_their_places() -> None:
    config = config_of(
        "--grpc-port=1",
        "--grpc-health-port=2",
        "--metrics-port=3",
        "--metrics-endpoint-auth=false",
        "--ha-enable-leader-election",
        "--metrics-staleness-threshold=500ms",
        "--disable-endpoint-subset-filter",
        "--model-server-metrics-scheme=https",
        "--model-server-metrics-path=/prometheus",
        "--model-server-metrics-port=8080",
        "--engine-label-key=engine",
        "--drain-timeout=1m10s",
        "--total-queued-requests-metric=nv_trt_llm_request_metrics{request_type=waiting}",
        "--lora-info-metric=",
        *POOL,
    )
    listen, metrics = config.listen, config.metrics
    assert (listen.health, listen.admin, listen.metrics_auth) == (2, 3, "none")
    assert config.leader_election.enabled
    assert (metrics.stale_after, metrics.idle_interval) == (0.5, 0.25)
    assert config.pool.ignore_subset
    assert config.pool.kubernetes.pool == "llama"
    assert (metrics.scheme, metrics.insecure_skip_verify) == ("https", True)
    assert (metrics.path, metrics.port, metrics.engine_label) == ("/prometheus", 8080, "engine")
    assert config.drain == 70
    vllm = metrics.engines["vllm"]
    assert vllm.waiting == "nv_trt_llm_request_metrics{request_type=waiting}"
    assert (vllm.running, vllm.adapters) == ("vllm:num_requests_running", "")


@pytest.mark.parametrize(
    "args",
    [
        ("--pool-name", "llama", "-v", "4"),
        ("--pool-name=llama", "-v=4"),
        ("-pool-name", "llama", "--v=4"),
        ("-pool-name=llama", "-v4"),
        ("--pool-name", "llama", "--zap-log-level=debug"),
        ("--pool-name", "llama", "--zap-log-level", "5", "-v", "0"),
    ],
)
def test_flags_are_written_as_in_go(args: tuple[str, ...]) -> None:
    result = flags(*args)
    assert result.above["pool"]["kubernetes"]["pool"] == "llama"
    assert result.log_level == 10


def test_a_switch_takes_its_value_after_an_equals_sign_only() -> None:
    result = flags("--secure-serving", "false", "--enable-pprof", "--pool-name", "true")
    assert result.above["listen"]["tls"]["mode"] == "selfSigned"
    assert result.above["pool"]["kubernetes"]["pool"] == "true"
    assert result.notes[0].startswith("`false` after --secure-serving is ignored")
    assert result.notes[1:] == ["--enable-pprof is ignored: there is no pprof"]
    for written in ("1", "t", "TRUE", "True"):
        assert flags(f"--secure-serving={written}").above["listen"]["tls"]["mode"] != "none"


def test_what_means_nothing_here_is_told() -> None:
    notes = flags("--tracing", "--zap-encoder", "json", "--health-checking=true").notes
    assert notes == [
        "--health-checking is ignored: gRPC health is always served",
        "--tracing is ignored: no traces are written",
        "--zap-encoder is ignored: the log is text, one line an event",
    ]
    assert flags("--tracing=false", "--enable-pprof=false", "--zap-devel=false").notes == []
    code, output = check("--endpoint", "127.0.0.1:1", "--tracing")
    assert code == 0
    assert "Warning: --tracing is ignored: no traces are written\n" in output


def test_every_flag_is_taken_and_shown_by_itself() -> None:
    values = {"pool-group": "inference.networking.x-k8s.io", "model-server-metrics-scheme": "http"}
    values |= {"endpoint-selector": "a=b", "endpoint-target-ports": "1", "v": "1"}
    for name, (kind, _) in {**FLAGS, **IGNORED}.items():
        value = values.get(name) or {"read": "1s", "_bool": "true"}.get(
            getattr(kind, "__name__", ""), "1"
        )
        with pick.make_context("pick", [f"--{name}={value}"]):
            pass
    shown = CliRunner().invoke(pick, ["--help"], terminal_width=200).output
    own, _, reference = shown.partition("Flags of the reference picker:")
    assert "--admin-port" in own
    for name in (*FLAGS, *IGNORED):
        assert f"--{name}" in reference


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--pool-name=a", "--endpoint-selector=a=b"), "exclude each other"),
        (("--pool-name=a", "--endpoint=127.0.0.1:1"), "--endpoint excludes --pool-name"),
        (("--endpoint-selector=a=b",), "needs --endpoint-target-ports"),
        (("--endpoint-target-ports=1", "--pool-name=a"), "belong to --endpoint-selector"),
        (("--endpoint-target-ports=1,2,3,4,5,6,7,8,9",), "at most 8 ports"),
        (("--endpoint-target-ports=0",), "'0' is no port"),
        (("--endpoint-selector=a in (b)",), "is not key=value, which alone is understood"),
        (("--config-file=a", "--config-text=b"), "exclude each other"),
        (("-c", "a", "--config-file=b"), "exclude each other"),
        (("--pool-group=apps",), "apps"),
        (("--secure-serving=maybe",), "'maybe' is not true or false"),
        (("--refresh-metrics-interval=50",), "'50' is not a duration: write 200ms"),
        (("--refresh-metrics-interval=1us",), "must be between 5ms and 1m"),
        (("--grpc-health-port=70000",), "70000"),
        (("--pool-name=a", "--zap-log-level=loud"), "'loud' is no level"),
        ((), "say which pods"),
        (("--secure-serving",), "say which pods"),
    ],
)
def test_wrong_usage_exits_with_2(args: tuple[str, ...], message: str) -> None:
    code, output = check(*args)
    assert code == 2
    assert message in " ".join(output.split())


def test_an_endpoint_picker_config_is_a_configuration() -> None:
    path = FILES / "gie-old.yaml"
    for way in ("-c", "--config", "--config-file"):
        code, output = check(way, path)
        assert code == 0
        assert f"{path} can be used\n" in output
        assert f"Warning: {path}:8: plugins[2].parameters: " in output
    code, output = check("--config-text", path.read_text(), *POOL)
    assert code == 0
    code, output = check("-c", FILES / "llm-d-disaggregated.yaml")
    assert code == 3
    assert "disagg-profile-handler" in output


def test_its_pods_are_named_by_flags() -> None:
    result = CliRunner().invoke(pick, ["-c", str(FILES / "gie-default.yaml")])
    assert result.exit_code == 2
    assert "names no pods: add --pool-name" in result.output
    assert check("-c", FILES / "gie-default.yaml", "--endpoint", "127.0.0.1:1")[0] == 0
