"""What every store does: one suite for the three."""

from __future__ import annotations

import pytest

from picker.quota.model import Grant, Limit, Subject
from picker.quota.plan import FREE, Granted, Line, Spent
from picker.quota.store import Change, Conflict, Correction, Entry, Stale
from tests.picker.quota.kit import START, TTL, Desk, limits, named, spent, tokens, whole

ALICE = "tenant/alice"


async def test_without_limits_everything_passes(desk: Desk) -> None:
    await desk.read()
    for _ in range(3):
        await desk.granted("tenant/nobody", tokens(10**9))
    assert await desk.store.verify() == []


async def test_a_bucket_gives_all_at_once_then_as_much_as_flows_back(desk: Desk) -> None:
    await desk.limit(ALICE, "input-tokens=600/minute")
    await desk.granted(ALICE, tokens(600))
    refused = await desk.denied(ALICE, tokens(100))
    assert refused.wait == pytest.approx(10)
    desk.clock.now += 9.9
    await desk.denied(ALICE, tokens(100))
    desk.clock.now += 0.1
    await desk.granted(ALICE, tokens(100))
    await desk.denied(ALICE, tokens(1))


async def test_the_wait_that_is_told_is_true(desk: Desk) -> None:
    await desk.limit(ALICE, "total-tokens=1k/hour", "requests=3/second")
    await desk.granted(ALICE, tokens(777), ttl=3600.0)
    refused = await desk.denied(ALICE, tokens(500))
    assert refused.wait is not None
    desk.clock.now += refused.wait - 0.01
    await desk.denied(ALICE, tokens(500))
    desk.clock.now += 0.01
    await desk.granted(ALICE, tokens(500))


async def test_what_was_not_used_is_there_for_others(desk: Desk) -> None:
    await desk.limit(ALICE, "total-tokens=1k/day")
    first = await desk.granted(ALICE, tokens(900))
    await desk.denied(ALICE, tokens(900))
    assert await desk.store.settle(first, spent(90, 10))
    assert await desk.used(ALICE) == [100]
    await desk.granted(ALICE, tokens(900))


async def test_a_reservation_is_settled_once(desk: Desk) -> None:
    await desk.limit(ALICE, "total-tokens=1k/day", "total-tokens=1k/hour", "requests=10/day")
    id = await desk.granted(ALICE, tokens(500))
    assert await desk.store.settle(id, spent(200, 100))
    for again in (spent(200, 100), FREE, spent(999)):
        assert not await desk.store.settle(id, again)
    assert whole(await desk.used(ALICE)) == [300, 300, 1]
    assert await desk.store.verify() == []


async def test_more_than_was_reserved_becomes_debt(desk: Desk) -> None:
    await desk.limit(ALICE, "total-tokens=100/minute")
    id = await desk.granted(ALICE, tokens(10))
    await desk.store.settle(id, spent(10, 340))
    assert await desk.used(ALICE) == [350]
    refused = await desk.denied(ALICE, tokens(50))
    assert refused.wait == pytest.approx(60 * (350 + 50 - 100) / 100)
    desk.clock.now += refused.wait
    await desk.granted(ALICE, tokens(50))


async def test_all_limits_hold_or_nothing_is_charged(desk: Desk) -> None:
    await desk.write(
        {
            "org/acme": Subject(limits=limits("total-tokens=10k/day")),
            "team/search": Subject(parent="org/acme", limits=limits("requests=100/day")),
            ALICE: Subject(parent="team/search", limits=limits("total-tokens=1k/day")),
            "tenant/bob": Subject(parent="team/search"),
        }
    )
    await desk.granted(ALICE, tokens(900))
    before = await desk.used(ALICE)
    assert before == [900, 1, 900]
    refused = await desk.denied(ALICE, tokens(200))
    assert named(refused, desk.plan(ALICE)) == "tenant/alice total-tokens/day"
    assert await desk.used(ALICE) == before
    await desk.granted("tenant/bob", tokens(9100))
    refused = await desk.denied("tenant/bob", tokens(1))
    assert named(refused, desk.plan("tenant/bob")) == "org/acme total-tokens/day"
    assert await desk.used("tenant/bob") == [2, 10000]


async def test_the_limit_that_takes_longest_is_named(desk: Desk) -> None:
    await desk.limit(ALICE, "requests=1/second", "requests=1/day", "requests=1/hour")
    await desk.granted(ALICE, tokens(1))
    refused = await desk.denied(ALICE, tokens(1))
    assert named(refused, desk.plan(ALICE)) == "tenant/alice requests/day"
    assert refused.wait == 12 * 3600  # until midnight
    desk.clock.now += 12 * 3600
    await desk.granted(ALICE, tokens(1))


async def test_limits_of_a_model_and_of_a_pair(desk: Desk) -> None:
    await desk.write(
        {
            "model/org/big": Subject(limits=limits("requests=3/day")),
            ALICE: Subject(limits=limits("requests=1/day", model="org/big")),
        }
    )
    await desk.granted(ALICE, tokens(1), model="org/big")
    refused = await desk.denied(ALICE, tokens(1), model="org/big")
    assert named(refused, desk.plan(ALICE, "org/big")) == "tenant/alice requests/day"
    await desk.granted(ALICE, tokens(1), model="small")
    await desk.granted("tenant/bob", tokens(1), model="org/big")
    await desk.granted("tenant/bob", tokens(1), model="org/big")
    refused = await desk.denied("tenant/carol", tokens(1), model="org/big")
    assert named(refused, desk.plan("tenant/carol", "org/big")) == "model/org/big requests/day"


async def test_a_default_holds_for_each_tenant_by_itself(desk: Desk) -> None:
    await desk.write(
        {
            "org/all": Subject(limits=limits("requests=4/day")),
            "tenant/*": Subject(parent="org/all", limits=limits("requests=1/day")),
            ALICE: Subject(limits=limits("requests=2/day")),
        }
    )
    await desk.granted("tenant/one", tokens(1))
    await desk.denied("tenant/one", tokens(1))
    await desk.granted("tenant/two", tokens(1))
    await desk.granted(ALICE, tokens(1))
    await desk.granted(ALICE, tokens(1))
    refused = await desk.denied("tenant/three", tokens(1))
    assert named(refused, desk.plan("tenant/three")) == "org/all requests/day"


async def test_a_tenant_with_something_of_its_own_has_the_defaults_too(desk: Desk) -> None:
    grant = Grant("all", "requests/day", 1, START + 3600)
    extra = Grant("own", "requests/day", 1, START + 3600)
    everyone = Subject(limits=limits("requests=1/day", "concurrency=9"), grants=(grant,))
    await desk.write(
        {
            "tenant/*": everyone,
            ALICE: Subject(limits=(Limit("total-tokens", 5, "day", shadow=True),)),
            "tenant/bob": Subject(limits=limits("requests=2/day"), grants=(extra,)),
        }
    )
    for name, passing in ((ALICE, 2), ("tenant/bob", 4), ("tenant/carol", 2)):
        for _ in range(passing):
            await desk.granted(name, tokens(10))
        refused = await desk.denied(name, tokens(10))
        assert named(refused, desk.plan(name)) == f"{name} requests/day"
    assert len(desk.plan(ALICE).checks) == 3


async def test_an_end_or_a_block_of_all_is_one_of_each(desk: Desk) -> None:
    await desk.write(
        {
            "tenant/*": Subject(expires=START + 60),
            "team/*": Subject(blocked="audit"),
            ALICE: Subject(limits=limits("requests=1/day"), expires=START + 3600),
            "tenant/bob": Subject("team/search"),
            "team/search": Subject(limits=limits("requests=1/day")),
        }
    )
    assert desk.plan(ALICE).barred is None
    assert desk.plan("tenant/bob").barred == ("team/search", "audit")
    desk.clock.now += 60
    for name in (ALICE, "tenant/bob", "tenant/carol"):
        assert desk.plan(name).barred == (name, "expired")


async def test_concurrency_is_what_is_open(desk: Desk) -> None:
    await desk.limit(ALICE, "concurrency=2")
    first = await desk.granted(ALICE, tokens(1))
    await desk.granted(ALICE, tokens(1))
    assert (await desk.denied(ALICE, tokens(1))).wait == 1.0
    await desk.store.settle(first, spent(5))
    await desk.granted(ALICE, tokens(1))
    assert await desk.used(ALICE) == [2]


async def test_a_reservation_that_outlives_its_time_is_given_back(desk: Desk) -> None:
    await desk.limit(ALICE, "concurrency=1", "total-tokens=100/day", "total-tokens=100/hour")
    await desk.granted(ALICE, tokens(100), ttl=50.0)
    desk.clock.now += 49.9
    await desk.denied(ALICE, tokens(100))
    desk.clock.now += 0.1
    assert await desk.used(ALICE) == [0, 0, 0]
    await desk.granted(ALICE, tokens(100))
    assert await desk.store.verify() == []


@pytest.mark.parametrize("late", [1.0, 3599.0])
async def test_an_end_after_the_expiry_is_charged_all_the_same_once(
    desk: Desk, late: float
) -> None:
    await desk.limit(ALICE, "total-tokens=100/day", "concurrency=1")
    id = await desk.granted(ALICE, tokens(80), ttl=50.0)
    desk.clock.now += 50 + late
    assert await desk.used(ALICE) == [0, 0]
    assert await desk.store.settle(id, spent(60, 70))
    assert not await desk.store.settle(id, spent(60, 70))
    assert await desk.used(ALICE) == [130, 0]
    assert await desk.store.verify() == []


async def test_a_settled_request_is_booked_on_the_day_that_it_came(desk: Desk) -> None:
    await desk.limit(ALICE, "total-tokens=100/day")
    id = await desk.granted(ALICE, tokens(80), ttl=86400.0)
    keys = desk.keys(desk.plan(ALICE))
    desk.clock.now += 12 * 3600 + 5  # past midnight
    await desk.granted(ALICE, tokens(100))
    await desk.store.settle(id, spent(20))
    assert await desk.used(ALICE) == [100]
    assert (await desk.store.counts(keys))[0].value == 20
    assert await desk.store.verify() == []


async def test_months_and_days_are_those_of_the_zone(desk: Desk) -> None:
    limit = Limit("requests", 1, "month", zone="Pacific/Auckland")  # UTC+13 in March
    await desk.write({ALICE: Subject(limits=(limit,))})
    await desk.granted(ALICE, tokens(1))
    refused = await desk.denied(ALICE, tokens(1))
    assert refused.wait is not None
    # From 2 March 01:00 there until 1 April, before summer time ends on the 5th.
    assert refused.wait == 31 * 86400 - 25 * 3600
    desk.clock.now += refused.wait
    await desk.granted(ALICE, tokens(1))


async def test_more_than_the_limit_passes_when_nothing_is_used(desk: Desk) -> None:
    await desk.limit(ALICE, "total-tokens=100/minute")
    id = await desk.granted(ALICE, tokens(5000))
    assert await desk.used(ALICE) == [100]
    await desk.store.settle(id, spent(250))
    desk.clock.now += 90
    await desk.granted(ALICE, tokens(0))
    await desk.denied(ALICE, tokens(5000))
    desk.clock.now += 60
    await desk.granted(ALICE, tokens(5000))


async def test_a_limit_of_nothing_lets_nothing_pass(desk: Desk) -> None:
    await desk.limit(ALICE, "requests=0/minute")
    assert (await desk.denied(ALICE, tokens(1))).wait is None
    desk.clock.now += 10_000
    await desk.denied(ALICE, tokens(1))
    await desk.limit(ALICE, "requests=1/minute")
    await desk.granted(ALICE, tokens(1))


async def test_a_limit_in_shadow_counts_and_tells(desk: Desk) -> None:
    shadow = Limit("requests", 1, "day", shadow=True)
    await desk.write({ALICE: Subject(limits=(shadow,))})
    _, first = await desk.ask(ALICE, tokens(1))
    _, second = await desk.ask(ALICE, tokens(1))
    assert isinstance(first, Granted) and first.shadowed == ()
    assert isinstance(second, Granted) and second.shadowed == (0,)
    assert await desk.used(ALICE) == [2]
    (denial,) = await desk.store.denials()
    assert denial.shadow and denial.limit == "tenant/alice requests/day"


async def test_a_raised_limit_lets_the_next_request_pass(desk: Desk) -> None:
    await desk.limit(ALICE, "total-tokens=100/minute", "requests=1/day")
    await desk.granted(ALICE, tokens(100))
    await desk.denied(ALICE, tokens(100))
    await desk.limit(ALICE, "total-tokens=300/minute", "requests=2/day")
    assert await desk.used(ALICE) == [100, 1]
    await desk.granted(ALICE, tokens(200))
    desk.clock.now += 20
    assert whole(await desk.used(ALICE)) == [200, 2]  # it leaks at the new rate


async def test_a_plan_of_an_old_policy_is_not_acted_on(desk: Desk) -> None:
    await desk.limit(ALICE, "requests=1/day")
    plan = desk.plan(ALICE)
    await desk.limit("tenant/bob", "requests=1/day")
    answer = await desk.store.reserve("late", plan, tokens(1), "", TTL)
    assert isinstance(answer, Stale)
    assert await desk.used(ALICE) == [0]
    assert not await desk.store.settle("late", spent(1))


async def test_grants_are_drawn_on_when_the_limit_is_met(desk: Desk) -> None:
    grants = (
        Grant("late", "total-tokens/day", 50, START + 7200),
        Grant("soon", "total-tokens/day", 30, START + 3600),
    )
    await desk.write({ALICE: Subject(limits=limits("total-tokens=100/day"), grants=grants)})
    first = await desk.granted(ALICE, tokens(90))
    second = await desk.granted(ALICE, tokens(20))  # 10 of the limit, 10 of `soon`
    refused = await desk.denied(ALICE, tokens(71))
    assert refused.wait == 12 * 3600
    third = await desk.granted(ALICE, tokens(70))
    await desk.denied(ALICE, tokens(1))
    await desk.store.settle(third, spent(5))  # of the 70, what `late` gave comes back first
    await desk.store.settle(second, FREE)
    await desk.store.settle(first, spent(90))
    assert await desk.store.verify() == []
    assert await desk.used(ALICE) == [90]
    await desk.granted(ALICE, tokens(10 + 25 + 50))
    await desk.denied(ALICE, tokens(1))


async def test_an_expired_grant_gives_nothing_and_takes_nothing(desk: Desk) -> None:
    grant = Grant("g", "total-tokens/minute", 600, START + 100)
    await desk.write({ALICE: Subject(limits=limits("total-tokens=60/minute"), grants=(grant,))})
    await desk.granted(ALICE, tokens(60))
    await desk.granted(ALICE, tokens(60))
    desk.clock.now += 100
    assert await desk.used(ALICE) == [0]  # what the grant gave is no burden on the bucket
    await desk.granted(ALICE, tokens(60))
    await desk.denied(ALICE, tokens(60))


async def test_shrinking_gives_back_and_keeps_open(desk: Desk) -> None:
    await desk.limit(ALICE, "total-tokens=1k/day", "total-tokens=1k/hour")
    id = await desk.granted(ALICE, tokens(1000), ttl=10.0)
    assert await desk.store.shrink(id, (1, 0, 0, 300, 0), 500.0)
    assert await desk.used(ALICE) == [300, 300]
    desk.clock.now += 499
    assert whole(await desk.used(ALICE))[0] == 300
    desk.clock.now += 1
    assert await desk.used(ALICE) == [0, 0]
    assert not await desk.store.shrink(id, (1, 0, 0, 100, 0), 500.0)
    assert await desk.store.settle(id, spent(50))
    assert (await desk.used(ALICE))[0] == 50
    assert await desk.store.verify() == []


async def test_a_renewed_reservation_holds_what_it_held(desk: Desk) -> None:
    grant = Grant("g", "total-tokens/day", 50, START + 86400)
    subject = Subject(limits=limits("total-tokens=100/day", "concurrency=1"), grants=(grant,))
    await desk.write({ALICE: subject})
    await desk.store.settle(await desk.granted(ALICE, tokens(60)), spent(60))
    id = await desk.granted(ALICE, tokens(60), ttl=10.0)
    for _ in range(500):  # for longer than counters that nobody needs are kept
        desk.clock.now += 9
        await desk.store.renew([id, "nobody's"], 10.0)
    assert await desk.used(ALICE) == [100, 1]
    (held,) = await desk.store.reservations()
    assert (held.id, held.expires) == (id, desk.clock.now + 10)
    assert sorted(line.amount for line in held.lines) == [1, 20, 40]
    desk.clock.now += 10
    assert await desk.used(ALICE) == [60, 0]
    await desk.store.renew([id], 10.0)
    assert await desk.used(ALICE) == [60, 0]
    assert await desk.store.settle(id, spent(50))
    await desk.store.renew([id], 10.0)
    assert await desk.used(ALICE) == [110, 0]
    assert await desk.store.verify() == []


async def test_use_without_a_reservation_is_charged_once(desk: Desk) -> None:
    await desk.limit(ALICE, "total-tokens=1k/day", "total-tokens=1k/hour")
    start, end = desk.plan(ALICE).checks[0].calendar.span(desk.clock.now)  # type: ignore[union-attr]
    lines = [
        Line(f"{ALICE}\t\ttotal-tokens/day\t{start}", 0, 3, 0, False, -1.0, end + 86400),
        Line(f"{ALICE}\t\ttotal-tokens/hour", 0, 3, 0, False, 1000 / 3600, 0.0),
    ]
    assert await desk.store.charge("elsewhere", ALICE, "m", lines, spent(400, 200))
    assert not await desk.store.charge("elsewhere", ALICE, "m", lines, spent(400, 200))
    assert await desk.used(ALICE) == [600, 600]
    (use,) = (await desk.store.uses(0)).values()
    assert (use.requests, use.prompt_tokens, use.completion_tokens) == (1, 400, 200)
    await desk.denied(ALICE, tokens(500))
    assert await desk.store.verify() == []


async def test_the_books_tell_what_each_subject_used(desk: Desk) -> None:
    await desk.limit(ALICE, "requests=2/day")
    for usage in (spent(100, 20, cached=60), spent(7, 3)):
        await desk.store.settle(await desk.granted(ALICE, tokens(10), model="m"), usage)
    await desk.denied(ALICE, tokens(10), model="anything a client may write")
    failed = await desk.granted("tenant/bob", tokens(10), model="m")
    await desk.store.settle(failed, FREE)
    today = int(START // 86400)
    uses = await desk.store.uses(today)
    assert set(uses) == {(today, ALICE, "m"), (today, ALICE, "")}
    use = uses[today, ALICE, "m"]
    assert (use.requests, use.prompt_tokens, use.cached_tokens) == (2, 107, 60)
    assert (use.completion_tokens, use.denied) == (23, 0)
    assert uses[today, ALICE, ""].denied == 1
    assert await desk.store.uses(today + 1) == {}


async def test_the_last_denials_are_told_newest_first(desk: Desk) -> None:
    await desk.limit(ALICE, "requests=1/day")
    await desk.granted(ALICE, tokens(10), model="m")
    for model in ("m", "n"):
        await desk.denied(ALICE, tokens(10), model=model)
    newest, oldest = await desk.store.denials()
    assert (newest.model, oldest.model) == ("n", "m")
    assert (newest.subject, newest.limit) == (ALICE, "tenant/alice requests/day")
    assert (newest.at, newest.wait, newest.amount) == (START, 12 * 3600, 1)


async def test_open_reservations_are_told(desk: Desk) -> None:
    await desk.limit(ALICE, "total-tokens=1k/day")
    ids = [await desk.granted(ALICE, tokens(10 + each), model="m") for each in range(3)]
    await desk.granted("tenant/bob", tokens(5))
    await desk.store.settle(ids[1], FREE)
    found = await desk.store.reservations(ALICE)
    assert [reservation.id for reservation in found] == [ids[0], ids[2]]
    assert [line.amount for reservation in found for line in reservation.lines] == [10, 12]
    assert (found[0].expires, found[0].model) == (START + TTL, "m")
    assert len(await desk.store.reservations()) == 3


async def test_counters_are_corrected_by_hand(desk: Desk) -> None:
    await desk.limit(ALICE, "total-tokens=100/day", "total-tokens=100/hour")
    await desk.granted(ALICE, tokens(40))
    await desk.store.settle(await desk.granted(ALICE, tokens(30)), spent(30))
    day, hour = desk.keys(desk.plan(ALICE))
    await desk.store.correct([Correction(day, 25), Correction(hour, -60)], [])
    assert await desk.used(ALICE) == [95, 10]
    await desk.store.correct([Correction(day, None), Correction(hour, None)], [])
    assert await desk.used(ALICE) == [40, 0]  # what is open still counts
    assert await desk.store.verify() == []
    await desk.granted(ALICE, tokens(60))


async def test_credit_by_hand_may_go_below_zero_for_a_day(desk: Desk) -> None:
    await desk.limit(ALICE, "total-tokens=100/day")
    (day,) = desk.keys(desk.plan(ALICE))
    await desk.store.correct([Correction(day, -50, until=START + 2 * 86400)], [])
    await desk.granted(ALICE, tokens(100))
    await desk.granted(ALICE, tokens(50))
    await desk.denied(ALICE, tokens(1))


async def test_records_are_written_only_over_what_was_read(desk: Desk) -> None:
    await desk.limit(ALICE, "requests=1/day")
    seen = desk.revision(ALICE)
    await desk.limit(ALICE, "requests=2/day")
    bob = Change("tenant/bob", 0, Subject(limits=limits("requests=1/day")))
    with pytest.raises(Conflict) as caught:
        await desk.store.write([bob, Change(ALICE, seen, Subject())], [])
    assert (caught.value.expected, caught.value.found) == (seen, desk.revision(ALICE))
    with pytest.raises(Conflict):
        await desk.store.write([Change(ALICE, 0, Subject())], [])
    await desk.read()
    assert "tenant/bob" not in desk.policy.records
    assert desk.policy.records[ALICE].subject.limits == limits("requests=2/day")
    assert await desk.store.audit() == []


async def test_changes_are_told_since_a_version(desk: Desk) -> None:
    await desk.limit(ALICE, "requests=1/day")
    await desk.limit("tenant/bob", "requests=1/day")
    seen = desk.policy.version
    assert (await desk.store.changes(seen)).records == {}
    await desk.store.write([Change(ALICE, desk.revision(ALICE), None)], [])
    await desk.store.write([Change("tenant/carol", 0, Subject(blocked="late"))], [])
    version, records, complete, after = await desk.store.changes(seen)
    assert not after
    assert version != seen and not complete
    assert records[ALICE] is None
    assert records["tenant/carol"].subject.blocked == "late"  # type: ignore[union-attr]
    assert set(records) == {ALICE, "tenant/carol"}
    everything = await desk.store.changes("")
    assert everything.whole and everything.version == version
    assert {name for name, record in everything.records.items() if record} == {
        "tenant/bob",
        "tenant/carol",
    }
    await desk.store.write([Change(ALICE, 0, Subject(blocked="back"))], [])
    assert (await desk.store.changes(version)).records[ALICE] is not None


async def test_every_write_leaves_its_entry(desk: Desk) -> None:
    def entry(action: str, subject: str) -> Entry:
        return Entry(START, "root", action, subject, "", "{}", "why", "id-1")

    await desk.store.write([Change(ALICE, 0, Subject(blocked="a"))], [entry("block", ALICE)])
    await desk.store.correct([Correction("k", 5)], [entry("adjust", "tenant/bob")])
    newest, oldest = await desk.store.audit()
    assert (newest.action, oldest.action) == ("adjust", "block")
    assert oldest[:-1] == entry("block", ALICE)[:-1]
    await desk.read()
    assert oldest.revision == desk.revision(ALICE)
    assert await desk.store.audit(ALICE) == [oldest]
    assert await desk.store.audit(limit=1) == [newest]


async def test_usage_that_tells_no_amounts_still_counts_the_request(desk: Desk) -> None:
    await desk.limit(ALICE, "requests=5/day", "output-tokens=10/day")
    id = await desk.granted(ALICE, (1, 5, 10, 15, 1))
    await desk.store.settle(id, Spent((1, 0, 0, 0, 0)))
    assert await desk.used(ALICE) == [1, 0]
