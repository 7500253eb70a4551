"""A JWT that real Envoy has verified names the tenant."""

from __future__ import annotations

import hashlib
import hmac
import json
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from picker.config import Duration, Identity, Quota
from tests.e2e.gateway import CHAT, JSON, Gateway, chat, manager, refused, running_gateway
from tests.e2e.test_quota import TENANT, Admin

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECRET = b"0123456789abcdef0123456789abcdef"


def part(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def token(secret: bytes = SECRET, **claims: Any) -> str:
    """As whoever has the secret makes it (RFC 7519, HS256)."""
    head = json.dumps({"alg": "HS256", "typ": "JWT", "kid": "k"}).encode()
    signed = f"{part(head)}.{part(json.dumps({'iss': 'us', **claims}).encode())}"
    return f"{signed}.{part(hmac.digest(secret, signed.encode(), hashlib.sha256))}"


def with_jwt(told: dict[str, Any]) -> None:
    """Put jwt_authn before the picker. A request may have no token, but no wrong one."""
    key = {"kty": "oct", "alg": "HS256", "kid": "k", "k": part(SECRET)}
    provider = {
        "issuer": "us",
        "local_jwks": {"inline_string": json.dumps({"keys": [key]})},
        "payload_in_metadata": "verified",
    }
    missing = {"requires_any": {"requirements": [{"provider_name": "p"}, {"allow_missing": {}}]}}
    kind = "type.googleapis.com/envoy.extensions.filters.http.jwt_authn.v3.JwtAuthentication"
    authn = {
        "name": "envoy.filters.http.jwt_authn",
        "typed_config": {
            "@type": kind,
            "providers": {"p": provider},
            "rules": [{"match": {"prefix": "/"}, "requires": missing}],
        },
    }
    manager(told)["http_filters"].insert(0, authn)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite://{Path(tmp_path_factory.mktemp('quota'), 'quota.db')}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def admin(url: str) -> AsyncIterator[Admin]:
    admin = Admin(url)
    for tenant in ("acme", "7", "default"):
        await admin.limit(tenant, "requests=1/day")
    yield admin
    await admin.store.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(url: str, admin: Admin) -> AsyncIterator[Gateway]:
    async with running_gateway(
        change=with_jwt,
        quota=Quota(enabled=True, store=url, timeout=Duration(10)),
        identity=Identity(claim="org.tenant", payload="verified", header=TENANT),
    ) as gateway:
        yield gateway


async def status(gateway: Gateway, **headers: str) -> int:
    async with gateway.http.post(CHAT, data=chat(), headers=JSON | headers) as response:
        if response.status == 429:
            assert await refused(response) == (429, "quota_exceeded")
        return response.status


@pytest.mark.parametrize("tenant", ["acme", 7])
async def test_the_claim_of_a_verified_token_names_the_tenant(
    gateway: Gateway, tenant: object
) -> None:
    bearer = f"Bearer {token(org={'tenant': tenant})}"
    assert await status(gateway, authorization=bearer) == 200
    assert await status(gateway, authorization=bearer) == 429
    assert await status(gateway, authorization=bearer, **{TENANT: "another"}) == 429


async def test_a_forged_token_does_not_come_as_far_as_the_picker(gateway: Gateway) -> None:
    picked = await gateway.metric("warmpath_picks_total")
    forged = token(b"another secret, of thirty-two b.", org={"tenant": "rich"})
    assert await status(gateway, authorization=f"Bearer {forged}") == 401
    assert await gateway.metric("warmpath_picks_total") == picked


async def test_a_token_without_the_claim_names_nobody(gateway: Gateway) -> None:
    bearer = f"Bearer {token(sub='acme', org={'tenant': ['acme']})}"
    assert await status(gateway, authorization=bearer) == 200  # of `default`
    assert await status(gateway) == 429


async def test_without_a_token_the_header_is_believed_where_it_is_set_to_be(
    gateway: Gateway,
) -> None:
    assert await status(gateway, **{TENANT: "somebody"}) == 200


async def test_a_claim_that_is_no_name_is_refused(gateway: Gateway) -> None:
    bearer = f"Bearer {token(org={'tenant': 'a' * 300})}"
    async with gateway.http.post(
        CHAT, data=chat(), headers=JSON | {"authorization": bearer}
    ) as response:
        assert await refused(response) == (400, "invalid_tenant")
