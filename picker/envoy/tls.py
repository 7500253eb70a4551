"""How Envoy speaks TLS with the picker's gRPC port."""

from __future__ import annotations

from pathlib import Path

from cryptography import x509
from envoy_data_plane.envoy.config.core.v3 import DataSource, TransportSocket
from envoy_data_plane.envoy.extensions.transport_sockets.tls.v3 import (
    CertificateValidationContext,
    CommonTlsContext,
    SubjectAltNameMatcher,
    SubjectAltNameMatcherSanType,
    TlsCertificate,
    UpstreamTlsContext,
)
from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher
from envoy_data_plane.google.protobuf import Any

from picker.config import Config
from picker.tls import read_served


def to_picker(config: Config) -> TransportSocket | None:
    """The transport socket of the picker's cluster; None where the picker has no TLS.

    A certificate that the picker makes itself is believed as it is, which is what gateways do.
    One from files is verified: it must be issued by `envoy.pickerCa`, and be for a name of the one
    that is in the files now. Without a CA, whoever issued what is in the file is believed.

    Raises:
        ValueError: the certificate cannot be read, or names nobody; or Envoy's own is missing.
    """
    tls = config.listen.tls
    if tls.mode == "none":
        return None
    _check(config)
    context = CommonTlsContext(alpn_protocols=["h2"])
    if tls.mode == "files":
        ca = config.envoy.picker_ca or tls.certificate
        context.validation_context = CertificateValidationContext(
            trusted_ca=_file(ca), match_typed_subject_alt_names=_names(config)
        )
    if config.envoy.certificate:
        shown = TlsCertificate(
            certificate_chain=_file(config.envoy.certificate), private_key=_file(config.envoy.key)
        )
        context.tls_certificates = [shown]
    return TransportSocket(
        name="envoy.transport_sockets.tls",
        typed_config=Any.pack(UpstreamTlsContext(common_tls_context=context)),
    )


def _check(config: Config) -> None:
    envoy = config.envoy
    if config.listen.tls.client_ca and not envoy.certificate:
        raise ValueError(
            "envoy.certificate: name the PEM file that Envoy shows: 'clientCa' of listen.tls asks"
        )
    if bool(envoy.certificate) != bool(envoy.key):
        missing = "key" if envoy.certificate else "certificate"
        raise ValueError(f"envoy.{missing}: name its PEM file too: one alone is of no use")


def _names(config: Config) -> list[SubjectAltNameMatcher]:
    matchers = []
    for name in read_served(config.listen.tls).names:
        if isinstance(name, x509.DNSName):
            kind, text = SubjectAltNameMatcherSanType.DNS, name.value
        elif isinstance(name, x509.IPAddress):
            kind, text = SubjectAltNameMatcherSanType.IP_ADDRESS, str(name.value)
        elif isinstance(name, x509.UniformResourceIdentifier):  # as in SPIFFE
            kind, text = SubjectAltNameMatcherSanType.URI, name.value
        else:
            continue
        matchers.append(SubjectAltNameMatcher(san_type=kind, matcher=StringMatcher(exact=text)))
    if not matchers:
        raise ValueError(
            f"listen.tls.certificate: {config.listen.tls.certificate}: it has no subject "
            "alternative name, by which Envoy could know the picker"
        )
    return matchers


def _file(path: str) -> DataSource:
    return DataSource(filename=str(Path(path).absolute()))
