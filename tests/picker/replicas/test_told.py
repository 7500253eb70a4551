"""What a picker takes over of what it is told, and what not."""

from __future__ import annotations

import math

import numpy as np
import pytest

from picker.access_log import AccessLogService
from picker.config import EndpointSpec
from picker.engines import LoadReport
from picker.names import STREAM
from picker.pool import Pool
from picker.prefix import keys
from picker.prefix.index import BlockIndex, TokenPrompt
from picker.replicas import replica_pb2 as pb
from picker.replicas.known import Known
from picker.replicas.news import News
from picker.replicas.told import MAX_REPLICAS, Told
from picker.tickets import Tickets
from tests.picker.replicas.parts import ADDRESSES, Clock, Picker, sent
from tests.picker.test_access_log import entry

A, B, C = ADDRESSES


async def pair(clock: Clock | None = None):
    """One that tells, its outbox for the other, and that."""
    one, two = Picker(1, clock), Picker(2, clock)
    outbox = one.news.follow(2)
    outbox.begin()
    for message in one.snapshot():
        two.hear(message)
    return one, outbox, two


def tell(one: Picker, outbox, two: Picker) -> None:
    one.news.flush()
    for message in sent(outbox):
        two.hear(message)


async def test_what_others_sent_waits_until_a_scrape_tells_of_it():
    clock = Clock()
    one, outbox, two = await pair(clock)
    two.load.report(two[A], LoadReport(0.0, 0.0, 0.0), clock.now)
    clock.now += 1
    one.pick(A, 10)
    clock.now += 0.02
    tell(one, outbox, two)
    assert two.load.describe(two[A]).waiting == 1
    assert two.load.busy(two[A])
    # Our scrape began after the request was sent: the pod's page knows it.
    two.load.report(two[A], LoadReport(0.0, 1.0, 0.0), clock.now)
    assert two.load.describe(two[A]).waiting == 0
    # A scrape began between the next one's sending and our hearing of it.
    one.pick(A, 10)
    clock.now += 0.01
    two.load.report(two[A], LoadReport(1.0, 1.0, 0.0), clock.now)
    clock.now += 0.01
    tell(one, outbox, two)
    assert two.load.describe(two[A]).waiting == 1
    assert two.loads()[A] == (2, 20)


async def test_a_pod_that_comes_later_has_what_was_told_of_it_before():
    one, outbox, two = await pair()
    two.set_pool([B, C])
    one.pick(A, 10)
    tell(one, outbox, two)
    two.set_pool([A, B, C])
    assert two.loads()[A] == (1, 10)
    two.told.gone(1)
    two.set_pool([B, C])
    two.set_pool([A, B, C])
    assert two.loads()[A] == (0, 0)


async def test_a_pod_that_leaves_takes_along_what_was_told_of_it():
    one, outbox, two = await pair()
    one.pick(A, 10)
    tell(one, outbox, two)
    for picker in (one, two):  # as when it is not ready for a while
        picker.set_pool([B, C])
    for picker in (one, two):
        picker.set_pool([A, B, C])
    tell(one, outbox, two)
    assert two.loads()[A] == (0, 0)
    one.pick(A, 10)
    tell(one, outbox, two)
    one.set_pool([B, C])  # the other still has it
    tell(one, outbox, two)
    assert two.loads()[A] == (0, 0)


async def test_of_two_pods_at_one_address_the_later_one_is_told():
    one, outbox, two = await pair()
    one.pick(A, 10)
    one.pool.restarted(one[A])
    one.pick(A, 20)
    tell(one, outbox, two)
    assert two.loads()[A] == (1, 20)


async def test_nonsense_is_passed_over():
    _, _, two = await pair()
    pod = pb.Pod(address=A)
    naming = two.prompts.naming
    update = pb.Update(
        replica=1,
        number=9,
        loads=[
            pb.Load(pod=pb.Pod(address="10.9.9.9:1"), requests=5),
            pb.Load(pod=pod, requests=(1 << 32) - 1, tokens=(1 << 64) - 1, age=math.nan),
        ],
        learned=[
            pb.Learned(naming=naming, pod=pod, chains=[b"", b"1234567", bytes(8 * (1 << 16) + 8)]),
            pb.Learned(naming=naming + 1, pod=pod, chains=[bytes(8)]),
            pb.Learned(naming=naming, pod=pb.Pod(address="?"), chains=[bytes(8)]),
        ],
        services=[
            pb.Service(tenant="x" * 1000, service=5),
            pb.Service(tenant="nan", service=math.nan),
            pb.Service(tenant="much", service=1e300),
            pb.Service(tenant="high", priority=101, service=1),
        ],
        sessions=[
            pb.Session(key=b"short", pod=pod, version=1),
            pb.Session(key=bytes(16), pod=pod, version=1, age=math.nan),
            pb.Session(key=bytes(16), pod=pod, version=1, age=1e9),
        ],
    )
    two.hear(update.SerializeToString())
    assert two.prompts.blocks == 0
    assert two.service() == {}
    assert two.homes() == {}
    assert math.isfinite(two.load.describe(two[A]).elsewhere.tokens)
    for number in range(2, MAX_REPLICAS + 3):
        load = pb.Load(pod=pod, requests=1)
        two.hear(pb.Update(replica=number, number=1, loads=[load]).SerializeToString())
    assert two.loads()[A][0] <= MAX_REPLICAS


async def test_tenants_served_elsewhere_wait_as_if_they_were_served_here():
    one, outbox, two = await pair()
    one.serve("busy", 1000)
    two.serve("new", 10)
    tell(one, outbox, two)
    counters = two.flow.counters(0)
    busy, new = counters.find("busy"), counters.find("new")
    # Lifted to who was served here, then charged.
    assert busy.value == new.value + 1000
    counters.arrive("new")
    counters.arrive("busy")
    assert counters.least() == "new"


async def test_a_refund_elsewhere_takes_no_lift_back():
    _, _, two = await pair()
    counters = two.flow.counters(0)
    two.serve("other", 500)
    counters.arrive("other")
    counters.charge_elsewhere("late", 100, came=True)
    assert counters.find("late").value == 600
    counters.charge_elsewhere("late", -300, came=False)  # of what was before the lift
    assert counters.find("late").value == 500
    assert counters.find("late").service == -200


async def test_a_new_picker_begins_with_the_counters_of_an_older_one_once():
    clock = Clock()
    one, two = Picker(1, clock), Picker(2, clock)
    one.news.started -= 100
    one.serve("old", 10_000)
    one.flow.counters(0).arrive("young")  # lifted to the other
    for _ in range(2):
        for message in one.snapshot():
            two.hear(message)
    values = {counter.tenant: counter.value for counter in two.flow.counters(0)}
    assert values == {"old": 10_000, "young": 10_000}
    outbox = one.news.follow(2)
    outbox.begin()
    one.serve("old", 5)
    tell(one, outbox, two)
    assert two.flow.counters(0).find("old").value == 10_005


async def test_expected_blocks_count_at_pickers_that_share_a_secret():
    naming = keys.share(b"a secret of many bytes")
    tokens = np.arange(64, dtype=np.uint32)
    pool = Pool("test")
    indexes = []
    pool.update([EndpointSpec(address=A)])
    pickers = []
    for number in (1, 2):
        picker = Picker(number)
        index = BlockIndex(picker.pool.capacity)
        index.open(picker[A].slot)
        known = Known(
            picker.pool, picker.load, picker.prompts, picker.sessions, None, index, naming
        )
        picker.news = News(known, number)
        picker.told = Told(known, picker.news, picker.entries.append)
        indexes.append(index)
        pickers.append(picker)
    one, two = pickers
    outbox = one.news.follow(2)
    outbox.begin()
    slot = one[A].slot
    for length in (32, 64):
        prompt = TokenPrompt(tokens[:length])
        indexes[0].expect(slot, indexes[0].match(prompt))
        tell(one, outbox, two)
        assert indexes[1].match(TokenPrompt(tokens)).tokens[slot] == length
    # Another secret: its keys mean nothing here.
    update = pb.Update(replica=1, number=99)
    update.expected.add(naming=naming + 1, pod=pb.Pod(address=A), chains=[b"\x07" * 8])
    before = len(indexes[1])
    two.hear(update.SerializeToString())
    assert len(indexes[1]) == before


def test_the_same_secret_makes_the_same_keys():
    prompt = TokenPrompt(np.arange(4000, dtype=np.uint32), "adapter")
    made = []
    for secret in (b"one secret", b"another", b"one secret"):
        made.append((keys.share(secret), keys.prompt_keys(prompt, 200).tolist()))
    assert made[0] == made[2]
    assert made[0][0] != made[1][0]
    assert not set(made[0][1]) & set(made[1][1])


class Others:
    replica = 0xA

    def __init__(self) -> None:
        self.handed: list[tuple[int | None, bytes]] = []

    def hand(self, owner: int | None, entry: bytes) -> None:
        self.handed.append((owner, entry))


@pytest.mark.parametrize(
    ("name", "owner"),
    [("x@a", "ours"), ("x@b", 0xB), ("x", None), ("x@what", None), ("x@" + "f" * 17, None)],
)
def test_an_entry_goes_to_the_picker_that_its_request_names(name, owner):
    tickets = Tickets()
    service = AccessLogService(tickets)
    service.others = others = Others()
    told = entry(name)
    assert told.request.request_headers[STREAM] == name
    service.settle(told)
    if owner == "ours":
        assert others.handed == []
    else:
        assert others.handed == [(owner, told.SerializeToString())]


async def test_who_is_asked_late_hears_from_another_that_the_request_is_over():
    tickets = Tickets()
    service = AccessLogService(tickets)
    service.others = Others()
    service.handed(entry("left").SerializeToString())
    service.handed(b"\xff\xffgarbage")
    ends = []

    class Late:
        def end(self, outcome, usage=None, *, after=None):
            ends.append(outcome)

    tickets.open("left", Late())
    assert ends == ["aborted"]
    assert service.others.handed == []  # it is not handed on again


async def test_prompts_in_another_naming_are_counted_and_told_of_once(caplog):
    one, _, two = await pair()
    one.prompts.naming += 1  # as another `prefix.blockBytes` does
    for number in range(3):
        one.learn(A, [number, 7, 8])
    for message in one.snapshot():
        two.hear(message)
    assert two.holds([0, 7, 8])[A] == 0
    assert two.told.foreign == 3
    assert caplog.text.count("in a way that is not ours") == 1
