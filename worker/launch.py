"""Puts a worker together from its options, and serves it until it is told to stop."""

from __future__ import annotations

import gc
import logging
import signal
import socket
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from aiohttp import web

from text.byte_tokenizer import ByteTokenizer
from worker.api.bodies import BodyLimits
from worker.api.serving import serve
from worker.config import EngineConfig
from worker.engine import Engine, Runner
from worker.events import Publisher, default_topic
from worker.loop import EngineDeadError, EngineLoop
from worker.metrics import Metrics
from worker.options import WorkOptions
from worker.profiles import PROFILES
from worker.server import make_app
from worker.simulate import SimulatedRunner

if TYPE_CHECKING:
    from text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

LETTERS = b"etaoin shrdlucmf gypwbvk,."  # what a simulated model answers with


@dataclass(frozen=True, slots=True)
class Parts:
    """What differs between a real and a simulated worker."""

    name: str
    config: EngineConfig
    runner: Runner
    tokenizer: Tokenizer | ByteTokenizer
    dtype: str


async def launch(options: WorkOptions) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ValueError: a flag or a model that cannot be served, in one line.
        OSError: a port that cannot be bound.
    """
    started = time.monotonic()
    options = replace(options, port=checked_port(options.host, options.port, "--port"))
    if options.kv_events:
        checked_port(options.host, options.kv_events_port, "--kv-events-port")
        checked_port(options.host, options.kv_replay_port, "--kv-replay-port")
    parts = _simulated(options) if options.simulate else _real(options)
    config = parts.config
    names = options.served_model_names or (parts.name,)
    metrics = Metrics(names[0], config, parts.dtype)
    publisher = _publisher(options, names[0]) if options.kv_events else None
    if publisher is not None:
        metrics.attach_publisher(publisher)
    loop = EngineLoop(Engine(config, parts.runner, metrics, publisher))
    app = make_app(
        loop=loop,
        tokenizer=parts.tokenizer,
        metrics=metrics,
        model_names=names,
        api_key=options.api_key,
        kv_event_sources=_event_sources(publisher),
        body_limits=BodyLimits(max_bytes=options.max_body_bytes),
    )

    async def close(_: web.Application) -> None:
        await loop.close()
        if publisher is not None:
            publisher.close()

    def announce(port: int) -> None:
        log.info(
            "Ready in %.1f s: %s at http://%s:%d, %d blocks of %d tokens, at most %d tokens long",
            time.monotonic() - started,
            names[0],
            url_host(options.host),
            port,
            config.num_blocks,
            config.block_size,
            config.max_model_len,
        )

    app.on_cleanup.append(close)
    gc.collect()
    gc.freeze()  # what is here now stays: no later collection need look at it
    loop.start()
    try:
        await serve(
            app,
            options.host,
            options.port,
            drain_seconds=options.drain_seconds,
            warm_up=loop.warm_up,
            on_ready=announce,
        )
    except EngineDeadError as problem:
        raise ValueError(f"cannot serve {parts.name}: {problem}") from problem
    for number in (signal.SIGTERM, signal.SIGINT):  # a late second one changes nothing any more
        signal.signal(number, signal.SIG_IGN)


def _simulated(options: WorkOptions) -> Parts:
    profile = PROFILES[str(options.simulate)]
    tokenizer: Tokenizer | ByteTokenizer = ByteTokenizer()
    alphabet: bytes | range = LETTERS
    if options.model is not None:
        from text.models import resolve
        from worker.loader import open_model

        tokenizer = open_model(resolve(options.model)).tokenizer()
        alphabet = range(tokenizer.vocab_size // 8, tokenizer.vocab_size // 2)
    config = _engine_config(
        options,
        num_blocks=options.num_blocks or profile.num_blocks * 16 // options.block_size,
        max_model_len=profile.max_model_len,
        max_num_batched_tokens=profile.max_num_batched_tokens,
    )
    runner = SimulatedRunner(profile, alphabet, options.seed)
    name = options.model or str(options.simulate)
    return Parts(name, config, runner, tokenizer, "simulated")


def _real(options: WorkOptions) -> Parts:
    import torch

    from worker.loading import fitting_blocks, load_model
    from worker.runner import ModelRunner

    device = _device(options.device)
    on_gpu = device == "cuda"
    dtype = options.dtype
    if dtype == "auto":
        dtype = "bfloat16" if on_gpu else "float32"
    model, tokenizer = load_model(str(options.model), getattr(torch, dtype), device)
    config = _engine_config(
        options,
        num_blocks=options.num_blocks
        or fitting_blocks(model, options.block_size, options.gpu_memory_utilization),
        max_model_len=model.config.max_position_embeddings,
        max_num_batched_tokens=8192 if on_gpu else 512,
    )
    try:
        runner = ModelRunner(model, config)
    except (RuntimeError, MemoryError) as problem:
        needed = config.num_blocks * options.block_size * model.config.kv_elements_per_token
        raise ValueError(
            f"there is no memory for {config.num_blocks} KV blocks, "
            f"{needed * model.dtype.itemsize / 2**30:.1f} GiB: lower --num-blocks"
        ) from problem
    return Parts(str(options.model), config, runner, tokenizer, dtype)


def _device(wanted: str) -> str:
    import torch

    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch finds no CUDA device on this machine")
    return wanted


def _engine_config(
    options: WorkOptions, *, num_blocks: int, max_model_len: int, max_num_batched_tokens: int
) -> EngineConfig:
    """The limits: flags where given, else what the model and the memory allow."""
    if options.max_model_len is not None and options.max_model_len > max_model_len:
        raise ValueError(
            f"--max-model-len {options.max_model_len}: the model was made for {max_model_len} "
            "tokens at most"
        )
    return EngineConfig(
        num_blocks=num_blocks,
        block_size=options.block_size,
        max_model_len=options.max_model_len or min(max_model_len, num_blocks * options.block_size),
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens
        or max(max_num_batched_tokens, options.max_num_seqs),
        max_num_queued_reqs=options.max_num_queued_reqs,
        enable_prefix_caching=options.enable_prefix_caching,
        preallocate=options.preallocate,
    )


def _publisher(options: WorkOptions, model_name: str) -> Publisher:
    """Publishes under the address at which routers find this worker."""
    address = url_host(options.advertise_host or own_address(options.host))
    topic = default_topic(f"{address}:{options.port}", model_name)
    return Publisher(options.host, options.kv_events_port, options.kv_replay_port, topic)


def checked_port(host: str, port: int, flag: str) -> int:
    """The port, or a free one for 0, if it can be bound: to know before a model is loaded.

    Raises:
        OSError: it cannot.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.create_server(address[:2], family=family) as probe:
            return int(probe.getsockname()[1])
    except OSError as problem:
        reason = f"cannot listen on {host}, port {port}: {problem.strerror} (see {flag})"
        raise OSError(problem.errno, reason) from problem


def own_address(host: str) -> str:
    """`host`, or for a wildcard the address from which this machine reaches others."""
    if host not in ("0.0.0.0", "::"):  # noqa: S104  # a comparison
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; the address is for documentation
            return str(probe.getsockname()[0])
        except OSError:
            log.warning("This machine has no route; KV events name it 127.0.0.1")
            return "127.0.0.1"


def url_host(host: str) -> str:
    """As a host is written before a port: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def _event_sources(publisher: Publisher | None) -> dict[str, object]:
    """By data-parallel rank, as vLLM; there is one."""
    if publisher is None:
        return {}
    return {"0": {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}}
