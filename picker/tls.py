"""TLS of the gRPC port: which certificate it shows, and whom it lets in.

Files are read again whenever what they hold has changed, however that came about: written anew,
replaced, or swapped through a symbolic link as Kubernetes does with a Secret. New connections see
the new certificate, and those that stand go on with theirs. What cannot be used is logged, and the
old one stays in use.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import grpc

from picker.certificate import (
    BadCertificate,
    BadKey,
    Certificate,
    own_names,
    read_certificate,
    read_certificates,
    self_signed,
)
from picker.config import Listen, Tls
from picker.exposition import Spec, write

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0  # between two looks at the files
MAX_BYTES = 1 << 20  # of a file
WARN_SECONDS = 30 * 86_400.0  # before a certificate expires
DAY_SECONDS = 86_400.0  # between two warnings

EXPIRES = Spec(
    "gauge",
    "warmpath_certificate_expiration_timestamp_seconds",
    (),
    "When the certificate of the gRPC port expires, in Unix seconds.",
)
READS = Spec(
    "counter",
    "warmpath_certificate_reads_total",
    ("result",),
    "Changed certificates that were read: taken, or refused as they cannot be used.",
)


class Files(NamedTuple):
    """What the files of a certificate hold; b"" for one that is not given."""

    certificate: bytes
    key: bytes
    client_ca: bytes


class ServerTls:
    """What the gRPC port shows, and whom it believes."""

    def __init__(self, listen: Listen) -> None:
        """
        Raises:
            ValueError: a file cannot be used. The message names the key, the file and the reason.
        """
        self._tls = listen.tls
        self._made = (
            self_signed(own_names(listen.host)) if listen.tls.mode == "selfSigned" else None
        )
        self._taken: Files | str = _read(listen.tls)  # as last looked at; a str is why not
        self._seen = self._taken
        self.certificate, self._configuration = self._use(self._taken)
        self._changed = False
        self._warned = 0.0  # Unix seconds
        self._reads = {"taken": 0, "refused": 0}
        self._warn()

    @property
    def credentials(self) -> grpc.ServerCredentials:
        return grpc.dynamic_ssl_server_credentials(
            self._configuration,
            self._changed_configuration,
            require_client_authentication=bool(self._tls.client_ca),
        )

    async def watch(self, poll_seconds: float = POLL_SECONDS) -> None:
        """Take over the files whenever they have changed, until cancelled.

        A change is taken up once it has stood still from one look to the next: the two files of a
        pair may be written one after the other.
        """
        while True:
            await asyncio.sleep(poll_seconds)
            try:
                self.look(await asyncio.to_thread(_read, self._tls))
            except Exception:  # the next change may put it right
                log.exception("The old certificate stays in use")

    def look(self, found: Files | str) -> None:
        """Take over what the files hold, or why they cannot be read; see `watch`."""
        self._warn()
        last, self._seen = self._seen, found
        if found == self._taken or found != last:
            return
        self._taken = found
        try:
            certificate, configuration = self._use(found)
            if certificate.expires <= time.time():
                raise ValueError(
                    f"listen.tls.certificate: {self._tls.certificate}: "
                    f"it expired on {_date(certificate.expires)}"
                )
        except ValueError as problem:
            self._reads["refused"] += 1
            log.error("The old certificate stays in use: %s", problem)
            return
        self._reads["taken"] += 1
        self.certificate, self._configuration = certificate, configuration
        self._changed = True
        self._warned = 0.0
        log.info("New connections see certificate %s, %s", certificate.serial, _until(certificate))
        self._warn()

    def page(self) -> Iterator[str]:
        """Its metrics as Prometheus' text."""
        yield from write(EXPIRES, [((), self.certificate.expires)])
        yield from write(READS, [((result,), count) for result, count in self._reads.items()])

    def _changed_configuration(self) -> grpc.ServerCertificateConfiguration | None:
        """What gRPC asks, from threads of its own, before each handshake. None: as before."""
        if not self._changed:
            return None
        self._changed = False
        return self._configuration

    def _use(self, found: Files | str) -> tuple[Certificate, grpc.ServerCertificateConfiguration]:
        """Raises ValueError."""
        if isinstance(found, str):
            raise ValueError(found)
        certificate = self._made or _checked(self._tls, found)
        if found.client_ca:
            _check_client_ca(self._tls, found)
        configuration = grpc.ssl_server_certificate_configuration(
            [(certificate.key, certificate.chain)], root_certificates=found.client_ca or None
        )
        return certificate, configuration

    def _warn(self) -> None:
        """Of an end that is near, once a day."""
        now = time.time()
        certificate = self.certificate
        if certificate.expires - now < WARN_SECONDS and now - self._warned >= DAY_SECONDS:
            self._warned = now
            log.warning("The certificate in %s %s", self._tls.certificate, _until(certificate))


def check_settings(tls: Tls) -> None:
    """Raises ValueError when what is set does not go together. No file is looked at."""
    files = {"certificate": tls.certificate, "key": tls.key}
    for name, path in files.items():
        if tls.mode == "files" and not path:
            raise ValueError(f"listen.tls.{name}: name a PEM file: 'listen.tls.mode' is 'files'")
        if tls.mode != "files" and path:
            raise ValueError(f"listen.tls.{name}: {path!r} is not used: set listen.tls.mode: files")
    if tls.mode == "none" and tls.client_ca:
        raise ValueError(
            f"listen.tls.clientCa: {tls.client_ca!r} is not used: listen.tls.mode is off"
        )


def read_served(tls: Tls) -> Certificate:
    """The certificate in the files of `listen.tls`.

    Raises:
        ValueError: they cannot be used.
    """
    found = _read(tls)
    if isinstance(found, str):
        raise ValueError(found)
    return _checked(tls, found)


def _read(tls: Tls) -> Files | str:
    """What the files hold; or why one of them cannot be read."""
    contents = []
    for name, path in (
        ("certificate", tls.certificate),
        ("key", tls.key),
        ("clientCa", tls.client_ca),
    ):
        content = b""
        if path:
            try:
                with Path(path).open("rb") as file:
                    content = file.read(MAX_BYTES + 1)
            except OSError as problem:
                return f"listen.tls.{name}: {path}: it cannot be read: {problem.strerror}"
            if not content:
                return f"listen.tls.{name}: {path}: it is empty"
            if len(content) > MAX_BYTES:
                return f"listen.tls.{name}: {path}: it has more than {MAX_BYTES} bytes"
        contents.append(content)
    return Files(*contents)


def _checked(tls: Tls, files: Files) -> Certificate:
    try:
        return read_certificate(files.certificate, files.key)
    except BadCertificate as problem:
        raise ValueError(f"listen.tls.certificate: {tls.certificate}: {problem}") from None
    except BadKey as problem:
        raise ValueError(f"listen.tls.key: {tls.key}: {problem}") from None


def _check_client_ca(tls: Tls, files: Files) -> None:
    try:
        read_certificates(files.client_ca)
    except BadCertificate as problem:
        raise ValueError(f"listen.tls.clientCa: {tls.client_ca}: {problem}") from None


def _until(certificate: Certificate) -> str:
    end = "expired on" if certificate.expires <= time.time() else "expires on"
    text = f"{end} {_date(certificate.expires)}"
    if certificate.not_before > time.time():
        text += f" and is not valid before {_date(certificate.not_before)}"
    return text


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
