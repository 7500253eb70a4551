"""A picker process's life: start, take over what changes in its file, drain on a signal."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from picker.config import Config
from picker.service import Service

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5  # between two looks at the file
# After which a thread gives Python's lock to another that wants it. The event loop waits so long
# for threads that tokenise prompts, ten times less than usual.
SWITCH_SECONDS = 0.0005


async def run(config: Config, path: Path | None, read: Callable[[], Config]) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal ends at once.

    Args:
        config: to begin with.
        path: of the file it came from, which is watched.
        read: reads it again; raises ValueError when it cannot be used.

    Raises:
        OSError: a port cannot be had.
    """
    started = time.monotonic()
    sys.setswitchinterval(SWITCH_SECONDS)
    service = Service(config)
    watching: asyncio.Task[None] | None = None
    with stop_signals() as (stop, hurry):
        try:
            ports = await service.start()
            if path is not None:
                failed = service.reloads.failed
                watching = asyncio.create_task(watch(path, read, service.reload, failed=failed))
            await _either(service.until_ready(), stop.wait())
            gc.collect()
            gc.freeze()  # what is here now stays: no later collection need look at it
            if not stop.is_set():
                log.info(
                    "Ready in %.1f s for %d pods: ext_proc on %s:%d, lean HTTP on %d, health on "
                    "%d, http://%s:%d for /metrics and /debug",
                    time.monotonic() - started,
                    service.num_endpoints,
                    config.listen.host,
                    ports.grpc,
                    ports.http,
                    ports.health,
                    config.listen.host,
                    ports.admin,
                )
            await stop.wait()
            await _either(service.drain(), hurry.wait())
        finally:
            if watching is not None:
                watching.cancel()
            await service.stop()


async def watch(
    path: Path,
    read: Callable[[], Config],
    apply: Callable[[Config], None],
    poll_seconds: float = POLL_SECONDS,
    *,
    failed: Callable[[str], object] = lambda why: None,
) -> None:
    """Apply a file's configuration whenever it has changed, until cancelled.

    A change is taken up once it has stood still from one look to the next: an editor may write in
    steps. A file replaced by another, or through a symbolic link as Kubernetes does with a
    ConfigMap, is a change. One that cannot be used, for whatever reason, is logged and told to
    `failed`, and the old one stays in force.
    """
    taken = seen = None  # so the file is read once more: it may have changed since it was
    while True:
        await asyncio.sleep(poll_seconds)
        last, seen = seen, _signature(path)
        if seen == taken or seen != last:
            continue
        taken = seen
        if seen is not None and not seen.size:  # half of a save, or a mistake: not "no endpoints"
            log.error("The old configuration stays in force: %s is empty", path)
            failed(f"{path} is empty")
            continue
        try:
            apply(await asyncio.to_thread(read))
        except ValueError as problem:
            log.error("The old configuration stays in force: %s", problem)
            failed(str(problem))
        except Exception as problem:  # the next change may put it right
            log.exception("The old configuration stays in force")
            failed(f"{type(problem).__name__}: {problem}")


class _Signature(NamedTuple):
    device: int
    inode: int
    changed: int
    size: int


def _signature(path: Path) -> _Signature | None:
    """What changes when a file does; None without a file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return _Signature(status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)


async def _either(*waits: Coroutine[Any, Any, object]) -> None:
    """Wait for the first of some coroutines, and drop the others; its error is ours."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
    for task in done:
        task.result()


@contextmanager
def stop_signals() -> Iterator[tuple[asyncio.Event, asyncio.Event]]:
    """Events for the first and for the second SIGTERM or SIGINT."""
    first, second = asyncio.Event(), asyncio.Event()

    def receive() -> None:
        (second if first.is_set() else first).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, receive)
    try:
        yield first, second
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
