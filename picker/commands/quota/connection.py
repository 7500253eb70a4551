"""Whom `warmpath quota` talks to, and what goes wrong on the way as exit codes."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from getpass import getuser
from pathlib import Path
from typing import TypeVar

import click

from picker.commands.errors import BadConfig, Conflicting, NotFound, Unreachable
from picker.config import Quota, load
from picker.quota.administration import Administration, Desk
from picker.quota.model import NotFound as NotThere
from picker.quota.store import Conflict, Store, StoreDown
from picker.quota.stores import open_store

T = TypeVar("T")

TOKEN = "WARMPATH_QUOTA_TOKEN"  # noqa: S105  # the name of the variable
TIMEOUT = 5.0  # seconds that a store may take: longer than for a request, people can wait
WATCH_SECONDS = 1.0  # between two looks


@dataclass(frozen=True, slots=True)
class Connection:
    """Where to find the quotas: the options of `warmpath quota`."""

    store: str | None  # URL
    server: str | None  # HOST:PORT
    token_file: Path | None
    ca: Path | None
    config: Path | None
    actor: str

    @asynccontextmanager
    async def open(self, create: bool = False) -> AsyncIterator[Administration]:
        """Whoever administers them; `create` makes a store that is not there.

        Raises:
            QuotaError: the options name no store.
            StoreDown: it does not answer.
        """
        desk = self.desk(create)
        try:
            yield desk
        finally:
            await desk.close()

    def desk(self, create: bool) -> Administration:
        """The one to ask, not asked yet.

        Raises:
            QuotaError: the options name none.
        """
        if self.server is None:
            quota = self.section
            return Desk(self.open_store(create), self.actor, quota.zone, quota.on_failure)
        from picker.quota.client import RemoteDesk

        authority = None if self.ca is None else self.ca.read_bytes()
        return RemoteDesk(self.server, self._token(), authority)

    def open_store(self, create: bool = False) -> Store:
        """The store itself, for what a server does not do.

        Raises:
            QuotaError: the options name none.
            StoreDown: it is not there.
        """
        if self.server is not None:
            raise click.UsageError("a server cannot do this: name its store with --store")
        url = self.store_url
        if url.startswith("memory:"):
            raise click.UsageError(
                "a store in memory is its picker's alone: ask that with --server HOST:PORT, or "
                "name another with --store"
            )
        return open_store(url, timeout=TIMEOUT, create=create)

    @property
    def store_url(self) -> str:
        return self.store or self.section.store

    def _token(self) -> str:
        file = self.token_file
        words = (os.environ.get(TOKEN, "") if file is None else file.read_text()).split()
        if not words:
            raise click.UsageError(
                f"--server asks for a token: set {TOKEN}, or name a --token-file that has one"
            )
        return words[0]

    @property
    def section(self) -> Quota:
        """What the configuration says of quotas."""
        return Quota() if self.config is None else load(self.config).quota


def connection() -> Connection:
    found = click.get_current_context().find_object(Connection)
    assert found is not None, "made by the group"
    return found


def who() -> str:
    """Whom the audit log names when nobody says: the login, and its machine."""
    return f"{getuser()}@{socket.gethostname()}"


def ask(work: Callable[[Administration], Awaitable[T]], create: bool = False) -> T:
    """What a coroutine finds out; what goes wrong is one line and an exit code.

    Args:
        create: make a store that is not there: this is the first that is written.
    """

    async def run() -> T:
        async with connection().open(create) as admin:
            return await work(admin)

    with exit_codes():
        return asyncio.run(run())


def show(render: Callable[[Administration], Awaitable[str]], watch: bool = False) -> None:
    """Print what a coroutine renders; to watch is to print it again when it has changed."""
    if not watch:
        click.echo(ask(render), nl=False)
        return
    with suppress(KeyboardInterrupt):
        ask(lambda admin: _watch(admin, render))


async def _watch(admin: Administration, render: Callable[[Administration], Awaitable[str]]) -> None:
    """Until Ctrl-C. A store that is away for a while is told of once, and asked again."""
    last: str | None = None
    while True:
        try:
            text = await render(admin)
        except StoreDown as problem:
            text = f"{problem}; trying again\n"
            if text != last:
                click.echo(text, nl=False, err=True)
        else:
            if text != last:
                click.clear()  # of a terminal only
                click.echo(text, nl=False)
                sys.stdout.flush()
        last = text
        await asyncio.sleep(WATCH_SECONDS)


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turns what can go wrong into one line and its exit code."""
    try:
        yield
    except NotThere as problem:
        raise NotFound(str(problem)) from problem
    except ValueError as problem:  # QuotaError, ConfigError
        raise BadConfig(str(problem)) from problem
    except Conflict as problem:
        raise Conflicting(str(problem)) from problem
    except StoreDown as problem:
        raise Unreachable(str(problem) or "the store does not answer") from problem
    except OSError as problem:
        raise click.ClickException(str(problem)) from problem
