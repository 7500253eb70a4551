"""Who is in the pool, and in which slot."""

from __future__ import annotations

import re

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from picker.config import EndpointSpec, EventSource
from picker.pool import FIRST_CAPACITY, MAX_ENDPOINTS, Endpoint, Pool, parse_address


def specs(*addresses: str, **labels: str) -> list[EndpointSpec]:
    return [EndpointSpec(address=address, labels=labels) for address in addresses]


def pool_of(*addresses: str) -> Pool:
    pool = Pool("test")
    pool.update(specs(*addresses))
    return pool


def among(pool: Pool, *subset: str) -> list[str]:
    """Addresses that a subset names, in the order of their slots."""
    by_slot = {endpoint.slot: address for address, endpoint in pool.endpoints.items()}
    return [by_slot[slot] for slot in pool.among(subset).tolist()]


class Recorder:
    """A listener that writes down what it heard."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []
        self.slots: dict[int, Endpoint] = {}

    def added(self, endpoint: Endpoint) -> None:
        assert endpoint.alive
        assert endpoint.slot not in self.slots, "two owners of one slot"
        self.slots[endpoint.slot] = endpoint
        self.heard.append(("added", endpoint.address))

    def removed(self, endpoint: Endpoint) -> None:
        assert not endpoint.alive
        assert self.slots.pop(endpoint.slot) is endpoint
        self.heard.append(("removed", endpoint.address))


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("10.0.0.1:8000", "10.0.0.1:8000"),
        ("localhost:8001", "127.0.0.1:8001"),
        ("[2001:db8::1]:8000", "[2001:db8::1]:8000"),
        ("[2001:0DB8:0::0:1]:8000", "[2001:db8::1]:8000"),
        ("[::1]:65535", "[::1]:65535"),
        ("10.0.0.1:08000", "10.0.0.1:8000"),
    ],
)
def test_addresses_are_kept_as_the_protocol_writes_them(given: str, kept: str) -> None:
    assert list(pool_of(given).endpoints) == [kept]


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("", "has no port"),
        ("10.0.0.1", "has no port"),
        (":8000", "has no port"),
        ("10.0.0.1:", "port must be 1 to 65535"),
        ("10.0.0.1:0", "port must be 1 to 65535"),
        ("10.0.0.1:65536", "port must be 1 to 65535"),
        ("10.0.0.1:-1", "port must be 1 to 65535"),
        ("10.0.0.1:8\u0660", "port must be 1 to 65535"),
        ("10.0.0.1:80 ", "port must be 1 to 65535"),
        ("10.0.0.256:80", "no IPv4 address"),
        ("10.0.0.1.2:80", "no IPv4 address"),
        ("2001:db8::1:8000", "no IPv6 address in brackets"),
        ("[2001:db8::g]:8000", "no IPv6 address in brackets"),
        ("[10.0.0.1]:8000", "a name"),
        ("pod-0.svc:8000", "'pod-0.svc' is a name; give the pod's IP"),
        ("http://10.0.0.1:8000", "no IPv6 address in brackets"),
        ("0.0.0.0:8000", "not the address of one pod"),
        ("[::]:8000", "not the address of one pod"),
        ("224.0.0.1:8000", "not the address of one pod"),
        ("[fe80::1%eth0]:8000", "not the address of one pod"),
    ],
)
def test_a_wrong_address_is_an_error_that_says_what_is_wrong(address: str, says: str) -> None:
    with pytest.raises(ValueError, match="endpoint address") as caught:
        parse_address(address)
    assert says in str(caught.value)
    assert repr(address) in str(caught.value)


def test_one_endpoint_twice_is_an_error_however_it_is_written() -> None:
    for first, second in (("127.0.0.1:1", "localhost:1"), ("[::1]:1", "[0::1]:1")):
        with pytest.raises(ValueError, match="given twice"):
            pool_of(first, second)


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("ipc:///tmp/events", "write tcp://host:port"),
        ("tcp://*:5557", "tcp://*:5557 is given twice"),
    ],
)
def test_event_sources_that_cannot_be_are_errors(address: str, says: str) -> None:
    """Two pods that connect to one address, say: nobody could tell whose events are whose."""
    events = [EventSource(address=address)]
    pool = Pool("test")
    with pytest.raises(ValueError, match=re.escape(says)):
        pool.update(
            [EndpointSpec(address=f"10.0.0.{number}:8000", events=events) for number in (1, 2)]
        )
    assert not pool.endpoints


def test_an_endpoint_whose_events_come_from_elsewhere_is_another() -> None:
    pool, recorder = Pool("test"), Recorder()
    pool.listen(recorder)
    for port in (5557, 5557, 6557):
        events = [EventSource(address=f"tcp://10.0.0.1:{port}")]
        pool.update([EndpointSpec(address="10.0.0.1:8000", events=events)])
    assert [what for what, _ in recorder.heard] == ["added", "removed", "added"]
    endpoint = pool.restarted(pool.endpoints["10.0.0.1:8000"])
    assert list(endpoint.events) == events


def test_too_many_endpoints_are_an_error() -> None:
    addresses = [f"10.0.{i // 250}.{i % 250}:80" for i in range(MAX_ENDPOINTS + 1)]
    assert len(pool_of(*addresses[:-1]).slots) == MAX_ENDPOINTS
    with pytest.raises(ValueError, match="4096 are the most"):
        pool_of(*addresses)


def test_an_update_with_an_error_changes_nothing() -> None:
    pool, recorder = pool_of("10.0.0.1:1"), Recorder()
    pool.listen(recorder)
    with pytest.raises(ValueError, match="a name"):
        pool.update(specs("10.0.0.2:1", "pod:1"))
    assert list(pool.endpoints) == ["10.0.0.1:1"]
    assert recorder.heard == [("added", "10.0.0.1:1")]


def test_listeners_hear_of_those_present_and_of_changes() -> None:
    pool, recorder = pool_of("10.0.0.1:1", "10.0.0.2:1"), Recorder()
    pool.listen(recorder)
    pool.update(specs("10.0.0.2:1", "10.0.0.3:1"))
    pool.update(specs("10.0.0.2:1", "10.0.0.3:1"))
    assert recorder.heard == [
        ("added", "10.0.0.1:1"),
        ("added", "10.0.0.2:1"),
        ("removed", "10.0.0.1:1"),
        ("added", "10.0.0.3:1"),
    ]


def test_an_endpoint_that_stays_keeps_its_identity_and_takes_new_labels() -> None:
    pool = pool_of("10.0.0.1:1", "10.0.0.2:1")
    first, slot = pool.endpoints["10.0.0.2:1"], pool.endpoints["10.0.0.2:1"].slot
    revision = pool.revision
    pool.update(specs("10.0.0.2:1", role="decode"))
    assert pool.endpoints["10.0.0.2:1"] is first
    assert (first.slot, first.alive, dict(first.labels)) == (slot, True, {"role": "decode"})
    assert pool.revision > revision


def test_an_address_that_comes_back_is_another_endpoint() -> None:
    pool = pool_of("10.0.0.1:1")
    old = pool.endpoints["10.0.0.1:1"]
    pool.update([])
    pool.update(specs("10.0.0.1:1"))
    new = pool.endpoints["10.0.0.1:1"]
    assert new is not old
    assert new != old
    assert (old.alive, new.alive, new.slot) == (False, True, old.slot)


def test_slots_of_removed_endpoints_are_used_again_before_columns_grow() -> None:
    pool = pool_of(*(f"10.0.0.{i}:1" for i in range(FIRST_CAPACITY)))
    assert pool.capacity == FIRST_CAPACITY
    pool.update(specs(*(f"10.0.0.{i}:1" for i in range(1, FIRST_CAPACITY)), "10.0.1.1:1"))
    assert pool.endpoints["10.0.1.1:1"].slot == 0
    assert pool.capacity == FIRST_CAPACITY
    pool.update(specs(*(f"10.0.0.{i}:1" for i in range(FIRST_CAPACITY + 1))))
    assert pool.capacity == 2 * FIRST_CAPACITY


def test_slots_cannot_be_changed_by_those_who_read_them() -> None:
    with pytest.raises(ValueError, match="read-only"):
        pool_of("10.0.0.1:1").slots[0] = 5


SUBSET_POOL = (
    "10.0.0.1:8000",
    "10.0.0.1:8001",
    "10.0.0.2:8000",
    "[2001:db8::1]:8000",
    "[2001:db8::1]:8001",
)


@pytest.mark.parametrize(
    ("subset", "named"),
    [
        ((), ()),
        (("", " "), ()),
        (("10.0.0.1:8001",), ("10.0.0.1:8001",)),
        ((" 10.0.0.1:8001\t",), ("10.0.0.1:8001",)),
        (("10.0.0.1:9999",), ()),
        (("10.0.0.1",), ("10.0.0.1:8000", "10.0.0.1:8001")),
        (("10.0.0.2:8000", "10.0.0.1:8000"), ("10.0.0.1:8000", "10.0.0.2:8000")),
        (("10.0.0.2", "10.0.0.2:8000", "10.0.0.2:8000"), ("10.0.0.2:8000",)),
        (("10.0.0.3:8000", "pod:8000", "::", "[", "[]", "]:1", "\0"), ()),
        (("[2001:db8::1]:8001",), ("[2001:db8::1]:8001",)),
        (("[2001:0db8::0:1]:8001",), ("[2001:db8::1]:8001",)),
        (("2001:db8::1",), ("[2001:db8::1]:8000", "[2001:db8::1]:8001")),
        (("[2001:DB8::1]",), ("[2001:db8::1]:8000", "[2001:db8::1]:8001")),
        (("10.0.0.10",), ()),
    ],
)
def test_subsets(subset: tuple[str, ...], named: tuple[str, ...]) -> None:
    pool = pool_of(*SUBSET_POOL)
    assert among(pool, *subset) == list(named)
    assert pool.among(subset).dtype == pool.slots.dtype


def test_a_subset_does_not_name_endpoints_that_are_gone() -> None:
    pool = pool_of(*SUBSET_POOL)
    pool.update(specs("10.0.0.1:8001"))
    assert among(pool, "10.0.0.1", "10.0.0.2") == ["10.0.0.1:8001"]


ADDRESSES = st.sampled_from([f"10.0.0.{i}:8000" for i in range(40)])


class PoolMachine(RuleBasedStateMachine):
    """Any updates: slots and listeners agree with the endpoints."""

    @initialize()
    def begin(self) -> None:
        self.pool, self.recorder = Pool("test"), Recorder()
        self.pool.listen(self.recorder)

    @rule(addresses=st.sets(ADDRESSES))
    def update(self, addresses: set[str]) -> None:
        before = dict(self.pool.endpoints)
        self.pool.update(specs(*sorted(addresses)))
        assert set(self.pool.endpoints) == addresses
        for address, endpoint in before.items():
            assert endpoint.alive == (address in addresses)
            if endpoint.alive:
                assert self.pool.endpoints[address] is endpoint

    @precondition(lambda self: self.pool.endpoints)
    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        address = data.draw(st.sampled_from(sorted(self.pool.endpoints)))
        before, revision = dict(self.pool.endpoints), self.pool.revision
        new = self.pool.restarted(before[address])
        assert self.pool.endpoints == before | {address: new}
        assert new is not before[address]
        assert (new.alive, before[address].alive) == (True, False)
        assert (new.address, new.port, new.labels) == (
            address,
            before[address].port,
            before[address].labels,
        )
        assert self.pool.among([address]).tolist() == [new.slot]
        assert self.pool.revision > revision

    @invariant()
    def slots_and_listeners_agree(self) -> None:
        owned = {endpoint.slot: endpoint for endpoint in self.pool.endpoints.values()}
        assert len(owned) == len(self.pool.endpoints)
        assert self.pool.slots.tolist() == sorted(owned)
        assert owned == self.recorder.slots
        assert all(slot < self.pool.capacity for slot in owned)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)
