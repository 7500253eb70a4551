"""Where our HTTP servers listen when they are to listen on all addresses."""

from __future__ import annotations

import socket

ALL = ("0.0.0.0", "::")  # noqa: S104


def of_all_addresses(host: str, port: int) -> socket.socket | None:
    """A socket bound to a port of all addresses, IPv4's and IPv6's, whichever `host` means them: as
    gRPC binds its ports. It does not listen yet. Port 0 means any free one.

    Returns:
        None: `host` is one address, or there is no IPv6 here.

    Raises:
        OSError: the port is in use.
    """
    if host.strip("[]") not in ALL or not socket.has_dualstack_ipv6():
        return None
    bound = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind(("::", port))
    except OSError:
        bound.close()
        raise
    return bound
