"""The port of the gRPC admin service."""

from __future__ import annotations

from pathlib import Path

import grpc

from picker import grpc_port
from picker.config import Quota
from picker.quota.administration import Desk
from picker.quota.service import OPTIONS, AdminService
from picker.quota.store import Store
from picker.quota.tokens import Tokens


class QuotaAdminServer:
    """Administers a store over gRPC, on a port of its own.

    Args:
        store: of the picker; it is closed by whom it belongs to.
        quota: the configuration's section, whose `admin` says who may ask.

    Raises:
        ValueError: the tokens, or the files of TLS, cannot be used.
    """

    def __init__(self, store: Store, quota: Quota, host: str, port: int) -> None:
        def desk(actor: str) -> Desk:
            return Desk(store, actor, quota.zone, quota.on_failure)

        self._host = host
        self._port = port
        self._credentials = _credentials(quota.admin.certificate, quota.admin.key)
        self._server = grpc_port.new_server(OPTIONS)
        AdminService(desk, Tokens(Path(quota.admin.tokens))).add_to(self._server)

    async def start(self) -> int:
        """Listen. Returns the port. Raises OSError."""
        return await grpc_port.start(self._server, self._host, self._port, self._credentials)

    async def stop(self) -> None:
        await self._server.stop(None)


def _credentials(certificate: str, key: str) -> grpc.ServerCredentials | None:
    """For TLS, of two PEM files; None without."""
    if not certificate and not key:
        return None
    try:
        chain, private = Path(certificate).read_bytes(), Path(key).read_bytes()
    except OSError as problem:
        raise ValueError(f"quota.admin: {problem.filename}: {problem.strerror}") from problem
    return grpc.ssl_server_credentials([(private, chain)])
