"""An admin service of its own process, over a store.

    python -m tests.picker.quota.admin_process STORE TOKENS [CERTIFICATE KEY]

Prints its port once it listens, and ends with its stdin.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from picker.config import Quota, QuotaAdmin
from picker.quota.admin_server import QuotaAdminServer
from picker.quota.stores import open_store


@contextmanager
def admin_service(store: str, tokens: str, *tls: str) -> Iterator[str]:
    """HOST:PORT of a running one."""
    command = [sys.executable, "-m", __name__, store, tokens, *tls]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout and process.stdin
        yield f"localhost:{process.stdout.readline().strip()}"
        process.stdin.close()
        assert process.wait(30) == 0


async def main(url: str, tokens: str, certificate: str = "", key: str = "") -> None:
    store = open_store(url, timeout=30.0)
    admin = QuotaAdmin(tokens=tokens, certificate=certificate, key=key)
    server = QuotaAdminServer(store, Quota(admin=admin), "localhost", 0)
    print(await server.start(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop()
    await store.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
