"""Sessions remember where they live, for a while, in bounded memory."""

from __future__ import annotations

from picker import config
from picker.config import Duration, EndpointSpec
from picker.pool import Endpoint, Pool
from picker.sessions import Sessions


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def pool(*addresses: str) -> Pool:
    made = Pool("test")
    made.update([EndpointSpec(address=address) for address in addresses])
    return made


def two() -> tuple[Pool, Endpoint, Endpoint]:
    made = pool("127.0.0.1:1", "127.0.0.1:2")
    return made, made.endpoints["127.0.0.1:1"], made.endpoints["127.0.0.1:2"]


def of(session: str) -> dict[str, str]:
    return {"x-session-id": session}


SETTINGS = config.Sessions(ttl=Duration(10.0))


def test_a_session_is_found_where_it_was_last_kept():
    _, first, second = two()
    sessions = Sessions(SETTINGS)
    assert sessions.find(sessions.key(of("a"))) is None
    sessions.keep(sessions.key(of("a")), first)
    sessions.keep(sessions.key(of("b")), second)
    assert sessions.find(sessions.key(of("a"))) is first
    sessions.keep(sessions.key(of("a")), second)
    assert sessions.find(sessions.key(of("a"))) is second


def test_requests_without_the_header_share_nothing():
    _, first, _ = two()
    sessions = Sessions(SETTINGS)
    sessions.keep(sessions.key({}), first)
    sessions.keep(sessions.key(of("")), first)
    assert sessions.find(sessions.key({})) is None
    assert sessions.find(sessions.key(of(""))) is None
    assert len(sessions) == 0


def test_the_header_is_configured_in_any_case():
    _, first, _ = two()
    sessions = Sessions(config.Sessions(header="X-Chat"))
    sessions.keep(sessions.key({"x-chat": "a"}), first)
    assert sessions.find(sessions.key({"x-chat": "a"})) is first


def test_a_session_ends_a_while_after_its_last_use():
    _, first, _ = two()
    clock = Clock()
    sessions = Sessions(SETTINGS, clock=clock)
    sessions.keep(sessions.key(of("a")), first)
    clock.now += 9
    sessions.keep(sessions.key(of("a")), first)
    clock.now += 9
    assert sessions.find(sessions.key(of("a"))) is first
    clock.now += 1
    assert sessions.find(sessions.key(of("a"))) is None


def test_ended_sessions_leave_the_memory_though_nobody_asks_for_them():
    _, first, _ = two()
    clock = Clock()
    sessions = Sessions(SETTINGS, clock=clock)
    for number in range(5):
        sessions.keep(sessions.key(of(str(number))), first)
    clock.now += 11
    sessions.keep(sessions.key(of("new")), first)
    assert len(sessions) == 1


def test_the_longest_unused_is_forgotten_when_there_are_too_many():
    _, first, _ = two()
    sessions = Sessions(SETTINGS, most=2)
    for session in ("a", "b", "a", "c"):
        sessions.keep(sessions.key(of(session)), first)
    assert len(sessions) == 2
    assert sessions.find(sessions.key(of("b"))) is None
    assert sessions.find(sessions.key(of("a"))) is first


def test_a_removed_endpoint_is_no_home_even_if_its_address_returns():
    endpoints, first, _ = two()
    sessions = Sessions(SETTINGS)
    sessions.keep(sessions.key(of("a")), first)
    endpoints.update([EndpointSpec(address="127.0.0.1:2")])
    assert sessions.find(sessions.key(of("a"))) is None
    endpoints.update([EndpointSpec(address="127.0.0.1:1"), EndpointSpec(address="127.0.0.1:2")])
    assert sessions.find(sessions.key(of("a"))) is None


def test_ids_of_any_length_and_bytes_are_apart():
    _, first, second = two()
    sessions = Sessions(SETTINGS)
    long = "x" * 60_000
    sessions.keep(sessions.key(of(long)), first)
    sessions.keep(sessions.key(of(long + "y")), second)
    sessions.keep(sessions.key(of("\udcff")), second)
    assert sessions.find(sessions.key(of(long))) is first
    assert sessions.find(sessions.key(of("\udcff"))) is second


def test_switched_off_it_remembers_nothing():
    _, first, _ = two()
    sessions = Sessions(SETTINGS, enabled=False)
    sessions.keep(sessions.key(of("a")), first)
    assert sessions.find(sessions.key(of("a"))) is None
    assert len(sessions) == 0
