"""A gRPC server and its port."""

from __future__ import annotations

from collections.abc import Sequence

import grpc


def new_server(options: Sequence[tuple[str, int]] = ()) -> grpc.aio.Server:
    """A server that shares its port with nobody: a port in use is an error."""
    return grpc.aio.server(options=[*options, ("grpc.so_reuseport", 0)])


async def start(
    server: grpc.aio.Server,
    host: str,
    port: int,
    credentials: grpc.ServerCredentials | None = None,
) -> int:
    """Listen on a port; 0 means any free one. Returns the port.

    Args:
        credentials: for TLS; None: without.

    Raises:
        OSError: the port is in use, or the host is none of this machine.
    """
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if credentials is None:
            found = server.add_insecure_port(address)
        else:
            found = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address} for gRPC: {error}") from error
    await server.start()
    return int(found)
