"""A certificate for TLS: read from PEM files and checked, or made on the spot.

What can be served is what gRPC and Envoy take, which BoringSSL decides: RSA keys of 2,048 bits or
more, and EC keys on P-256 or P-384.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

MIN_RSA_BITS = 2048
CURVES = ("secp256r1", "secp384r1")
MAX_CERTIFICATES = 1000  # in one file
LIFETIME = timedelta(days=3650)  # of one made here: it dies with its process


@dataclass(frozen=True, slots=True)
class Certificate:
    """A chain and its key, fit to be served."""

    chain: bytes  # PEM, the server's own certificate first
    key: bytes  # PEM, unencrypted
    serial: str  # of the server's own, in hexadecimal
    names: tuple[x509.GeneralName, ...]  # whom it is for: subject alternative names
    not_before: float  # Unix seconds, of the server's own
    expires: float  # Unix seconds: when the first of the chain does


def read_certificate(chain: bytes, key: bytes) -> Certificate:
    """A certificate from the contents of two PEM files.

    Raises:
        BadCertificate: they are none, or not fit for a server.
    """
    certificates = read_certificates(chain)
    private = _private_key(key)
    own = certificates[0]
    if _public_bytes(own.public_key()) != _public_bytes(private.public_key()):
        for other in certificates[1:]:
            if _public_bytes(other.public_key()) == _public_bytes(private.public_key()):
                raise BadCertificate("the server's own certificate must stand first in the file")
        raise BadKey("it is not the key of the certificate")
    return _certificate(certificates, chain, key)


def read_certificates(pem: bytes) -> list[x509.Certificate]:
    """The certificates of a PEM file, at least one.

    Raises:
        BadCertificate: there is none, or one that cannot be read.
    """
    if b"-----BEGIN CERTIFICATE-----" not in pem:
        raise BadCertificate("there is no PEM certificate in it")
    if pem.count(b"-----BEGIN CERTIFICATE-----") > MAX_CERTIFICATES:
        raise BadCertificate(f"it has more than {MAX_CERTIFICATES} certificates")
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise BadCertificate("a certificate in it is damaged") from None


def self_signed(names: Sequence[str]) -> Certificate:
    """A new certificate for a server of these names or IP addresses, which nobody has signed."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "warmpath")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # for clients whose clocks are behind
        .not_valid_after(now + LIFETIME)
        .add_extension(x509.SubjectAlternativeName([_name(each) for each in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return _certificate(
        [certificate],
        certificate.public_bytes(Encoding.PEM),
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    )


def own_names(host: str) -> list[str]:
    """What a server that listens on `host` may be called by those who come to it."""
    names = ["localhost", "127.0.0.1", "::1", socket.gethostname(), host.strip("[]")]
    return [name for name in dict.fromkeys(names) if name not in ("", "0.0.0.0", "::")]  # noqa: S104


class BadCertificate(ValueError):
    """A file of certificates cannot be used. The message says why, not which."""


class BadKey(ValueError):
    """A file of a key cannot be used. The message says why, not which."""


def _certificate(certificates: Sequence[x509.Certificate], chain: bytes, key: bytes) -> Certificate:
    own = certificates[0]
    return Certificate(
        chain,
        key,
        serial=f"{own.serial_number:x}",
        names=_names(own),
        not_before=own.not_valid_before_utc.timestamp(),
        expires=min(each.not_valid_after_utc.timestamp() for each in certificates),
    )


def _names(certificate: x509.Certificate) -> tuple[x509.GeneralName, ...]:
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return ()
    except ValueError:
        raise BadCertificate("a certificate in it is damaged") from None
    return tuple(found.value)


def _private_key(pem: bytes) -> rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey:
    try:
        key = load_pem_private_key(pem, password=None)
    except TypeError:
        raise BadKey("it is encrypted: it has to be readable without a password") from None
    except (ValueError, UnsupportedAlgorithm):
        raise BadKey("there is no PEM private key in it") from None
    if isinstance(key, rsa.RSAPrivateKey):
        if key.key_size < MIN_RSA_BITS:
            raise BadKey(f"RSA of {key.key_size} bits is too short: take {MIN_RSA_BITS} or more")
        return key
    if isinstance(key, ec.EllipticCurvePrivateKey) and key.curve.name in CURVES:
        return key
    kind = key.curve.name if isinstance(key, ec.EllipticCurvePrivateKey) else _kind(key)
    raise BadKey(f"{kind} is not a kind of key that Envoy takes: make it RSA, P-256 or P-384")


def _kind(key: object) -> str:
    return type(key).__name__.removeprefix("_").removesuffix("PrivateKey")


def _public_bytes(key: Any) -> bytes:
    encoded: bytes = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return encoded


def _name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)
