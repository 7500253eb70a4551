"""The reference picker's flags on `warmpath pick`: its names, its meaning, Go's way to write them.

`--pool-name` and `--endpoint-selector` select the reference picker's world, with its defaults: it
listens on all interfaces, with a certificate of its own making, and who reads metrics must have a
token.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from picker.config import check_range
from picker.reference.quantity import duration

Data = dict[str, Any]
SECTION = "Flags of the reference picker"
TRUE, FALSE = {"1", "t", "T", "TRUE", "true", "True"}, {"0", "f", "F", "FALSE", "false", "False"}
GROUPS = ("inference.networking.k8s.io", "inference.networking.x-k8s.io")
METRIC_FLAGS = {  # flag -> key of metrics.engines, and the reference picker's default
    "total-queued-requests-metric": ("waiting", "vllm:num_requests_waiting"),
    "total-running-requests-metric": ("running", "vllm:num_requests_running"),
    "kv-cache-usage-percentage-metric": ("kvUsage", "vllm:kv_cache_usage_perc"),
    "lora-info-metric": ("adapters", "vllm:lora_requests_info"),
    "cache-info-metric": ("cacheInfo", "vllm:cache_config_info"),
}
MAX_PORTS = 8
VERBOSE = 4  # -v from which on debug lines are logged
_LABEL = re.compile(r"[A-Za-z0-9][-A-Za-z0-9_./]{0,316}")
_VALUE = re.compile(r"[A-Za-z0-9][-A-Za-z0-9_.]{0,62}|")


class ReferenceOption(click.Option):
    """Shown in a section of its own."""


@dataclass
class Applied:
    """What the flags that were given mean."""

    beneath: Data = field(default_factory=dict)  # holds where the file does not say
    above: Data = field(default_factory=dict)  # holds whatever it says
    notes: list[str] = field(default_factory=list)  # what is ignored
    names_pods: bool = False
    config_file: Path | None = None
    config_text: str | None = None
    log_level: int | None = None


def _bool(value: str | bool) -> bool:
    if value not in TRUE | FALSE:
        raise click.BadParameter(f"{value!r} is not true or false")
    return value in TRUE


def _duration(key: str = "") -> Callable[[str], float]:
    """Reads a duration as Go writes it, in the range of a key of warmpath.yaml."""

    def read(value: str) -> float:
        try:
            seconds = float(duration(value))
            if key:
                check_range(key, seconds, value)
        except ValueError as problem:
            raise click.BadParameter(str(problem)) from problem
        return seconds

    return read


def _selector(value: str) -> dict[str, str]:
    labels: dict[str, str] = {}
    for pair in value.split(","):
        key, equals, told = pair.strip().replace("==", "=", 1).partition("=")
        if not equals or not _LABEL.fullmatch(key) or not _VALUE.fullmatch(told):
            raise click.BadParameter(f"{pair[:100]!r} is not key=value, which alone is understood")
        labels[key] = told
    return labels


def _ports(value: str) -> list[int]:
    ports: list[int] = []
    for text in value.split(","):
        if not re.fullmatch(r"[0-9]{1,5}", text.strip()) or not 0 < int(text) < 65536:
            raise click.BadParameter(f"{text[:20]!r} is no port")
        if int(text) not in ports:
            ports.append(int(text))
    if len(ports) > MAX_PORTS:
        raise click.BadParameter(f"at most {MAX_PORTS} ports")
    return ports


PORT, TEXT = click.IntRange(0, 65535), click.STRING
FILE = click.Path(dir_okay=False, path_type=Path)

FLAGS: dict[str, tuple[Any, str]] = {
    "pool-name": (TEXT, "InferencePool whose pods are picked."),
    "pool-namespace": (TEXT, "Its namespace.  [default: $NAMESPACE, else the picker's own]"),
    "pool-group": (click.Choice(GROUPS), "Its API group."),
    "endpoint-selector": (_selector, "Labels of the pods, in place of a pool."),
    "endpoint-target-ports": (_ports, f"Their ports, 1 to {MAX_PORTS}."),
    "config-file": (FILE, "As -c: an EndpointPickerConfig, or a warmpath.yaml."),
    "config-text": (TEXT, "The same as text."),
    "grpc-health-port": (PORT, "As --health-port."),
    "metrics-port": (PORT, "As --admin-port."),
    "secure-serving": (_bool, "TLS for ext_proc.  [default with a pool: true]"),
    "cert-path": (TEXT, "Directory of tls.crt and tls.key; else self-signed."),
    "enable-cert-reload": (_bool, "They are read again when they change, always."),
    "metrics-endpoint-auth": (_bool, "Metrics only with a token.  [default with a pool: true]"),
    "ha-enable-leader-election": (_bool, "Only one of several pickers is ready."),
    "refresh-metrics-interval": (_duration("metrics.interval"), "As --metrics-interval."),
    "metrics-staleness-threshold": (
        _duration("metrics.staleAfter"),
        "Without an answer for so long, a pod is passed over.",
    ),
    "disable-endpoint-subset-filter": (_bool, "Ignore the subset that a gateway names."),
    "model-server-metrics-scheme": (click.Choice(["http", "https"]), "How pods are asked."),
    "model-server-metrics-path": (TEXT, "Where their metrics are."),
    "model-server-metrics-port": (PORT, "On another port than requests."),
    "model-server-metrics-https-insecure-skip-verify": (_bool, "Believe any certificate."),
    "engine-label-key": (TEXT, "Label of pods that names their engine."),
    "drain-timeout": (_duration("drain"), "For requests in flight, at SIGTERM."),
    "total-queued-requests-metric": (TEXT, "Deprecated: name of vLLM's metric."),
    "total-running-requests-metric": (TEXT, "The same."),
    "kv-cache-usage-percentage-metric": (TEXT, "The same."),
    "lora-info-metric": (TEXT, "The same."),
    "cache-info-metric": (TEXT, "The same."),
    "v": (click.IntRange(-10, 1000), f"Verbosity: from {VERBOSE} on debug lines are logged."),
    "zap-log-level": (TEXT, "debug, info, error, panic, or a verbosity."),
}
IGNORED: dict[str, tuple[Any, str]] = {  # a value, and why it means nothing here
    "refresh-prometheus-metrics-interval": (_duration(), "metrics are made when they are read"),
    "health-checking": (_bool, "gRPC health is always served"),
    "tracing": (_bool, "no traces are written"),
    "enable-pprof": (_bool, "there is no pprof"),
    "enable-multi-engine": (_bool, "pods' engines are always told by their labels"),
    "enable-grpc-stream-metrics": (_bool, "streams are counted by their requests"),
    "emit-endpoint-scores": (_bool, "scores are shown by `warmpath explain`"),
    "allow-experimental-plugins": (_bool, "no plugin is experimental"),
    "grpc-max-recv-msg-size": (TEXT, "maxBody of warmpath.yaml limits requests"),
    "grpc-max-send-msg-size": (TEXT, "maxBody of warmpath.yaml limits requests"),
    "zap-devel": (_bool, "the log is text, one line an event"),
    "zap-encoder": (TEXT, "the log is text, one line an event"),
    "zap-stacktrace-level": (TEXT, "the log is text, one line an event"),
    "zap-time-encoding": (TEXT, "the log is text, one line an event"),
}
METAVARS = {"_bool": "BOOL", "read": "DURATION", "_selector": "K=V,...", "_ports": "PORT,..."}
QUIET = {"false", "console", "True", "epoch"}  # of these values nothing is expected
BOOLS = {name for name, (kind, _) in {**FLAGS, **IGNORED}.items() if kind is _bool}


def reference_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that adds them all; the command gets those that were given as `reference`."""
    entries = [(name, kind, text) for name, (kind, text) in FLAGS.items()]
    entries += [(name, kind, f"Ignored: {why}.") for name, (kind, why) in IGNORED.items()]
    for name, kind, text in reversed(entries):
        names = ["-v", "--v"] if name == "v" else [f"--{name}"]
        metavar = METAVARS.get(getattr(kind, "__name__", ""))
        command = click.option(
            *names,
            _parameter(name),
            type=kind,
            cls=ReferenceOption,
            help=text,
            metavar=metavar,
            expose_value=False,
            callback=_remember,
        )(command)
    return command


def _parameter(name: str) -> str:
    return "reference_" + name.replace("-", "_")


def _remember(ctx: click.Context, option: click.Parameter, value: Any) -> None:
    if value is not None:
        given: Data = ctx.meta.setdefault(__name__, {})
        given[(option.name or "").removeprefix("reference_").replace("_", "-")] = value


class PickCommand(click.Command):
    """Understands flags as Go's pflag does, and shows the reference picker's by themselves."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        notes: list[str] = []
        ctx.meta[f"{__name__}.notes"] = notes
        return super().parse_args(ctx, normalised(args, notes))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own: list[tuple[str, str]] = []
        reference: list[tuple[str, str]] = []
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                (reference if isinstance(parameter, ReferenceOption) else own).append(record)
        with formatter.section("Options"):
            formatter.write_dl(own)
        with formatter.section(SECTION):
            formatter.write_dl(reference)


def normalised(args: Sequence[str], notes: list[str]) -> list[str]:
    """Arguments as click understands them.

    A flag that is true or false takes its value after `=` only, and a flag with one dash is meant
    to have two. A word that the reference picker would not look at is left out, and noted.
    """
    written: list[str] = []
    skipping = False
    for i, argument in enumerate(args):
        if argument == "--":
            return [*written, *args[i:]]
        if skipping:
            skipping = False
            continue
        name, equals, value = argument.lstrip("-").partition("=")
        if argument.startswith("-") and (name in FLAGS or name in IGNORED):
            if name in BOOLS and not equals:
                equals, value = "=", "true"
                if i + 1 < len(args) and args[i + 1] in TRUE | FALSE:
                    notes.append(
                        f"`{args[i + 1]}` after --{name} is ignored, as by the reference picker: "
                        f"write --{name}={args[i + 1]}"
                    )
                    skipping = True
            argument = f"--{name}{equals}{value}"
        written.append(argument)
    return written


def applied(ctx: click.Context) -> Applied:
    """What the flags of a command line mean.

    Raises:
        click.UsageError: they exclude each other.
    """
    given: Data = ctx.meta.get(__name__, {})
    result = Applied(notes=list(ctx.meta.get(f"{__name__}.notes", ())))
    _pods(given, result)
    _security(given, result)
    _metrics(given, result)
    _log_level(given, result)
    above = result.above
    if "config-file" in given and "config-text" in given:
        raise click.UsageError("--config-file and --config-text exclude each other")
    result.config_file, result.config_text = given.get("config-file"), given.get("config-text")
    if "grpc-health-port" in given:
        above.setdefault("listen", {})["health"] = given["grpc-health-port"]
    if "metrics-port" in given:
        above.setdefault("listen", {})["admin"] = given["metrics-port"]
    if "ha-enable-leader-election" in given:
        above["leaderElection"] = {"enabled": given["ha-enable-leader-election"]}
    if "disable-endpoint-subset-filter" in given:
        ignore = given["disable-endpoint-subset-filter"]
        above.setdefault("pool", {})["ignoreSubset"] = ignore
    if "drain-timeout" in given:
        above["drain"] = given["drain-timeout"]
    for name, (_, why) in IGNORED.items():
        value = given.get(name)
        if value and value not in QUIET:
            result.notes.append(f"--{name} is ignored: {why}")
    return result


def _pods(given: Mapping[str, Any], result: Applied) -> None:
    pool, selector = given.get("pool-name"), given.get("endpoint-selector")
    ports = given.get("endpoint-target-ports")
    if pool and selector:
        raise click.UsageError("--pool-name and --endpoint-selector exclude each other")
    if selector and not ports:
        raise click.UsageError("--endpoint-selector needs --endpoint-target-ports")
    if ports and not selector:
        raise click.UsageError("--endpoint-target-ports belong to --endpoint-selector")
    if not pool and not selector:
        return
    found: Data = {"pool": pool} if pool else {"selector": selector, "targetPorts": ports}
    namespace = given.get("pool-namespace") or os.environ.get("NAMESPACE")
    found |= {"namespace": namespace} if namespace else {}
    found |= {"group": given["pool-group"]} if "pool-group" in given else {}
    result.names_pods = True
    result.above["pool"] = {"kubernetes": found}
    result.beneath = {
        "listen": {
            "host": "0.0.0.0",  # noqa: S104  # as a gateway expects
            "tls": {"mode": "selfSigned"},
            "metricsAuth": "tokenReview",
        },
        "pool": {"name": pool or "default"},
    }


def _security(given: Mapping[str, Any], result: Applied) -> None:
    secure, path = given.get("secure-serving"), given.get("cert-path")
    listen = result.above.setdefault("listen", {})
    if secure is False:
        listen["tls"] = {"mode": "none"}
    elif path:
        certificate, key = Path(path) / "tls.crt", Path(path) / "tls.key"
        listen["tls"] = {"mode": "files", "certificate": str(certificate), "key": str(key)}
    elif secure:
        listen["tls"] = {"mode": "selfSigned"}
    if given.get("enable-cert-reload") is False and path:
        result.notes.append("--enable-cert-reload=false is ignored: certificates are read again")
    if "metrics-endpoint-auth" in given:
        asked = given["metrics-endpoint-auth"]
        listen["metricsAuth"] = "tokenReview" if asked else "none"


def _metrics(given: Mapping[str, Any], result: Applied) -> None:
    metrics: Data = {}
    for flag, key in (
        ("refresh-metrics-interval", "interval"),
        ("metrics-staleness-threshold", "staleAfter"),
        ("model-server-metrics-scheme", "scheme"),
        ("model-server-metrics-port", "port"),
        ("model-server-metrics-https-insecure-skip-verify", "insecureSkipVerify"),
        ("engine-label-key", "engineLabel"),
    ):
        if flag in given:
            metrics[key] = given[flag]
    if given.get("model-server-metrics-path", "/metrics") != "/metrics":
        metrics["path"] = given["model-server-metrics-path"]
    if metrics.get("scheme") == "https":
        metrics.setdefault("insecureSkipVerify", True)
    if metrics.get("staleAfter", 2.0) <= 1.0:  # seconds: an idle pod must be asked in time
        metrics["idleInterval"] = metrics["staleAfter"] / 2
    if METRIC_FLAGS.keys() & given.keys():
        names = {key: given.get(flag, usual) for flag, (key, usual) in METRIC_FLAGS.items()}
        metrics["engines"] = {"vllm": names}
    if metrics:
        result.above["metrics"] = metrics


def _log_level(given: Mapping[str, Any], result: Applied) -> None:
    verbosity = given.get("v")
    told = str(given.get("zap-log-level", ""))
    if told.isdecimal():
        verbosity = int(told[:4])
    elif told in ("panic", "error", "info", "debug"):
        result.log_level = {"error": logging.ERROR, "panic": logging.ERROR}.get(told, logging.INFO)
        if told == "debug":
            result.log_level = logging.DEBUG
        return
    elif told:
        raise click.UsageError(f"--zap-log-level: {told[:40]!r} is no level")
    if verbosity is not None:
        result.log_level = logging.DEBUG if verbosity >= VERBOSE else logging.INFO
