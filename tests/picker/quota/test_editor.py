"""What administrators write and see, over every store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from picker.quota.documents import export, load
from picker.quota.editor import Editor, Why
from picker.quota.keys import digest
from picker.quota.model import Grant, QuotaError, Subject, parse_limit
from picker.quota.store import Conflict
from picker.quota.views import own_views, uses, verdict, views
from tests.picker.quota.conftest import STORES, opened
from tests.picker.quota.kit import START, Clock, Desk, limits, spent, tokens

ALICE = "tenant/alice"
WHY = Why(reason="asked for", request_id="req-7")
DRY = Why(dry_run=True)
DAY = "total-tokens/day"


class Office:
    """A store, an administrator, and a picker's desk."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.store = desk.store
        self.editor = Editor(desk.store, "root@laptop")


@pytest.fixture(params=STORES)
async def office(request: pytest.FixtureRequest) -> AsyncIterator[Office]:
    clock = Clock()
    async with opened(request.param, clock) as store:
        yield Office(Desk(store, clock))


async def test_limits_are_added_replaced_and_taken_away(office: Office) -> None:
    edit = office.editor
    first = await edit.set(ALICE, limits("total-tokens=1k/day", "requests=5/minute"), why=WHY)
    assert (first.before, first.revision) == (None, 1)
    second = await edit.set(ALICE, limits("total-tokens=2k/day"), parent="org/acme", why=WHY)
    assert second.after == Subject("org/acme", limits("total-tokens=2k/day", "requests=5/minute"))
    pair = parse_limit("total-tokens=9/day", "big")
    await edit.set(ALICE, [pair], why=WHY)
    third = await edit.unset(ALICE, [DAY], why=WHY)
    assert third.after == Subject("org/acme", (*limits("requests=5/minute"), pair))
    with pytest.raises(QuotaError, match="no limit 'total-tokens/day'"):
        await edit.unset(ALICE, [DAY], why=WHY)
    assert (await edit.unset(ALICE, [DAY], model="big", why=WHY)).changed
    gone = await edit.unset(ALICE, why=WHY)
    assert gone.after is None and ALICE not in (await edit.read()).records


async def test_every_change_is_in_the_audit_log_with_its_reason(office: Office) -> None:
    edit = office.editor
    await edit.set(ALICE, limits("requests=5/minute"), why=WHY)
    await edit.block(ALICE, "unpaid", why=WHY)
    await edit.unblock(ALICE, why=Why())
    await edit.block("tenant/bob", "x", why=DRY)
    entries = await office.store.audit()
    assert [entry.action for entry in entries] == ["unblock", "block", "set"]
    block = entries[1]
    assert (block.actor, block.subject, block.at) == ("root@laptop", ALICE, START)
    assert (block.reason, block.request_id, block.revision) == ("asked for", "req-7", 2)
    assert "blocked" not in json.loads(block.before)
    assert json.loads(block.after)["blocked"] == "unpaid"


async def test_nothing_is_written_over_what_its_writer_did_not_see(office: Office) -> None:
    edit = office.editor
    seen = (await edit.set(ALICE, limits("requests=5/minute"), why=WHY)).revision
    await edit.block("tenant/bob", "x", why=WHY)  # another subject's change is no conflict
    await edit.block(ALICE, "x", why=Why(if_revision=seen))
    with pytest.raises(Conflict, match="revision 3, not 1"):
        await edit.unblock(ALICE, why=Why(if_revision=seen))
    with pytest.raises(Conflict):
        await edit.set(ALICE, limits("requests=6/minute"), why=Why(if_revision=0))
    await edit.set("tenant/new", limits("requests=6/minute"), why=Why(if_revision=0))


async def test_changes_made_at_once_are_all_there(office: Office) -> None:
    editors = [Editor(office.store, f"admin-{number}") for number in range(5)]
    texts = [f"{what}=5/day" for what in ("requests", "input-tokens", "output-tokens")]
    await asyncio.gather(
        *(
            editor.set(ALICE, limits(text), why=WHY)
            for editor, text in zip(editors, texts, strict=False)
        ),
        editors[3].block(ALICE, "x", why=WHY),
        editors[4].expire(ALICE, START + 60, why=WHY),
    )
    subject = (await office.editor.read()).records[ALICE].subject
    assert {str(limit) for limit in subject.limits} == set(texts)
    assert (subject.blocked, subject.expires) == ("x", START + 60)


async def test_what_changes_nothing_and_dry_runs_write_nothing(office: Office) -> None:
    edit = office.editor
    await edit.set(ALICE, limits("requests=5/minute"), why=WHY)
    again = await edit.set(ALICE, limits("requests=5/minute"), why=WHY)
    assert not again.changed and again.revision == 0
    dry = await edit.set(ALICE, limits("requests=6/minute"), why=DRY)
    assert dry.changed and dry.revision == 0
    assert (await edit.read()).records[ALICE].subject.limits == limits("requests=5/minute")
    assert len(await office.store.audit()) == 1


@pytest.mark.parametrize(
    ("name", "texts", "parent", "message"),
    [
        ("alice", [], None, "write org/, team/, tenant/, key/ or model/NAME"),
        (ALICE, ["tokens=5/day"], None, "did you mean"),
        (ALICE, ["requests=5/week"], None, "no window"),
        (ALICE, ["requests=5"], None, "no window"),
        (ALICE, ["concurrency=5/day"], None, "concurrency has no window"),
        (ALICE, ["requests=5x/day"], None, "no quantity"),
        (ALICE, ["requests=1.5/day"], None, "no whole number"),
        (ALICE, ["requests=5000T/day"], None, "out of range"),
        (ALICE, [], "key/one", "cannot be above"),
        (ALICE, [], "tenant/bob", "only org, team can"),
        (ALICE, [], "model/m", "cannot be above"),
        (ALICE, [], "team/*", "nobody's parent"),
        ("model/m", [], "org/acme", "no place in the hierarchy"),
        ("model/*", ["requests=0/day"], None, "names no model"),
    ],
)
async def test_what_cannot_be_is_refused_and_says_why(
    name: str, texts: list[str], parent: str | None, message: str
) -> None:
    async with opened("memory", Clock()) as store:
        editor = Editor(store, "root")
        with pytest.raises(QuotaError, match=message):
            await editor.set(name, limits(*texts), parent=parent, why=WHY)
        assert await store.audit() == []


async def test_a_star_is_no_model(office: Office) -> None:
    with pytest.raises(QuotaError, match="leave it out for all"):
        await office.editor.set(ALICE, limits("requests=0/day", model="*"), why=WHY)
    with pytest.raises(QuotaError, match="names no model"):
        await office.editor.block("model/*", "closed", why=WHY)


async def test_an_unknown_time_zone_is_refused(office: Office) -> None:
    limit = replace(parse_limit("requests=5/day"), zone="Mars/Olympus")
    with pytest.raises(QuotaError, match="no time zone"):
        await office.editor.set(ALICE, [limit], why=WHY)


async def test_grants_count_once_however_often_they_are_sent(office: Office) -> None:
    edit = office.editor
    await edit.set(ALICE, limits("total-tokens=100/day"), why=WHY)
    grant = Grant("ticket-1", DAY, 50, START + 60, reason="deadline")
    assert (await edit.grant(ALICE, grant, why=WHY)).changed
    assert not (await edit.grant(ALICE, grant, why=WHY)).changed
    await office.desk.read()
    await office.desk.granted(ALICE, tokens(100))
    (view,) = await own_views(office.store, await edit.read(), [ALICE])
    assert (view.used, view.remaining, view.granted) == (100, 0, 50)
    await office.desk.granted(ALICE, tokens(30))
    (view,) = await own_views(office.store, await edit.read(), [ALICE])
    assert (view.used, view.granted) == (100, 20)
    await edit.revoke_grant(ALICE, "ticket-1", why=WHY)
    await office.desk.read()
    await office.desk.denied(ALICE, tokens(1))
    with pytest.raises(QuotaError, match="no grant"):
        await edit.revoke_grant(ALICE, "ticket-1", why=WHY)
    with pytest.raises(QuotaError, match="future"):
        await edit.grant(ALICE, replace(grant, expires=START), why=WHY)
    with pytest.raises(QuotaError, match="no limit 'requests/day'"):
        await edit.grant(ALICE, replace(grant, limit="requests/day"), why=WHY)


async def test_keys_are_shown_once_and_kept_as_hashes(office: Office) -> None:
    edit = office.editor
    written, secret = await edit.create_key(ALICE, "laptop", why=WHY)
    assert written.name == "key/laptop"
    policy = await edit.read()
    assert policy.key_subject(digest(secret)) == "key/laptop"
    assert secret not in str(await office.store.dump()) and secret.endswith(
        policy.records["key/laptop"].subject.key.hint  # type: ignore[union-attr]
    )
    with pytest.raises(QuotaError, match="there already"):
        await edit.create_key(ALICE, "laptop", why=WHY)
    _, second = await edit.rotate_key("key/laptop", why=WHY)
    policy = await edit.read()
    assert policy.key_subject(digest(secret)) is None
    assert policy.key_subject(digest(second)) == "key/laptop"
    await edit.revoke_key("key/laptop", why=WHY)
    plan = (await edit.read()).plan("key/laptop", "", START)
    assert plan.barred is not None and plan.barred.reason == "revoked"
    with pytest.raises(QuotaError, match="no API key"):
        await edit.rotate_key(ALICE, why=WHY)
    assert [name for name, _ in policy.ancestry("key/laptop")] == ["key/laptop", ALICE]


async def test_counters_are_adjusted_and_reset(office: Office) -> None:
    edit = office.editor
    await edit.set(
        ALICE, limits("total-tokens=100/day", "requests=9/hour", "concurrency=3"), why=WHY
    )
    await office.desk.read()
    await office.desk.store.settle(await office.desk.granted(ALICE, tokens(30)), spent(30))
    await office.desk.granted(ALICE, tokens(20))
    (dry,) = await edit.adjust(ALICE, DAY, 40, why=DRY)
    assert dry.before == dry.after
    (corrected,) = await edit.adjust(ALICE, DAY, 40, why=WHY)
    assert (corrected.before.value, corrected.after.value) == (50, 90)
    assert len(await edit.reset(ALICE, why=WHY)) == 2  # concurrency is what is open
    assert await office.desk.used(ALICE) == [20, 0, 1]
    with pytest.raises(QuotaError, match="no limit 'requests/day'"):
        await edit.reset(ALICE, "requests/day", why=WHY)
    assert [entry.action for entry in await office.store.audit()][:2] == ["reset", "reset"]
    assert await office.store.verify() == []


async def test_a_stuck_reservation_is_released(office: Office) -> None:
    await office.editor.set(ALICE, limits("concurrency=1"), why=WHY)
    await office.desk.read()
    id = await office.desk.granted(ALICE, tokens(1))
    assert await office.editor.release(id, why=DRY)
    await office.desk.denied(ALICE, tokens(1))
    assert await office.editor.release(id, why=WHY)
    assert not await office.editor.release(id, why=WHY)
    await office.desk.granted(ALICE, tokens(1))
    assert (await office.store.audit())[0].action == "release"


async def test_how_limits_stand_is_seen_with_all_above(office: Office) -> None:
    edit = office.editor
    await edit.set("org/acme", limits("total-tokens=1k/day"), why=WHY)
    await edit.set("tenant/*", limits("requests=10/second"), parent="org/acme", why=WHY)
    await edit.set("model/m", limits("input-tokens=60/minute"), why=WHY)
    await office.desk.read()
    await office.desk.granted(ALICE, tokens(30), model="m")
    office.desk.clock.now += 0.05
    policy = await edit.read()
    tenant, org, model = await views(office.store, policy, ALICE, "m")
    assert (tenant.subject, tenant.default, tenant.used) == (ALICE, True, pytest.approx(0.5))
    assert (org.subject, org.used, org.reserved, org.remaining) == ("org/acme", 30, 30, 970)
    assert org.resets == pytest.approx(12 * 3600 - 0.05)
    assert (model.subject, model.remaining) == ("model/m", 30)
    assert model.resets == pytest.approx(30 - 0.05)
    assert [view.subject for view in await views(office.store, policy, ALICE)] == [
        ALICE,
        "org/acme",
    ]


async def test_a_question_is_answered_as_a_request_would_be_and_costs_nothing(
    office: Office,
) -> None:
    edit = office.editor
    await edit.set(ALICE, limits("total-tokens=60/minute", "requests=5/day"), why=WHY)
    await office.desk.read()
    await office.desk.granted(ALICE, tokens(50))
    policy = await edit.read()
    ask = {"prompt_tokens": 20, "output_tokens": 10}
    no = await verdict(office.store, policy, ALICE, "m", **ask)
    assert not no.passes and no.wait == pytest.approx(20)
    assert no.binding is not None and no.binding.limit.name == "total-tokens/minute"
    office.desk.clock.now += 20
    yes = await verdict(office.store, policy, ALICE, "m", **ask)
    assert yes.passes and yes.binding is None
    assert [view.used for view in yes.views] == pytest.approx([30, 1])
    assert await office.desk.used(ALICE) == pytest.approx([30, 1])
    await edit.block(ALICE, "unpaid", why=WHY)
    barred = await verdict(office.store, await edit.read(), ALICE, "m", **ask)
    assert not barred.passes and barred.barred is not None


async def test_the_books_are_summed_below_a_subject(office: Office) -> None:
    await office.editor.set(ALICE, limits("requests=9/day"), parent="org/acme", why=WHY)
    await office.desk.read()
    for subject in (ALICE, "tenant/bob"):
        id = await office.desk.granted(subject, tokens(5), model="m")
        await office.store.settle(id, spent(5))
    policy = await office.editor.read()
    assert [key[1] for key in await uses(office.store, policy, 0, "org/acme")] == [ALICE]
    assert len(await uses(office.store, policy, 0)) == 2


async def test_a_document_round_trips_and_is_applied_in_one_step(office: Office) -> None:
    edit = office.editor
    await edit.set("org/acme", limits("output-tokens=1.5M/month", "concurrency=64"), why=WHY)
    zoned = replace(parse_limit("requests=10/day", "m"), zone="Europe/Berlin", shadow=True)
    await edit.set(ALICE, [zoned], parent="org/acme", why=WHY)
    await edit.grant(ALICE, Grant("g", "requests/day", 5000, START + 9, "m"), why=WHY)
    await edit.create_key(ALICE, "one", why=WHY)
    document = export(await edit.read())
    assert list(document["subjects"]) == ["key/one", "org/acme", ALICE]
    assert document["subjects"]["org/acme"]["limits"][0]["amount"] == "1.5M"
    subjects = load(json.loads(json.dumps(document)))
    assert (await edit.apply(subjects, prune=True, why=WHY)).empty

    del subjects["key/one"]
    subjects["tenant/new"] = Subject("org/acme")
    subjects[ALICE] = replace(subjects[ALICE], blocked="x")
    before = len(await office.store.audit())
    dry = await edit.apply(subjects, prune=True, why=DRY)
    assert export(await edit.read()) == document
    diff = await edit.apply(subjects, prune=True, why=WHY)
    assert diff == dry
    assert [list(part) for part in (diff.added, diff.changed, diff.removed)] == [
        ["tenant/new"],
        [ALICE],
        ["key/one"],
    ]
    assert load(export(await edit.read())) == subjects
    audit = await office.store.audit()
    assert len(audit) == before + 3
    assert len({entry.revision for entry in audit[:3]}) == 1
    assert (await edit.apply({ALICE: subjects[ALICE]}, why=WHY)).empty  # others stay


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "schemaVersion"),
        ({"schemaVersion": 2}, "schemaVersion"),
        ({"schemaVersion": 1, "tenants": {}}, "unknown key 'tenants'"),
        ({"schemaVersion": 1, "subjects": {"tenant/a": {"limit": []}}}, "unknown key 'limit'"),
        ({"schemaVersion": 1, "subjects": {"tenant/a": []}}, "expected keys"),
        ({"schemaVersion": 1, "subjects": {"tenant/a": {"limits": {}}}}, "expected a list"),
        (
            {"schemaVersion": 1, "subjects": {"tenant/a": {"limits": [{"what": "requests"}]}}},
            "amount",
        ),
        (
            {
                "schemaVersion": 1,
                "subjects": {
                    "tenant/a": {"limits": [{"what": "x", "amount": "5k", "window": "day"}]}
                },
            },
            "cannot be limited",
        ),
        ({"schemaVersion": 1, "subjects": {"nobody": {}}}, "no subject"),
        ({"schemaVersion": 1, "subjects": {"tenant/a": {"key": {"digest": "x"}}}}, "tenant/a"),
    ],
)
def test_documents_that_are_none_are_refused(document: object, message: str) -> None:
    with pytest.raises(QuotaError, match=message):
        load(document)


@pytest.mark.parametrize("source", STORES)
@pytest.mark.parametrize("target", STORES)
async def test_a_store_moves_into_another_with_all_it_holds(source: str, target: str) -> None:
    clock = Clock()
    async with opened(source, clock) as old, opened(target, clock) as new:
        desk = Desk(old, clock)
        edit = Editor(old, "root")
        await edit.set("org/acme", limits("total-tokens=1k/month"), why=WHY)
        await edit.set(
            ALICE, limits("total-tokens=600/minute", "concurrency=3"), parent="org/acme", why=WHY
        )
        await desk.read()
        await old.settle(await desk.granted(ALICE, tokens(100), model="m"), spent(90, 20))
        for model in ("m", "n"):
            await desk.denied(ALICE, tokens(900), model=model)
        ids = [await desk.granted(ALICE, tokens(40), ttl=ttl) for ttl in (600.0, 5.0)]
        clock.now += 2

        await new.restore(await old.dump())
        moved = Desk(new, clock)
        await moved.read()
        assert await new.verify() == []
        assert export(moved.policy) == export(desk.policy)
        assert await moved.used(ALICE) == pytest.approx(await desk.used(ALICE))
        assert await new.uses(0) == await old.uses(0)
        assert await new.denials() == await old.denials()
        assert [denial.model for denial in await new.denials()] == ["n", "m"]
        assert [entry.action for entry in await new.audit()] == ["set", "set"]
        assert {each.id for each in await new.reservations()} == set(ids)
        clock.now += 3  # one expires, as it would have
        assert (await moved.used(ALICE))[1:] == [1, 150]
        assert await new.settle(ids[0], spent(10))
        assert (await moved.used(ALICE))[1:] == [0, 120]
        assert await new.verify() == []
        with pytest.raises(Conflict):
            await new.restore(await old.dump())
        assert (await new.status())["subjects"] == 2
