"""Real Envoy asks the picker over TLS, as `warmpath envoy` sets it up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from picker.config import Config, Envoy, Listen, Tls
from picker.envoy.bootstrap import bootstrap
from tests.e2e.gateway import ANY_PORTS, CHAT, JSON, Gateway, chat, running_gateway
from tests.e2e.picker_process import Profile
from tests.picker.authority import Authority

PROFILES: list[Profile] = ["standard", "lean"]


@pytest.fixture(params=PROFILES)
def profile(request: pytest.FixtureRequest) -> Iterator[Profile]:
    yield request.param


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def served_by(authority: Authority, **more: Any) -> Tls:
    certificate, key = map(str, authority.issue())
    return Tls(mode="files", certificate=certificate, key=key, **more)


def settings(tls: Tls, profile: str = "standard", **envoy: Any) -> dict[str, Any]:
    """For a gateway."""
    return {
        "listen": msgspec.structs.replace(ANY_PORTS, tls=tls),
        "envoy": Envoy(profile=profile, **envoy),  # type: ignore[arg-type]
        "discover": True,
    }


async def status(gateway: Gateway) -> int:
    async with gateway.http.post(CHAT, data=chat(), headers=JSON) as response:
        return response.status


async def test_a_made_certificate_is_believed(profile: Profile) -> None:
    async with running_gateway(**settings(Tls(mode="selfSigned"), profile)) as gateway:
        assert await status(gateway) == 200
        assert await gateway.envoy.stat("cluster.picker-grpc.ssl.handshake") > 0
        await gateway.idle()  # in the lean profile, the access log tells of ends


async def test_a_certificate_from_files_is_verified(profile: Profile, authority: Authority) -> None:
    told = settings(served_by(authority), profile, picker_ca=str(authority.ca))
    async with running_gateway(**told) as gateway:
        assert await status(gateway) == 200


async def test_a_file_that_holds_its_issuer_needs_no_ca(authority: Authority) -> None:
    tls = served_by(authority)
    async with running_gateway(**settings(tls)) as gateway:  # the certificate itself is believed
        assert await status(gateway) == 200
    append(Path(tls.certificate), authority.ca_pem)
    async with running_gateway(**settings(tls)) as gateway:
        assert await status(gateway) == 200


def append(path: Path, content: bytes) -> None:
    path.write_bytes(path.read_bytes() + content)


@pytest.mark.parametrize("why", ["issuer", "name"])
async def test_another_picker_is_not_asked(authority: Authority, why: str) -> None:
    """Envoy expects another one than answers."""
    other = Authority(authority.folder, "other") if why == "issuer" else authority
    names = ("127.0.0.1",) if why == "issuer" else ("elsewhere",)
    certificate, key = map(str, other.issue("expected", names=names))
    expected = Config(
        listen=Listen(tls=Tls(mode="files", certificate=certificate, key=key)),
        envoy=Envoy(picker_ca=str(other.ca)),
    )

    def expect(told: dict[str, Any]) -> None:
        picker_of(told)["transport_socket"] = picker_of(bootstrap(expected))["transport_socket"]

    told = settings(served_by(authority), picker_ca=str(authority.ca)) | {"discover": False}
    async with running_gateway(change=expect, **told) as gateway:
        assert await status(gateway) == 503
        failure = "fail_verify_error" if why == "issuer" else "fail_verify_san"
        assert await gateway.envoy.stat(f"cluster.picker-grpc.ssl.{failure}") > 0


def picker_of(told: dict[str, Any]) -> dict[str, Any]:
    """The picker's cluster."""
    clusters = told["static_resources"]["clusters"]
    found: dict[str, Any] = next(each for each in clusters if each["name"] == "picker-grpc")
    return found


async def test_envoy_shows_its_certificate(profile: Profile, authority: Authority) -> None:
    tls = served_by(authority, client_ca=str(authority.ca))
    certificate, key = map(str, authority.issue("envoy", names=["envoy"]))
    told = settings(tls, profile, picker_ca=str(authority.ca), certificate=certificate, key=key)
    async with running_gateway(**told) as gateway:
        assert await status(gateway) == 200
