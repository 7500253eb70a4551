"""What a client and a picker see of quotas, over every store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from picker.config import Quota
from picker.quota.admission import UNKNOWN_SECONDS, Admission, Ask, Quotas, Refused
from picker.quota.answers import duration
from picker.quota.model import Key, Limit, Subject
from picker.refusal import Refusal
from picker.usage import Usage
from tests.picker.quota.conftest import STORES, opened
from tests.picker.quota.kit import START, Clock, Desk, limits

ALICE = "tenant/alice"


class Front:
    """Two pickers that share a store, and an administrator's hand on it."""

    def __init__(self, desk: Desk, config: Quota) -> None:
        self.desk = desk
        self.clock = desk.clock
        self.quotas = [Quotas(desk.store, config, desk.clock) for _ in range(2)]

    async def granted(self, ask: Ask, picker: int = 0) -> Admission:
        answer = await self.quotas[picker].admit(ask)
        assert isinstance(answer, Admission), answer
        return answer

    async def settle(
        self, admission: Admission | str, usage: Usage | None, picker: int = 0
    ) -> None:
        quotas = self.quotas[picker]
        quotas.settle(admission, usage)
        await quotas.settled()

    async def refused(self, ask: Ask, picker: int = 0) -> Refused:
        answer = await self.quotas[picker].admit(ask)
        assert isinstance(answer, Refused)
        return answer


@pytest.fixture(params=STORES)
async def front(request: pytest.FixtureRequest) -> AsyncIterator[Front]:
    clock = Clock()
    async with opened(request.param, clock) as store:
        front = Front(Desk(store, clock), Quota(cached_cost=0.25, expected_output=100))
        for quotas in front.quotas:
            await quotas.start()
        yield front


async def test_a_request_holds_what_it_may_use_and_pays_what_it_used(front: Front) -> None:
    await front.desk.limit(ALICE, "total-tokens=1k/day", "requests=5/day")
    first = await front.granted(Ask(ALICE, "m", 300, max_tokens=500))
    assert first.estimate == Usage(300, 0, 500)
    assert await front.desk.used(ALICE) == [800, 1]
    refused = await front.refused(Ask(ALICE, "m", 300, max_tokens=500), picker=1)
    assert refused.limit == "tenant/alice total-tokens/day"
    assert refused.retry_after == 12 * 3600
    await front.settle(first, Usage(310, None, 90))
    await front.granted(Ask(ALICE, "m", 300, max_tokens=300), picker=1)
    assert await front.desk.used(ALICE) == [1000, 2]


async def test_an_end_counts_once_and_anybody_may_tell_it(front: Front) -> None:
    await front.desk.limit(ALICE, "total-tokens=1k/day")
    admission = await front.granted(Ask(ALICE, "m", 100, max_tokens=100))
    await front.settle(admission.id, Usage(100, 0, 7), picker=1)
    await front.settle(admission, Usage(100, 0, 100))
    await front.settle(admission, None)
    assert await front.desk.used(ALICE) == [107]


@pytest.mark.parametrize("late", [1.0, 3 * 86_400.0])
async def test_an_end_that_comes_when_its_reservation_has_long_expired_is_charged_once(
    front: Front, late: float
) -> None:
    await front.desk.limit(ALICE, "total-tokens=1k/month", "concurrency=1")
    admission = await front.granted(Ask(ALICE, "m", 600, max_tokens=300))
    front.clock.now += Quota().reservation_ttl + late
    await front.settle(await front.granted(Ask(ALICE, "m", 900)), Usage(900, 0, 50))
    for _ in range(2):
        await front.settle(admission, Usage(600, 0, 200))
    assert await front.desk.used(ALICE) == [950 + 800, 0], "debt, no loss"
    assert await front.desk.store.verify() == []


async def test_a_request_that_was_not_served_costs_nothing(front: Front) -> None:
    await front.desk.limit(ALICE, "total-tokens=1k/hour", "requests=1/day", "concurrency=1")
    await front.settle(await front.granted(Ask(ALICE, "m", 900)), None)
    assert await front.desk.used(ALICE) == [0, 0, 0]
    await front.granted(Ask(ALICE, "m", 900))


async def test_cached_prompt_tokens_are_cheaper(front: Front) -> None:
    await front.desk.limit(ALICE, "input-tokens=10k/day")
    admission = await front.granted(Ask(ALICE, "m", 1000, max_tokens=1))
    await front.settle(admission, Usage(1000, 802, 1))
    assert await front.desk.used(ALICE) == [198 + 201]
    (use,) = (await front.desk.store.uses(0)).values()
    assert (use.prompt_tokens, use.cached_tokens) == (1000, 802)


async def test_without_max_tokens_the_answers_before_tell_what_to_hold(front: Front) -> None:
    await front.desk.limit(ALICE, "output-tokens=100k/day")
    for tokens in (800, 800, 800):
        admission = await front.granted(Ask(ALICE, "m", 5))
        await front.settle(admission, Usage(5, 0, tokens))
    assert (await front.granted(Ask(ALICE, "m", 5))).estimate.completion_tokens == 800
    assert (await front.granted(Ask(ALICE, "other", 5))).estimate.completion_tokens == 100
    assert (await front.granted(Ask(ALICE, "m", 5, 30))).estimate.completion_tokens == 30


async def test_a_refusal_tells_which_limit_and_when_to_come_back(front: Front) -> None:
    await front.desk.limit(ALICE, "total-tokens=600/minute", "requests=100/minute")
    await front.granted(Ask(ALICE, "m", 500, max_tokens=100))
    refusal = (await front.refused(Ask(ALICE, "m", 25, max_tokens=30))).refusal
    headers = dict(refusal.headers)
    assert refusal.status == 429
    assert headers["retry-after"] == "6"  # 55 tokens at 10 a second
    assert headers["x-ratelimit-limit-tokens"] == "600"
    assert headers["x-ratelimit-remaining-tokens"] == "0"
    assert headers["x-ratelimit-reset-tokens"] == "1m0s"
    assert headers["x-ratelimit-remaining-requests"] == "99"
    error = json.loads(refusal.body)["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "quota_exceeded")
    assert "tenant/alice total-tokens/minute" in error["message"]
    assert "at most total-tokens=600/minute" in error["message"]


async def test_an_answer_tells_what_is_left_of_the_tightest_limit(front: Front) -> None:
    await front.desk.write(
        {
            "org/acme": Subject(limits=limits("total-tokens=1k/day", "requests=2/hour")),
            ALICE: Subject(
                "org/acme",
                (
                    *limits("output-tokens=700/day", "concurrency=5"),
                    Limit("requests", 1, "day", shadow=True),
                ),
            ),
        }
    )
    admission = await front.granted(Ask(ALICE, "m", 10, max_tokens=400))
    assert admission.headers == [
        ("x-ratelimit-limit-requests", "2"),
        ("x-ratelimit-remaining-requests", "1"),
        ("x-ratelimit-reset-requests", "30m0s"),
        ("x-ratelimit-limit-tokens", "700"),
        ("x-ratelimit-remaining-tokens", "300"),
        ("x-ratelimit-reset-tokens", "12h0m0s"),
    ]
    assert (await front.granted(Ask("tenant/free", "m", 10))).headers == []


async def test_writes_take_effect_on_the_next_request_of_every_picker(front: Front) -> None:
    for picker in (0, 1):
        await front.granted(Ask(ALICE, "m", 10), picker)
    await front.desk.write({ALICE: Subject(blocked="unpaid bill")})
    for picker in (0, 1):
        refusal = (await front.refused(Ask(ALICE, "m", 10), picker)).refusal
        assert refusal.status == 403
        assert "unpaid bill" in refusal.message
        assert refusal.retry_after is None
    await front.desk.write({ALICE: Subject()})
    for picker in (0, 1):
        await front.granted(Ask(ALICE, "m", 10), picker)
    await front.desk.limit(ALICE, "requests=3/day")
    await front.granted(Ask(ALICE, "m", 10), 0)
    await front.granted(Ask(ALICE, "m", 10), 1)
    await front.granted(Ask(ALICE, "m", 10), 0)
    assert (await front.refused(Ask(ALICE, "m", 10), 1)).limit == "tenant/alice requests/day"


async def test_a_block_above_holds_below_and_expiry_bars(front: Front) -> None:
    await front.desk.write(
        {
            "org/acme": Subject(expires=START + 30),
            "team/search": Subject("org/acme"),
            ALICE: Subject("team/search", limits("requests=9/day")),
        }
    )
    await front.granted(Ask(ALICE, "m", 10))
    front.clock.now += 30
    refusal = (await front.refused(Ask(ALICE, "m", 10))).refusal
    assert "org/acme takes no requests: expired" in refusal.message
    assert await front.desk.used(ALICE) == [1]


async def test_keys_are_known_at_once_and_no_longer_when_they_were_changed(front: Front) -> None:
    old, new = "ab" * 32, "cd" * 32

    def subject(digest: str, blocked: str | None = None) -> Subject:
        return Subject(ALICE, limits("requests=2/day"), blocked=blocked, key=Key(digest, "x", 0.0))

    quotas = front.quotas[0]
    assert await quotas.find_key(old) is None
    await front.desk.write({"key/one": subject(old)})
    front.clock.now += 1
    assert await quotas.find_key(old) == "key/one"
    assert await quotas.find_key(new) is None
    await front.granted(Ask("key/one", "m", 5, digest=old))
    await front.desk.write({"key/one": subject(new)})
    refusal = (await front.refused(Ask("key/one", "m", 5, digest=old))).refusal
    assert (refusal.status, refusal.reason) == (401, "invalid_api_key")
    assert b"key/one" not in refusal.body  # whoever has the old one need not learn what it was
    await front.granted(Ask("key/one", "m", 5, digest=new))
    assert (await front.refused(Ask("key/one", "m", 5, digest=new))).refusal.status == 429
    await front.desk.write({"key/one": subject(new, blocked="revoked")})
    assert "revoked" in (await front.refused(Ask("key/one", digest=new))).refusal.message
    assert (await front.refused(Ask("key/unknown"))).refusal.status == 403


async def test_a_new_key_is_known_at_once_whoever_sends_wrong_ones(front: Front) -> None:
    quotas = front.quotas[0]
    for number in range(5):
        wrong, new = f"{number}a" * 32, f"{number}b" * 32
        assert await quotas.find_key(wrong) is None
        guesses = [asyncio.create_task(quotas.find_key(f"{guess:064}")) for guess in range(20)]
        await asyncio.sleep(0)
        await front.desk.write({f"key/{number}": Subject(ALICE, key=Key(new, "x", 0.0))})
        assert await quotas.find_key(new) == f"key/{number}"
        assert set(await asyncio.gather(*guesses)) == {None}


async def test_a_wrong_key_that_comes_again_costs_the_store_nothing_for_a_while() -> None:
    clock = Clock()
    async with opened("sqlite", clock) as store:
        quotas = Quotas(store, Quota(), clock)
        await quotas.start()
        wrong, other = "ab" * 32, "cd" * 32
        assert await quotas.find_key(wrong) is None
        await store.close()
        assert await quotas.find_key(wrong) is None
        with pytest.raises(Refusal) as refused:  # nobody can tell whose it is
            await quotas.find_key(other)
        assert refused.value.status == 503
        clock.now += UNKNOWN_SECONDS
        with pytest.raises(Refusal):
            await quotas.find_key(wrong)


async def test_what_passes_and_what_does_not_is_counted(front: Front) -> None:
    await front.desk.write(
        {
            ALICE: Subject(limits=limits("requests=1/day")),
            "tenant/bob": Subject(blocked="no"),
            "tenant/carol": Subject(limits=(Limit("requests", 1, "day", shadow=True),)),
        }
    )
    for name in ("alice", "alice", "alice", "bob", "carol", "carol"):
        await front.quotas[0].admit(Ask(f"tenant/{name}", "m", 1))
    numbers = front.quotas[0].numbers
    assert (numbers.granted, numbers.barred, numbers.shadowed) == (3, 1, 1)
    assert numbers.denied == {"requests/day": 2}
    assert front.quotas[0].store_up and front.quotas[0].owed == 0


@pytest.mark.parametrize("model", ["a\tb", " spaces ", "x" * 10_000, ""])
async def test_a_model_of_any_name_is_booked(front: Front, model: str) -> None:
    await front.desk.limit(ALICE, "requests=9/day")
    admission = await front.granted(Ask(ALICE, model, 5))
    await front.settle(admission, Usage(5, 0, 5))
    assert [key[1:] for key in await front.desk.store.uses(0)] == [(ALICE, "")]


@pytest.mark.parametrize("subject", ["tenant/", "tenant/\n", "user/alice", "tenant/" + "x" * 300])
async def test_a_subject_that_cannot_be_is_refused(front: Front, subject: str) -> None:
    assert (await front.refused(Ask(subject, "m", 5))).refusal.status == 403


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.0123, "13ms"), (1.5, "1.5s"), (59.9991, "1m0s"), (3601, "1h0m1s")],
)
def test_durations_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text
