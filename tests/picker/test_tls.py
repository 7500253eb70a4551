"""TLS of the gRPC port, by real handshakes: what is shown, who is let in, what changes."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from picker import tls
from picker.certificate import self_signed
from picker.config import Config, Listen, Tls, parse
from picker.servers import Ports
from picker.service import check_start
from picker.tls import ServerTls
from tests.picker.authority import DAY, Authority, serial
from tests.picker.test_service import (
    DEADLINE,
    ext_proc,
    get,
    get_request,
    healthy,
    invoke,
    model_server,
    running,
)

READY = HealthCheckRequest(service="envoy.service.ext_proc.v3.ExternalProcessor")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerTls.watch, "__defaults__", (0.01,))


def config_of(pod: str, **settings: Any) -> Config:
    listen = Listen(grpc=0, health=0, http=0, admin=0, tls=Tls(**settings))
    return Config(listen=listen, pool=parse(f"pool: {{endpoints: [address: '{pod}']}}").pool)


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[Ports]:
    async with model_server() as pod, running(config_of(pod, **settings)) as (_, ports):
        yield ports


def files(pair: tuple[Path, Path], **more: Any) -> dict[str, Any]:
    return {"mode": "files", "certificate": str(pair[0]), "key": str(pair[1]), **more}


async def shown(port: int, host: str = "127.0.0.1") -> tuple[str, str | None]:
    """The certificate that a new connection sees, as PEM, and the protocol agreed upon."""

    def look() -> tuple[str, str | None]:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection((host, port), timeout=DEADLINE) as plain,
            context.wrap_socket(plain) as secure,
        ):
            der = secure.getpeercert(binary_form=True)
            return ssl.DER_cert_to_PEM_cert(der), secure.selected_alpn_protocol()

    return await asyncio.to_thread(look)


def trusting(port: int, ca: bytes, pair: tuple[bytes, bytes] | None = None) -> grpc.aio.Channel:
    """A client that believes what `ca` issued, and shows a certificate of its own."""
    chain, key = pair or (None, None)
    credentials = grpc.ssl_channel_credentials(ca, key, chain)
    return grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials)


async def answers(port: int, ca: bytes, pair: tuple[bytes, bytes] | None = None) -> bool:
    """Whether such a client is served."""
    async with trusting(port, ca, pair) as channel:
        try:
            answer = await HealthStub(channel).Check(READY, timeout=DEADLINE)
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            return False
        return bool(answer.status == HealthCheckResponse.SERVING)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE):
        while not await condition():  # noqa: ASYNC110  # of files
            await asyncio.sleep(0.01)


# What is shown


async def test_a_certificate_is_made_that_fits_and_that_nobody_has_signed() -> None:
    async with serving(mode="selfSigned") as ports:
        pem, protocol = await shown(ports.grpc)
        assert protocol == "h2"
        certificate = x509.load_pem_x509_certificate(pem.encode())
        assert isinstance(certificate.public_key(), ec.EllipticCurvePublicKey)
        assert await answers(ports.grpc, pem.encode())  # for it names 127.0.0.1
        assert not await answers(ports.grpc, self_signed(["127.0.0.1"]).chain)


async def test_each_start_makes_another_certificate() -> None:
    async with serving(mode="selfSigned") as one, serving(mode="selfSigned") as other:
        assert (await shown(one.grpc))[0] != (await shown(other.grpc))[0]


async def test_all_that_shares_the_port_is_served_and_health_has_a_plain_port(
    authority: Authority,
) -> None:
    async with serving(**files(authority.issue())) as ports:
        assert await answers(ports.grpc, authority.ca_pem)
        async with trusting(ports.grpc, authority.ca_pem) as channel:
            call = ext_proc(channel)
            await call.write(get_request())
            assert (await call.read()).HasField("request_headers")
            call.cancel()
            for service in (
                "envoy.service.endpoint.v3.EndpointDiscoveryService/StreamEndpoints",
                "envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs",
            ):
                other = channel.stream_stream(f"/{service}")()
                await other.write(b"")
                await other.done_writing()
                await other.read()
                assert await other.code() is grpc.StatusCode.OK
        assert await healthy(ports.health)


async def test_who_speaks_no_tls_is_not_served() -> None:
    async with serving(mode="selfSigned") as ports:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await healthy(ports.grpc)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        reader, writer = await asyncio.open_connection("127.0.0.1", ports.grpc)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(DEADLINE):
            while await reader.read(1000):
                pass
        writer.close()
        assert await answers(ports.grpc, (await shown(ports.grpc))[0].encode())


@pytest.mark.parametrize(
    "key",
    [
        ec.generate_private_key(ec.SECP384R1()),
        rsa.generate_private_key(65537, 2048),
    ],
    ids=["P-384", "RSA"],
)
async def test_kinds_of_keys_that_are_served(authority: Authority, key: Any) -> None:
    async with serving(**files(authority.issue(key=key))) as ports:
        assert await answers(ports.grpc, authority.ca_pem)


# What changes


async def test_a_new_pair_is_shown_to_new_connections_and_streams_go_on(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "picker.tls")
    pair = authority.issue()
    async with (
        serving(**files(pair)) as ports,
        trusting(ports.grpc, authority.ca_pem) as channel,
    ):
        before, _ = await shown(ports.grpc)
        call = ext_proc(channel)
        await call.write(get_request())
        await call.read()
        authority.issue()
        await until(lambda: changed(ports.grpc, before))
        now, _ = await shown(ports.grpc)
        assert serial(now) == serial(pair[0].read_bytes())
        assert f"New connections see certificate {serial(now)}" in caplog.text
        message = get_request()
        message.response_headers.end_of_stream = True
        message.response_headers.headers.headers.add(key=":status", raw_value=b"200")
        await call.write(message)
        assert (await call.read()).HasField("response_headers")
        assert (await shown(ports.grpc))[0] == now
        assert await metric(ports, 'warmpath_certificate_reads_total{result="taken"}') == 1


async def changed(port: int, before: str) -> bool:
    return (await shown(port))[0] != before


async def metric(ports: Ports, name: str) -> float:
    lines = (await get(ports.admin, "/metrics"))[1].splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(name))


async def test_a_secret_that_is_swapped_is_read(authority: Authority, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    for version in ("v1", "v2"):
        (volume / version).mkdir(parents=True)
        for name, content in zip(("tls.crt", "tls.key"), authority.pems(), strict=True):
            (volume / version / name).write_bytes(content)
    (volume / "..data").symlink_to("v1")
    pair = volume / "tls.crt", volume / "tls.key"
    for path in pair:
        path.symlink_to(f"..data/{path.name}")
    async with serving(**files(pair)) as ports:
        before, _ = await shown(ports.grpc)
        assert serial(before) == serial((volume / "v1/tls.crt").read_bytes())
        (volume / "..tmp").symlink_to("v2")
        (volume / "..tmp").replace(volume / "..data")
        await until(lambda: changed(ports.grpc, before))
        assert serial((await shown(ports.grpc))[0]) == serial((volume / "v2/tls.crt").read_bytes())


async def test_a_bad_pair_keeps_the_old_one_and_says_why(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    pair = authority.issue()
    async with serving(**files(pair)) as ports:
        before, _ = await shown(ports.grpc)
        other, key = authority.pems()
        old = authority.pems(end=-timedelta(seconds=1))
        for certificate, private, why in (
            (other, pair[1].read_bytes(), f"listen.tls.key: {pair[1]}: it is not the key"),
            (b"nothing", key, f"listen.tls.certificate: {pair[0]}: there is no PEM certificate"),
            (b"", key, f"{pair[0]}: it is empty"),
            (*old, f"{pair[0]}: it expired on "),
        ):
            caplog.clear()
            pair[0].write_bytes(certificate)
            pair[1].write_bytes(private)
            await until(
                lambda why=why: logged(caplog, "The old certificate stays in use: listen", why)
            )
            assert await answers(ports.grpc, authority.ca_pem)
            assert (await shown(ports.grpc))[0] == before
        pair[0].unlink()
        await until(lambda: logged(caplog, "it cannot be read: No such file or directory"))
        assert (await shown(ports.grpc))[0] == before
        assert await metric(ports, 'warmpath_certificate_reads_total{result="refused"}') == 5
        pair[0].write_bytes(other)
        pair[1].write_bytes(key)
        await until(lambda: changed(ports.grpc, before))
        assert serial((await shown(ports.grpc))[0]) == serial(other)


async def logged(caplog: pytest.LogCaptureFixture, *texts: str) -> bool:
    return all(text in caplog.text for text in texts)


def test_a_pair_that_is_being_written_is_left_alone(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    pair = authority.issue()
    served = ServerTls(Listen(tls=Tls(**files(pair))))
    certificate, key = authority.pems()
    half = tls.Files(certificate, pair[1].read_bytes(), b"")
    whole = tls.Files(certificate, key, b"")
    for found in (half, whole):
        served.look(found)
        assert served.certificate.chain == pair[0].read_bytes()
    served.look(whole)
    assert served.certificate.chain == certificate
    assert caplog.text == ""


# Who is let in


async def test_clients_show_a_certificate_where_a_ca_is_named(authority: Authority) -> None:
    other = Authority(authority.folder, "other")
    settings = files(authority.issue(), client_ca=str(authority.ca))
    async with serving(**settings) as ports:
        ca = authority.ca_pem
        mine, theirs = authority.pems(), other.pems()
        assert await answers(ports.grpc, ca, mine)
        assert not await answers(ports.grpc, ca)
        assert not await answers(ports.grpc, ca, theirs)
        assert not await answers(ports.grpc, ca, authority.pems(end=-timedelta(seconds=1)))
        authority.ca.write_bytes(other.ca_pem)
        await until(lambda: answers(ports.grpc, ca, theirs))
        assert not await answers(ports.grpc, ca, mine)
        assert await healthy(ports.health)  # which Kubernetes asks, without one


async def test_a_made_certificate_may_ask_for_theirs(authority: Authority) -> None:
    async with serving(mode="selfSigned", client_ca=str(authority.ca)) as ports:
        credentials = await asyncio.to_thread(fetched, ports.grpc)
        assert await answers(ports.grpc, credentials, authority.pems())
        assert not await answers(ports.grpc, credentials)


def fetched(port: int) -> bytes:
    return ssl.get_server_certificate(("127.0.0.1", port)).encode()


# What cannot be used


def _encrypted(authority: Authority) -> tuple[bytes, bytes]:
    return authority.pems(password=b"secret")


def _reversed(authority: Authority) -> tuple[bytes, bytes]:
    certificate, key = authority.pems()
    return authority.ca_pem + certificate, key


def _damaged(authority: Authority) -> tuple[bytes, bytes]:
    certificate, key = authority.pems()
    return certificate.replace(b"MII", b"MMM", 1), key


BAD_PAIRS: dict[str, tuple[Callable[[Authority], tuple[bytes, bytes]], str, str]] = {
    "encrypted": (_encrypted, "key", "it is encrypted: it has to be readable without a password"),
    "reversed": (_reversed, "certificate", "the server's own certificate must stand first"),
    "damaged": (_damaged, "certificate", "a certificate in it is damaged"),
    "no certificate": (lambda a: (a.pems()[1], a.pems()[1]), "certificate", "no PEM certificate"),
    "no key": (lambda a: (a.pems()[0], a.pems()[0]), "key", "there is no PEM private key in it"),
    "another's key": (lambda a: (a.pems()[0], a.pems()[1]), "key", "it is not the key of the"),
    "short": (
        lambda a: a.pems(key=rsa.generate_private_key(65537, 1024)),  # noqa: S505
        "key",
        "RSA of 1024 bits is too short: take 2048 or more",
    ),
    "Ed25519": (
        lambda a: a.pems(key=ed25519.Ed25519PrivateKey.generate()),
        "key",
        "Ed25519 is not a kind of key that Envoy takes",
    ),
    "P-521": (
        lambda a: a.pems(key=ec.generate_private_key(ec.SECP521R1())),
        "key",
        "secp521r1 is not a kind of key that Envoy takes",
    ),
    "empty": (lambda a: (b"", b""), "certificate", "it is empty"),
    "large": (lambda a: (b"x" * (1 << 20) + b"x", b""), "certificate", "more than 1048576 bytes"),
}


@pytest.mark.parametrize(("make", "key", "why"), BAD_PAIRS.values(), ids=BAD_PAIRS)
def test_a_file_that_cannot_be_used_is_named(
    authority: Authority,
    tmp_path: Path,
    make: Callable[[Authority], tuple[bytes, bytes]],
    key: str,
    why: str,
) -> None:
    paths = {"certificate": tmp_path / "tls.crt", "key": tmp_path / "tls.key"}
    for path, content in zip(paths.values(), make(authority), strict=True):
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"^listen\.tls") as caught:
        check_start(config_of("127.0.0.1:1", **files((paths["certificate"], paths["key"]))))
    assert str(caught.value).startswith(f"listen.tls.{key}: {paths[key]}: ")
    assert why in str(caught.value)


def test_files_that_are_not_there_are_named_at_a_check_and_at_a_start(
    authority: Authority, tmp_path: Path
) -> None:
    certificate, key = authority.issue()
    missing = tmp_path / "missing"
    path = tmp_path / "warmpath.yaml"
    for name, given in {
        "certificate": {"certificate": missing, "key": key},
        "key": {"certificate": certificate, "key": tmp_path},
        "clientCa": {"certificate": certificate, "key": key, "clientCa": missing},
    }.items():
        text = ", ".join(f"{each}: {file}" for each, file in given.items())
        path.write_text(f"listen: {{tls: {{mode: files, {text}}}}}\n")
        for flags, status in ((("--check",), 3), ((), 2)):
            code, output = invoke("-c", path, *flags)
            assert code == status
            (line,) = output.splitlines()
            assert line.startswith(f"Error: listen.tls.{name}: {given[name]}: it cannot be read: ")
    path.write_text(f"listen: {{tls: {{mode: files, certificate: {certificate}, key: {key}}}}}\n")
    assert invoke("-c", path, "--check")[0] == 0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{mode: files, key: k}", "listen.tls.certificate: name a PEM file"),
        ("{mode: files, certificate: c}", "listen.tls.key: name a PEM file"),
        ("{certificate: c, key: k}", "listen.tls.certificate: 'c' is not used"),
        ("{mode: selfSigned, key: k}", "listen.tls.key: 'k' is not used"),
        ("{clientCa: c}", "listen.tls.clientCa: 'c' is not used"),
    ],
)
def test_settings_that_do_not_go_together(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "warmpath.yaml"
    path.write_text(f"listen:\n  tls: {text}\n")
    code, output = invoke("-c", path, "--check")
    assert code == 3
    assert why in output
    assert len(output.splitlines()) == 1


# When it ends


def test_an_end_that_is_near_is_told_once_a_day(
    authority: Authority, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING)
    now = tls.time.time()
    monkeypatch.setattr(tls.time, "time", lambda: now)
    pair = authority.issue(end=32 * DAY)
    served = ServerTls(Listen(tls=Tls(**files(pair))))
    found = tls.Files(pair[0].read_bytes(), pair[1].read_bytes(), b"")
    told = []
    for _ in range(33 * 4):
        now += 6 * 3600
        served.look(found)
        told.append(len(caplog.records))
    assert told[3] == 0
    assert told[-1] == pytest.approx(31, abs=1)
    assert f"The certificate in {pair[0]} expires on " in caplog.messages[0]
    assert f"The certificate in {pair[0]} expired on " in caplog.messages[-1]


async def test_the_end_is_a_metric(authority: Authority) -> None:
    pair = authority.issue()
    end = x509.load_pem_x509_certificate(pair[0].read_bytes()).not_valid_after_utc.timestamp()
    async with serving(**files(pair)) as ports:
        name = "warmpath_certificate_expiration_timestamp_seconds"
        assert await metric(ports, name) == end
    async with model_server() as pod, running(config_of(pod)) as (_, ports):
        assert name not in (await get(ports.admin, "/metrics"))[1]
