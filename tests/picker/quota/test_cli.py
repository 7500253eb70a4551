"""`warmpath quota` at real stores, and through a real admin service."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from picker.quota.keys import digest
from tests.picker.quota.admin_process import admin_service
from tests.picker.quota.conftest import redis_url
from tests.picker.quota.terminal import Terminal

ALICE = "tenant/alice"
TOKEN = "a-token-of-the-tests"


@pytest.fixture
def sqlite(tmp_path: Path) -> Terminal:
    url = f"sqlite://{tmp_path}/quota.db"
    return Terminal(url, ("--store", url, "--actor", "root@laptop"))


@pytest.fixture(params=["sqlite", "redis", "server"])
def quota(request: pytest.FixtureRequest, tmp_path: Path, sqlite: Terminal) -> Iterator[Terminal]:
    """A terminal at an empty store of each kind, or at a server that has one."""
    if request.param == "sqlite":
        yield sqlite
    elif request.param == "redis":
        url = redis_url()
        yield Terminal(url, ("--store", url, "--actor", "root@laptop"))
    else:
        tokens = tmp_path / "tokens"
        tokens.write_text(f"root@laptop {TOKEN}\n")
        with admin_service(sqlite.url, str(tokens)) as server:
            yield Terminal(sqlite.url, ("--server", server), {"WARMPATH_QUOTA_TOKEN": TOKEN})


def test_limits_are_set_shown_and_taken_away(quota: Terminal) -> None:
    told = quota("set", ALICE, "total-tokens=100k/month", "requests=10/second", "--parent", "org/a")
    assert told.stdout == ""  # people are told on stderr
    assert "+ total-tokens=100k/month" in told.stderr and "revision 1" in told.stderr
    quota.served(ALICE, 400, 100)
    day, second = quota.data("get", ALICE)
    assert (day["limit"], day["amount"], day["used"], day["remaining"], day["usedPercent"]) == (
        "total-tokens/month",
        100_000,
        500,
        99_500,
        0.5,
    )
    assert second["limit"] == "requests/second" and second["parent"] == "org/a"
    quota("set", ALICE, "--parent", "")
    assert quota.data("get", ALICE)[0]["parent"] == ""
    quota("unset", ALICE, "requests/second")
    assert [row["limit"] for row in quota.data("get")] == ["total-tokens/month"]
    quota("unset", ALICE, "--all")
    assert quota.data("get") == []
    assert "nothing is written" in quota("get", ALICE, code=3).stderr
    quota("unset", ALICE, "--all", code=3)
    quota("unset", ALICE, "requests/second", code=3)


def test_a_limit_holds_from_the_next_request_on(quota: Terminal) -> None:
    quota("set", ALICE, "total-tokens=1k/month")
    quota.served(ALICE, 900, 50)
    assert quota.refused(ALICE, 100).limit == "tenant/alice total-tokens/month"
    quota("set", ALICE, "total-tokens=2k/month")
    quota.served(ALICE, 100, 0)


def test_what_a_limit_says_beside_its_amount(quota: Terminal) -> None:
    words = ("--model", "llama", "--zone", "Europe/Berlin", "--on-failure", "closed", "--shadow")
    quota("set", ALICE, "output-tokens=1.5M/month", "concurrency=4", *words)
    month, running = quota.data("get")
    assert (month["model"], month["zone"], month["onFailure"], month["state"]) == (
        "llama",
        "Europe/Berlin",
        "closed",
        "shadow",
    )
    assert month["amount"] == 1_500_000 and running["zone"] == ""
    assert quota.data("get", "--model", "other") == []
    quota("unset", ALICE, "concurrency", code=3)  # that is the one for all models
    quota("unset", ALICE, "concurrency", "--model", "llama")


def test_a_new_amount_changes_nothing_else(quota: Terminal) -> None:
    month = "output-tokens/month"
    quota(
        *("set", ALICE, "output-tokens=1k/month", "requests=5/second", "--shadow"),
        *("--zone", "Europe/Berlin", "--on-failure", "closed"),
    )

    def limits() -> dict[str, tuple[object, ...]]:
        rows = quota.data("get", ALICE)
        told = ("amount", "zone", "onFailure", "state")
        return {row["limit"]: tuple(row[key] for key in told) for row in rows}

    quota("set", ALICE, "output-tokens=2k/month")
    assert limits()[month] == (2000, "Europe/Berlin", "closed", "shadow")
    quota("set", ALICE, "output-tokens=2k/month", "--no-shadow")
    assert limits()[month] == (2000, "Europe/Berlin", "closed", "ok")
    quota("set", ALICE, "output-tokens=2k/month", "--zone", "", "--on-failure", "default")
    assert limits()[month] == (2000, "", "", "ok")
    assert limits()["requests/second"] == (5, "", "closed", "shadow")
    told = quota("set", ALICE, "requests=6/second", "--zone", "Mars/X", code=2)
    assert "'Mars/X'" in told.stderr


def test_a_write_tells_programs_what_it_did(quota: Terminal) -> None:
    words = ("set", ALICE, "requests=5/month", "-o")
    assert "+ requests=5/month" in quota(*words, "wide").stderr
    assert quota(*words, "csv").stdout == f"name,revision\n{ALICE},0\n"
    assert quota(*words, "name").stdout == f"{ALICE}\n"


def test_a_parent_or_owner_that_is_not_there_is_told(quota: Terminal) -> None:
    quota("set", "org/acme", "requests=5/month")
    told = quota("set", ALICE, "requests=5/month", "--parent", "org/acne").stderr
    assert "nothing is written of org/acne" in told
    assert "nothing is" not in quota("set", ALICE, "--parent", "org/acme").stderr
    told = quota("keys", "create", "tenant/alcie", "--id", "a").stderr
    assert "nothing is written of tenant/alcie" in told
    assert "nothing is" not in quota("keys", "create", ALICE, "--id", "b").stderr


def test_get_finds_what_is_asked_for(quota: Terminal) -> None:
    quota("set", "org/acme", "total-tokens=1M/month")
    quota("set", ALICE, "total-tokens=1k/month", "requests=100/month", "--parent", "org/acme")
    quota("set", "tenant/bob", "--parent", "org/acme")
    quota.served(ALICE, 900, 0)
    rows = quota.data("get", "--sort", "used")
    assert (rows[0]["subject"], rows[0]["limit"]) == (ALICE, "total-tokens/month")
    assert {row["state"] for row in rows if row["subject"] == "tenant/bob"} == {"no limits"}
    assert [row["subject"] for row in quota.data("get", "--over", "80")] == [ALICE]
    assert [row["subject"] for row in quota.data("get", "--kind", "org")] == ["org/acme"]
    assert quota("get", "-o", "name").stdout == "org/acme\ntenant/alice\ntenant/bob\n"


def test_every_format_says_the_same(quota: Terminal) -> None:
    quota("set", ALICE, "total-tokens=100k/month")
    (row,) = quota.data("get")
    for fact in ("resetsInSeconds",):
        row.pop(fact)
    assert yaml.safe_load(quota("get", "-o", "yaml").stdout)[0].items() >= row.items()
    (read,) = csv.DictReader(io.StringIO(quota("get", "-o", "csv").stdout))
    assert (read["subject"], read["amount"], read["default"]) == (ALICE, "100000", "false")
    heading, line = quota("get").stdout.splitlines()
    assert heading.split()[:4] == ["SUBJECT", "LIMIT", "MODEL", "AMOUNT"]
    assert line.split()[:4] == [ALICE, "total-tokens/month", "-", "100k"]
    assert "REVISION" in quota("get", "-o", "wide").stdout.splitlines()[0]
    assert quota("get", "-o", "name").stdout == f"{ALICE}\n"


def test_describe_tells_all_that_holds_and_what_binds(quota: Terminal) -> None:
    quota("set", "org/acme", "total-tokens=2k/month")
    quota("set", "tenant/*", "requests=100/month", "--parent", "org/acme")
    quota("set", "model/llama", "total-tokens=1M/month")
    quota.served(ALICE, 1500, 0)
    quota.running(ALICE, 100)
    quota.refused(ALICE, 700)
    told = quota.data("describe", ALICE, "--model", "llama")
    assert told["ancestors"] == ["org/acme"] and told["reservations"] == 1
    assert [(each["subject"], each["limit"], each["binding"]) for each in told["limits"]] == [
        (ALICE, "requests/month", False),
        ("org/acme", "total-tokens/month", True),
        ("model/llama", "total-tokens/month", False),
    ]
    assert told["denials"][0]["limit"] == "org/acme total-tokens/month"
    text = quota("describe", ALICE).stdout
    assert "*  org/acme" in text and "Running:    1 requests" in text
    assert quota.data("describe", "org/acme")["children"] == ["tenant/*"]
    quota("block", "org/acme", "unpaid")
    assert quota.data("describe", ALICE)["state"] == "blocked at org/acme: unpaid"


def test_check_says_whether_a_request_would_pass(quota: Terminal) -> None:
    quota("set", ALICE, "total-tokens=1k/month")
    quota.served(ALICE, 90, 10)
    assert "it would pass" in quota("check", ALICE, "--input", "600", "--max-output", "300").stderr
    told = quota("check", ALICE, "--input", "600", "--max-output", "301", code=3)
    assert "tenant/alice total-tokens=1k/month refuses it" in told.stderr
    assert quota.data("check", ALICE)["passes"]
    assert quota.data("get", ALICE)[0]["used"] == 100  # nothing was charged
    quota("block", ALICE, "unpaid")
    assert quota.data("check", ALICE, code=3)["barred"] == {"subject": ALICE, "reason": "unpaid"}


def test_blocked_and_expired_subjects_are_refused(quota: Terminal) -> None:
    quota("block", ALICE, "unpaid since March")
    assert "unpaid since March" in quota.refused(ALICE, 1).refusal.message
    quota("unblock", ALICE)
    quota.served(ALICE, 1, 0)
    quota("expire", ALICE, "2020-01-01")
    quota.refused(ALICE, 1)
    quota("expire", ALICE, "--never")
    quota("expire", ALICE, "2h")
    quota.served(ALICE, 1, 0)
    quota("expire", ALICE, code=2)


def test_a_grant_is_drawn_on_once(quota: Terminal) -> None:
    quota("set", ALICE, "total-tokens=1k/month")
    words = ("grant", ALICE, "total-tokens/month", "500", "--expires", "2h", "--id", "launch")
    quota(*words, "--reason", "launch day")
    assert "nothing changes" in quota(*words).stderr
    quota.served(ALICE, 1000, 0)
    assert quota.data("get", ALICE)[0]["state"] == "on grants"
    quota.served(ALICE, 500, 0)
    quota.refused(ALICE, 1)
    (grant,) = quota.data("describe", ALICE)["grants"]
    assert (grant["id"], grant["amount"], grant["reason"]) == ("launch", 500, "launch day")
    quota("revoke", ALICE, "launch")
    assert "no grant 'launch'" in quota("revoke", ALICE, "launch", code=3).stderr
    assert (
        "no limit" in quota("grant", ALICE, "requests/month", "5", "--expires", "2h", code=2).stderr
    )
    quota("grant", ALICE, "total-tokens/month", "5", "--expires", "2020-01-01", code=2)


def test_counters_are_corrected_by_hand(quota: Terminal) -> None:
    quota("set", ALICE, "total-tokens=1k/month", "requests=9/month")
    quota.served(ALICE, 600, 0)
    (change,) = quota.data("adjust", ALICE, "total-tokens/month", "-200")
    assert (change["before"], change["after"]) == (600, 400)
    quota("adjust", ALICE, "total-tokens/month", "+0.1k", "--dry-run")
    assert quota.data("get")[0]["used"] == 400
    quota("adjust", ALICE, "total-tokens/month", "+0.1k")
    quota.running(ALICE, 50)
    assert [row["used"] for row in quota.data("get")] == [550, 2]
    quota("reset", ALICE, "--all")
    assert [row["used"] for row in quota.data("get")] == [50, 1]  # what runs still counts
    quota("reset", ALICE, code=2)
    quota("reset", ALICE, "requests/hour", code=3)
    quota("store", "verify")


def test_a_stuck_reservation_is_released(quota: Terminal) -> None:
    quota("set", ALICE, "total-tokens=1k/month")
    id = quota.running(ALICE, 900)
    (held,) = quota.data("reservations", ALICE)
    assert (held["id"], held["amount"]) == (id, 900)
    assert held["counter"].startswith("tenant/alice total-tokens/month")
    assert quota.data("reservations", "tenant/bob") == []
    quota("release", id)
    assert quota.data("get", ALICE)[0]["used"] == 0
    quota("release", id, code=3)


def test_the_books_tell_who_used_what(quota: Terminal) -> None:
    quota("set", ALICE, "total-tokens=1k/month", "--parent", "org/acme")
    quota("set", "tenant/bob", "--parent", "org/acme")
    quota.served(ALICE, 100, 20, "llama")
    quota.served(ALICE, 200, 30, "qwen")
    quota.served("tenant/bob", 900, 50, "qwen")
    quota.served("tenant/eve", 1, 1, "qwen")
    quota.refused(ALICE, 700)
    rows = quota.data("usage", "org/acme", "--by", "model", "--since", "1d")
    assert {row["model"]: row["totalTokens"] for row in rows} == {"": 0, "llama": 120, "qwen": 1180}
    (alice,) = quota.data("usage", ALICE, "--by", "subject", "--since", "1d")
    assert (alice["requests"], alice["promptTokens"], alice["completionTokens"]) == (2, 300, 50)
    assert alice["denied"] == 1
    quota("usage", "--by", "weekday", code=2)
    assert [row["subject"] for row in quota.data("top", "-n", "2", "--since", "1d")] == [
        "tenant/bob",
        ALICE,
    ]
    assert quota.data("top", "--by", "denials", "--since", "1d")[0]["subject"] == ALICE
    (most, *_) = quota.data("top", "--by", "used")
    assert (most["subject"], most["of"], most["usedPercent"]) == (ALICE, "total-tokens/month", 35.0)
    (denied,) = quota.data("denials")
    assert (denied["subject"], denied["amount"]) == (ALICE, 700)
    assert quota.data("denials", "tenant/bob") == []


def test_keys_open_the_door_until_they_are_revoked(quota: Terminal) -> None:
    secret = quota("keys", "create", ALICE, "--id", "ci", "--expires", "90d").stdout.strip()
    assert owner(quota, secret) == "key/ci"
    (key,) = quota.data("keys", "list", ALICE)
    assert (key["key"], key["parent"], key["state"]) == ("key/ci", ALICE, "ok")
    assert secret.endswith(key["hint"]) and secret not in quota("keys", "list", "-o", "wide").stdout
    quota("keys", "create", ALICE, "--id", "ci", code=2)
    renewed = quota.data("keys", "rotate", "key/ci")["secret"]
    assert (owner(quota, secret), owner(quota, renewed)) == (None, "key/ci")
    quota("keys", "revoke", "key/ci")
    assert quota.data("keys", "list")[0]["state"] == "revoked"
    assert "takes no requests" in quota.refused("key/ci", 1).refusal.message
    assert "revoked" in quota("keys", "rotate", "key/ci", code=2).stderr
    quota("keys", "rotate", "key/none", code=3)
    assert quota.data("keys", "list", "tenant/bob") == []


def test_a_key_that_nobody_could_use_is_not_made(quota: Terminal) -> None:
    quota("set", ALICE, "requests=5/month")
    told = quota("keys", "create", ALICE, "--expires", "2020-01-01", code=2)
    assert "in the future" in told.stderr
    for output in ("name", "csv"):  # which would not tell it, or not what it is
        quota("keys", "create", ALICE, "-o", output, code=2)
    assert quota.data("keys", "list") == []
    quota("keys", "create", ALICE, "--id", "ci")
    quota("keys", "rotate", "key/ci", "-o", "name", code=2)
    quota("expire", "key/ci", "2020-01-01")
    assert "expired" in quota("keys", "rotate", "key/ci", code=2).stderr


def owner(quota: Terminal, secret: str) -> str | None:
    return quota.picker(lambda quotas: quotas.find_key(digest(secret)))


def test_the_audit_log_tells_who_why_and_what_it_was_before(quota: Terminal) -> None:
    quota("set", ALICE, "requests=5/month", "--reason", "trial", "--request-id", "T-1")
    quota("block", ALICE, "unpaid")
    quota("set", "tenant/bob", "requests=5/month")
    blocked, created = quota.data("audit", ALICE)
    assert (created["actor"], created["action"], created["reason"], created["requestId"]) == (
        "root@laptop",
        "set",
        "trial",
        "T-1",
    )
    assert json.loads(blocked["before"])["limits"] and json.loads(blocked["after"])["blocked"]
    assert len(quota.data("audit", "-n", "1")) == 1


def test_a_write_over_somebody_elses_is_a_conflict(quota: Terminal) -> None:
    quota("set", ALICE, "requests=5/month")
    (row,) = quota.data("get")
    quota("set", ALICE, "requests=6/month")
    told = quota("set", ALICE, "requests=7/month", "--if-revision", str(row["revision"]), code=4)
    assert "changed by somebody else" in told.stderr
    assert quota.data("get")[0]["amount"] == 6
    quota("set", "tenant/new", "requests=7/month", "--if-revision", "0")


def test_a_dry_run_changes_nothing(quota: Terminal) -> None:
    quota("set", ALICE, "requests=5/month")
    for words in (
        ("set", ALICE, "requests=6/month"),
        ("unset", ALICE, "--all"),
        ("block", ALICE, "why"),
        ("expire", ALICE, "1d"),
        ("grant", ALICE, "requests/month", "5", "--expires", "1d"),
        ("keys", "create", ALICE),
        ("reset", ALICE, "--all"),
    ):
        assert "wp-" not in quota(*words, "--dry-run").stdout  # no key that opens nothing
    assert len(quota.data("audit")) == 1
    assert "dry run" in quota("set", ALICE, "requests=6/month", "--dry-run").stderr


def test_writers_tell_programs_what_they_wrote(quota: Terminal) -> None:
    written = quota.data("set", ALICE, "requests=5/month")
    assert (written["name"], written["before"]) == (ALICE, None)
    assert written["after"]["limits"][0]["amount"] == 5
    assert quota("block", ALICE, "why", "-o", "name").stdout == f"{ALICE}\n"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("set", "alice", "requests=5/month"), "no subject"),
        (("set", ALICE), "name a limit"),
        (("set", ALICE, "requests=5/fortnight"), "no window"),
        (("set", ALICE, "requests=1.5/month"), "no whole number"),
        (("set", ALICE, "requests=5/month", "--zone", "Mars/Olympus"), "no time zone"),
        (("set", ALICE, "requests=5/month", "--parent", "key/k"), "cannot be above"),
        (("set", ALICE, "requests=5/month", "--reason", "x" * 501), "too long"),
        (("block", ALICE, "x" * 501), "too long"),
        (("unset", ALICE), "name limits"),
        (("expire", ALICE, "soon"), "no time"),
        (("get", "-o", "xml"), "'xml' is not one of"),
    ],
)
def test_what_cannot_be_is_a_usage_error(
    sqlite: Terminal, words: tuple[str, ...], why: str
) -> None:
    assert why in " ".join(sqlite(*words, code=2).stderr.split())


def test_a_file_says_it_all_and_nothing_else(quota: Terminal, tmp_path: Path) -> None:
    quota("set", "org/acme", "total-tokens=1M/day", "--zone", "Europe/Berlin", "--shadow")
    quota("set", ALICE, "requests=1.5k/month", "--parent", "org/acme")
    quota("grant", ALICE, "requests/month", "5", "--expires", "2d", "--reason", "launch: day 1")
    quota("block", "tenant/bob", "# unpaid: yes")
    quota("expire", "tenant/bob", "30d")
    quota("keys", "create", ALICE)
    exported = quota("export").stdout
    file = tmp_path / "quotas.yaml"
    file.write_text(exported)
    quota("diff", "-f", str(file))
    assert "nothing changes" in quota("import", "-f", str(file), "--prune").stderr
    for name in quota("get", "-o", "name").stdout.split():
        quota("unset", name, "--all")
    quota("import", "-f", str(file))
    assert quota("export").stdout == exported
    as_json = quota("export", "-o", "json").stdout
    assert "nothing changes" in quota("import", "-f", "-", "--prune", input=as_json).stderr


def test_an_import_adds_changes_and_prunes_in_one_step(quota: Terminal, tmp_path: Path) -> None:
    quota("set", ALICE, "requests=5/month")
    quota("set", "tenant/bob", "requests=5/month")
    file = tmp_path / "quotas.yaml"
    exported = quota("export").stdout
    file.write_text(exported.replace("amount: 5", "amount: 6k").replace("tenant/bob", "org/acme"))
    kept = quota("diff", "-f", str(file), code=3)
    assert kept.stdout.splitlines() == [
        "+ org/acme",
        "    + requests=6k/month",
        "~ tenant/alice",
        "    - requests=5/month",
        "    + requests=6k/month",
    ]
    pruned = quota.data("diff", "-f", str(file), "--prune", code=3)
    assert [list(pruned[kind]) for kind in pruned] == [["org/acme"], [ALICE], ["tenant/bob"]]
    quota("import", "-f", str(file), "--prune", "--dry-run")
    assert quota("export").stdout == exported
    told = quota("import", "-f", str(file), "--prune", "--reason", "spring")
    assert "1 added, 1 changed, 1 removed: written" in told.stderr
    assert quota("get", "-o", "name").stdout == "org/acme\ntenant/alice\n"
    audit = quota.data("audit")[:3]
    assert {entry["reason"] for entry in audit} == {"spring"}
    assert len({entry["revision"] for entry in audit}) == 1


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no export"),
        ("subjects: [", "expected"),
        ("{", "Expecting"),
        ("schemaVersion: 2", "schemaVersion 1"),
        ("schemaVersion: 1\nsubjects: {alice: {}}", "no subject"),
        ("schemaVersion: 1\nsubjects: {tenant/a: {limit: 5}}", "unknown key 'limit'"),
        ("schemaVersion: 1\nsubjects: {tenant/a: {}, tenant/a: {}}", "line 2: tenant/a stands"),
        ("schemaVersion: 1\nsubjects: {tenant/a: {expires: soon}}", "no time"),
        ("schemaVersion: 1\nsubjects: {tenant/a: {expires: .nan}}", "no time"),
        ("schemaVersion: 1\nsubjects: {tenant/a: {limits: [{what: x, amount: 1}]}}", "'x' cannot"),
        ("schemaVersion: 1\nsubjects: &a [*a]", "expected names"),
        ("[" * 5000, "quotas.yaml"),
    ],
)
def test_a_file_that_cannot_be_used_says_why_and_changes_nothing(
    sqlite: Terminal, tmp_path: Path, text: str, why: str
) -> None:
    file = tmp_path / "quotas.yaml"
    file.write_text(text)
    assert why in sqlite("import", "-f", str(file), code=2).stderr
    sqlite("get", code=5)  # not even a store was made


def test_a_store_is_verified_and_told_about(quota: Terminal) -> None:
    quota("set", ALICE, "total-tokens=1k/month")
    quota.served(ALICE, 10, 0)
    quota.running(ALICE, 10)
    assert "all counters balance" in quota("store", "verify").stderr
    told = {row["name"]: row["value"] for row in quota.data("store", "status")}
    assert told["store"] in ("sqlite", "redis") and (told["subjects"], told["reservations"]) == (
        1,
        1,
    )
