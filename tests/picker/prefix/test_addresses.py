"""Where pods publish: written in a file, told by a pod, or neither."""

from __future__ import annotations

import json

import pytest

from picker.config import Events, EventSource
from picker.prefix.addresses import MAX_RANKS, Address, told, usual, written

HOST = "10.0.0.7"


@pytest.mark.parametrize(
    ("source", "address"),
    [
        (
            EventSource(address="tcp://10.0.0.7:5557", replay="tcp://10.0.0.7:5558"),
            Address("tcp://10.0.0.7:5557", "tcp://10.0.0.7:5558"),
        ),
        (EventSource(address="tcp://pod-0.pods:5557"), Address("tcp://pod-0.pods:5557", "")),
        (EventSource(address="tcp://[fd00::7]:5557"), Address("tcp://[fd00::7]:5557", "")),
        (EventSource(address="tcp://*:5557"), Address("tcp://*:5557", "", bound=True)),
        (EventSource(address="tcp://0.0.0.0:5557"), Address("tcp://0.0.0.0:5557", "", bound=True)),
        (
            EventSource(address="tcp://[::]:5557", replay="tcp://10.0.0.7:5558"),
            Address("tcp://[::]:5557", "tcp://10.0.0.7:5558", bound=True),
        ),
    ],
)
def test_addresses_in_the_file(source: EventSource, address: Address) -> None:
    assert written(source) == address


@pytest.mark.parametrize(
    ("live", "replay", "why"),
    [
        ("ipc:///tmp/events", "", "write tcp://host:port"),
        ("inproc://events", "", "write tcp://host:port"),
        ("10.0.0.7:5557", "", "write tcp://host:port"),
        ("tcp://10.0.0.7", "", "write tcp://host:port"),
        ("tcp://10.0.0.7:0", "", "write tcp://host:port"),
        ("tcp://10.0.0.7:65536", "", "write tcp://host:port"),
        ("tcp://10.0.0.7:*", "", "write tcp://host:port"),
        ("tcp://eth0;10.0.0.7:5557", "", "write tcp://host:port"),
        ("tcp://10.0.0.7:5557\n", "", "write tcp://host:port"),
        ("tcp://10.0.0.7:5557", "udp://10.0.0.7:5558", "write tcp://host:port"),
        ("tcp://*:5557", "tcp://*:5558", "must name the pod's host"),
    ],
)
def test_other_addresses_are_errors(live: str, replay: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        written(EventSource(address=live, replay=replay))


def answer(*ranks: tuple[str, str | None]) -> bytes:
    found = {
        str(rank): {"endpoint": live, "replay_endpoint": replay, "topic": ""}
        for rank, (live, replay) in enumerate(ranks)
    }
    return json.dumps(found).encode()


@pytest.mark.parametrize(
    "here", ["*", "0.0.0.0", "[::]", "127.0.0.1", "localhost", "[::1]", "127.0.1.1"]
)
def test_where_a_pod_listens_is_its_own_host_to_us(here: str) -> None:
    live, replay = f"tcp://{here}:5557", f"tcp://{here}:5558"
    assert told(answer((live, replay)), HOST) == [
        Address("tcp://10.0.0.7:5557", "tcp://10.0.0.7:5558")
    ]
    assert told(answer((live, None)), "fd00::7") == [Address("tcp://[fd00::7]:5557", "")]


def test_each_rank_has_an_address() -> None:
    assert told(answer(("tcp://*:5557", None), ("tcp://10.0.0.8:5558", "")), HOST) == [
        Address("tcp://10.0.0.7:5557", ""),
        Address("tcp://10.0.0.8:5558", ""),
    ]
    assert told(b"{}", HOST) == []


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"<html>",
        b"[]",
        b'"tcp://*:5557"',
        b'{"0": "tcp://*:5557"}',
        b'{"0": {"endpoint": 5557}}',
        b'{"0": {"endpoint": "\xff"}}',
        b"[" * 100_000,
        answer(("ipc:///tmp/events", None)),
        answer(*[("tcp://*:5557", None)] * (MAX_RANKS + 1)),
    ],
)
def test_what_is_not_understood_says_nothing(wrong: bytes) -> None:
    assert told(wrong, HOST) is None


def test_the_usual_ports() -> None:
    assert usual(HOST, Events()) == Address("tcp://10.0.0.7:5557", "tcp://10.0.0.7:5558")
    assert usual("fd00::7", Events(port=1, replay_port=0)) == Address("tcp://[fd00::7]:1", "")
