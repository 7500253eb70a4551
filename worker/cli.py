"""`warmpath work`: one worker, from its flags to a served model."""

from __future__ import annotations

import logging
from math import isnan

import click

from worker.options import WorkOptions
from worker.profiles import PROFILES

EXAMPLES = """\b
Examples:
  warmpath work --model smollm2-135m --port 8001
  warmpath work --model ./Llama-3.2-1B-Instruct --dtype bfloat16 --device cuda
  warmpath work --simulate llama-8b-h100 --served-model-name llama --port 8001
"""


@click.command(epilog=EXAMPLES)
@click.option("--model", help="A directory, a .gguf file, or a name from `warmpath model list`.")
@click.option(
    "--served-model-name",
    "served_model_names",
    multiple=True,
    help="Name that clients use; repeat for aliases.  [default: the model's]",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="HTTP port; 0: any free one.",
)
@click.option(
    "--advertise-host",
    envvar="POD_IP",
    show_envvar=True,
    help="Address by which KV events name this worker.  [default: --host, or this machine's]",
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16"]),
    default="auto",
    show_default=True,
    help="auto: float32 on a CPU, bfloat16 on a GPU.",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="auto: a GPU where there is one.",
)
@click.option("--max-model-len", type=click.IntRange(2), help="Longest prompt plus answer.")
@click.option(
    "--max-num-seqs",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="Sequences in one step.",
)
@click.option(
    "--max-num-batched-tokens",
    type=click.IntRange(1),
    help="Tokens in one step.  [default: 512 on a CPU, 8192 on a GPU]",
)
@click.option(
    "--max-num-queued-reqs",
    type=click.IntRange(1),
    default=1024,
    show_default=True,
    help="Waiting sequences, above which requests get 503.",
)
@click.option(
    "--block-size",
    type=click.IntRange(1, 1024),
    default=16,
    show_default=True,
    help="Tokens in a KV block.",
)
@click.option(
    "--num-blocks", type=click.IntRange(1, 1 << 24), help="KV blocks.  [default: what fits]"
)
@click.option(
    "--gpu-memory-utilization",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.92,
    show_default=True,
    help="Share of the GPU's memory for weights and KV. A CPU worker takes 1 GiB for KV.",
)
@click.option(
    "--enable-prefix-caching/--no-enable-prefix-caching",
    default=True,
    show_default=True,
    help="Reuse the KV of prompts that begin like earlier ones.",
)
@click.option(
    "--preallocate",
    is_flag=True,
    help="Admit a sequence only with room for its longest answer: no preemption, fewer at once.",
)
@click.option(
    "--api-key",
    envvar="WARMPATH_API_KEY",
    show_envvar=True,
    help="Bearer token that clients must send.",
)
@click.option(
    "--kv-events-port",
    type=click.IntRange(0, 65535),
    default=5557,
    show_default=True,
    help="ZMQ PUB port of KV events; 0: any free one.",
)
@click.option(
    "--kv-replay-port",
    type=click.IntRange(0, 65535),
    default=5558,
    show_default=True,
    help="ZMQ ROUTER port where missed KV events are asked for.",
)
@click.option(
    "--kv-events/--no-kv-events",
    default=True,
    show_default=True,
    help="Tell subscribers which prefixes are cached.",
)
@click.option(
    "--simulate",
    metavar="PROFILE",
    type=click.Choice(list(PROFILES)),
    help=f"Take a model's time instead of running it: {', '.join(PROFILES)}.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    show_default=True,
    help="Of a simulated model's answers.",
)
@click.option(
    "--max-body-bytes",
    type=click.IntRange(1),
    default=32 << 20,
    show_default=True,
    help="Largest request body.",
)
@click.option(
    "--drain-seconds",
    type=click.FloatRange(0, 86_400),
    default=30.0,
    show_default=True,
    help="How long SIGTERM waits for running requests.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="Least important log lines to show.",
)
def work(log_level: str, **flags: object) -> None:
    """Serve one model with an OpenAI API, vLLM's metrics and KV events.

    Without --simulate the model really runs, on the CPU or an NVIDIA GPU. With it, only its
    time is spent: scheduler, KV blocks, events, metrics and API are the same, so that a
    laptop can run a cluster. --model then gives the tokenizer; without one, bytes are tokens.
    """
    options = WorkOptions(**flags)  # type: ignore[arg-type]  # click has checked the types
    if any(not value for value in (options.host, *options.served_model_names)):
        raise click.UsageError("--host and --served-model-name must not be empty")
    if "" in (options.model, options.api_key):
        raise click.UsageError("--model and --api-key must not be empty")
    if isnan(options.drain_seconds) or isnan(options.gpu_memory_utilization):
        raise click.UsageError("--drain-seconds and --gpu-memory-utilization must be numbers")
    if options.model is None and options.simulate is None:
        raise click.UsageError("say which model to serve: --model NAME, or --simulate PROFILE")
    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(levelname)-7s %(name)s: %(message)s"
    )
    import uvloop

    from worker.launch import launch  # after the flags are checked: it loads the server

    try:
        uvloop.run(launch(options))
    except OSError as problem:
        raise click.ClickException(problem.strerror or str(problem)) from problem
    except ValueError as problem:
        raise click.ClickException(str(problem)) from problem
