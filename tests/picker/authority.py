"""A certificate authority, and the files that it hands out."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import NameOID

NAMES = ("localhost", "127.0.0.1")
DAY = timedelta(days=1)


class Authority:
    """Issues certificates. Its own is at `ca`."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        builder = _builder(self._name, self._name, self._key.public_key(), (), -DAY, 365 * DAY)
        builder = builder.add_extension(x509.BasicConstraints(True, None), critical=True)
        self.ca_pem = builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)
        self.ca = folder / f"{name}.crt"
        self.ca.write_bytes(self.ca_pem)

    def pems(
        self,
        names: Sequence[str] = NAMES,
        *,
        key: Any = None,
        start: timedelta = -DAY,
        end: timedelta = 90 * DAY,
        password: bytes | None = None,
    ) -> tuple[bytes, bytes]:
        """A new certificate and its key."""
        key = key or ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_name("picker"), self._name, key.public_key(), names, start, end)
        encryption = BestAvailableEncryption(password) if password else NoEncryption()
        return (
            builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM),
            key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption),
        )

    def issue(self, name: str = "tls", **options: Any) -> tuple[Path, Path]:
        """The same as files `name`.crt and `name`.key."""
        paths = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        for path, content in zip(paths, self.pems(**options), strict=True):
            path.write_bytes(content)
        return paths


def serial(pem: bytes | str) -> str:
    data = pem.encode() if isinstance(pem, str) else pem
    return f"{x509.load_pem_x509_certificate(data).serial_number:x}"


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: Any,
    names: Sequence[str],
    start: timedelta,
    end: timedelta,
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + start)
        .not_valid_after(now + end)
    )
    if names:
        found = [_general_name(name) for name in names]
        builder = builder.add_extension(x509.SubjectAlternativeName(found), critical=False)
    return builder


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)
