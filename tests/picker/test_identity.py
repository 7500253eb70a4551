"""Whose a request is, and who is not believed."""

from __future__ import annotations

from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.config import Identity as Settings
from picker.identity import MAX_TENANT, Caller, Identities, Owner, fit
from picker.names import FAIRNESS_ID
from picker.refusal import Refusal

KEY = "sk-alice-1"
DIGEST = sha256(KEY.encode()).hexdigest()


def keys(digest: str) -> Owner | None:
    return Owner("key/7", "alice") if digest == DIGEST else None


def refusal(identities: Identities, headers: dict[str, str], claim: str | None = None) -> Refusal:
    with pytest.raises(Refusal) as caught:
        identities.caller(headers, claim)
    return caught.value


def test_without_settings_all_are_one_tenant_whatever_they_send():
    identities = Identities(Settings(), keys)
    headers = {FAIRNESS_ID: "mallory", "authorization": f"Bearer {KEY}"}
    assert identities.caller(headers) == Caller("default", "tenant/default")
    assert identities.headers == ()


def test_a_header_is_believed_where_it_is_named():
    identities = Identities(Settings(header="X-Gateway-Inference-Fairness-ID", default="rest"))
    assert identities.caller({FAIRNESS_ID: " alice "}) == Caller("alice", "tenant/alice")
    assert identities.caller({}).tenant == "rest"
    assert identities.caller({FAIRNESS_ID: ""}).tenant == "rest"
    assert identities.headers == (FAIRNESS_ID,)


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {KEY}"},
        {"authorization": f"bearer  {KEY} "},
        {"x-api-key": KEY},
        {"api-key": KEY},
        {"authorization": "Basic abc", "x-api-key": KEY},
    ],
)
def test_an_api_key_tells_its_tenant(headers: dict[str, str]):
    identities = Identities(Settings(keys=True, header=FAIRNESS_ID), keys)
    told = headers | {FAIRNESS_ID: "mallory"}
    assert identities.caller(told) == Caller("alice", "key/7", DIGEST)


def test_a_wrong_key_is_refused_and_not_shown():
    identities = Identities(Settings(keys=True, header=FAIRNESS_ID), keys)
    for key in ("sk-mallory", KEY + " x", KEY * 1000, "\udcff"):
        refused = refusal(identities, {"authorization": f"Bearer {key}", FAIRNESS_ID: "alice"})
        assert (int(refused.status), refused.reason) == (401, "invalid_api_key")
        assert ("www-authenticate", 'Bearer error="invalid_token"') in refused.headers
        assert key[:9] not in refused.message
        assert b'"authentication_error"' in refused.body


def test_a_key_is_not_read_unless_asked_for():
    identities = Identities(Settings(header=FAIRNESS_ID), keys)
    assert identities.caller({"authorization": "Bearer whatever"}).tenant == "default"


def test_a_verified_claim_comes_first():
    identities = Identities(Settings(keys=True, header=FAIRNESS_ID, claim="sub"), keys)
    headers = {"authorization": "Bearer a.jwt.token", FAIRNESS_ID: "mallory"}
    assert identities.caller(headers, "bob") == Caller("bob", "tenant/bob")


def test_where_a_name_is_required_nobody_is_anonymous():
    identities = Identities(Settings(required=True, header=FAIRNESS_ID, keys=True), keys)
    refused = refusal(identities, {})
    assert (int(refused.status), refused.reason) == (401, "no_identity")
    assert refused.message == f"send the header {FAIRNESS_ID} or an API key"
    assert ("www-authenticate", "Bearer") in refused.headers
    assert identities.caller({FAIRNESS_ID: "alice"}).tenant == "alice"


def test_a_bearer_is_asked_for_where_one_would_help():
    for settings_, helps in (
        (Settings(required=True, claim="sub"), True),
        (Settings(required=True, header=FAIRNESS_ID), False),
    ):
        told = dict(refusal(Identities(settings_), {}).headers)
        assert ("www-authenticate" in told) == helps


@pytest.mark.parametrize("name", ["x" * (MAX_TENANT + 1), "a\nb", "a\x00", "\x1b[2J", " \t "])
def test_what_is_no_name_is_refused(name: str):
    identities = Identities(Settings(header=FAIRNESS_ID, claim="sub"))
    for refused in (refusal(identities, {FAIRNESS_ID: name}), refusal(identities, {}, name)):
        assert (int(refused.status), refused.reason) == (400, "invalid_tenant")
        assert name not in refused.message


@given(st.text())
@settings(deadline=None)
def test_every_tenant_has_a_fit_name(name: str):
    identities = Identities(Settings(header=FAIRNESS_ID))
    try:
        caller = identities.caller({FAIRNESS_ID: name})
    except Refusal:
        return
    assert fit(caller.tenant)
    assert caller.subject == f"tenant/{caller.tenant}"


def test_the_default_has_to_be_a_name():
    with pytest.raises(ValueError, match=r"identity\.default: '' is no name"):
        Identities(Settings(default=""))


def test_of_several_headers_the_first_that_is_there_tells():
    identities = Identities(Settings(header="X-New, x-old", required=True))
    assert identities.headers == ("x-new", "x-old")
    assert identities.caller({"x-old": "a"}).tenant == "a"
    assert identities.caller({"x-old": "a", "x-new": "b"}).tenant == "b"
    assert refusal(identities, {}).message == "send the header x-new or the header x-old"
