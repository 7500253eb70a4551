"""The endpoints of a pool: who is in it now, and which row each has in every column."""

from __future__ import annotations

import heapq
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from picker.config import EndpointSpec, EventSource
from picker.prefix.addresses import written

MAX_ENDPOINTS = 4096
MAX_ADDRESS = 64  # characters; an IPv6 address with its port has at most 53
NO_ENDPOINT = "the pool has no endpoint"
FIRST_CAPACITY = 16  # slots; doubled whenever more are needed


@dataclass(slots=True, eq=False)
class Endpoint:
    """One life of one model server. The same address added again is another endpoint."""

    address: str  # "ip:port", IPv6 in brackets: as the endpoint picker protocol writes it
    host: str  # without brackets
    port: int
    labels: Mapping[str, str]  # replaced, never changed, when an update brings others
    slot: int  # its row in every column, while it is alive
    events: Sequence[EventSource] = ()  # as the file says it
    name: str = ""  # for people, replaced like labels; the address, where it has none
    incarnation: str = ""  # of who is there, such as a pod's uid
    alive: bool = True


class Listener(Protocol):
    """Keeps something for each endpoint."""

    def added(self, endpoint: Endpoint) -> None:
        """`endpoint.slot` is below the pool's capacity, which may have grown."""

    def removed(self, endpoint: Endpoint) -> None:
        """The endpoint is no longer alive; its slot may have another owner from now on."""


class Pool:
    """The model servers that requests are spread over.

    Slots are small, and those of removed endpoints are used again, smallest first, so that
    columns stay short and dense.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.endpoints: dict[str, Endpoint] = {}
        self.capacity = FIRST_CAPACITY  # the length of a column
        self.slots: NDArray[np.intp] = _frozen([])  # in use, ascending; replaced by an update
        self.revision = 0  # grows with each update that changed something
        self.why_empty = NO_ENDPOINT  # as long as it is
        self._listeners: list[Listener] = []
        self._free: list[int] = list(range(self.capacity))  # a heap
        self._by_host: dict[str, list[int]] = {}
        self._wanted: dict[str, _Wanted] = {}  # by the last update

    def listen(self, listener: Listener) -> None:
        """Tell a listener of all endpoints that are in the pool, and of every change."""
        self._listeners.append(listener)
        for endpoint in self.endpoints.values():
            listener.added(endpoint)

    def update(self, specs: Sequence[EndpointSpec]) -> None:
        """Make these the endpoints: others are removed, new ones added, the rest kept.

        New labels of an endpoint that stays are taken over, and its state is kept. One of another
        incarnation, or whose events come from elsewhere than before, is another.

        Raises:
            ValueError: an address that is no `ip:port`, one given twice, event sources that cannot
                be, or too many endpoints; nothing has changed then.
        """
        before, wanted = self._wanted, _by_address(specs, self._wanted)
        self._wanted = wanted
        gone = [
            endpoint
            for endpoint in self.endpoints.values()
            if (new_one := wanted.get(endpoint.address)) is None
            or new_one.events != endpoint.events
            or new_one.incarnation != endpoint.incarnation
        ]
        for endpoint in gone:
            del self.endpoints[endpoint.address]
            endpoint.alive = False
            heapq.heappush(self._free, endpoint.slot)
        new, changed = [], bool(gone)
        for address, one in wanted.items():
            known = self.endpoints.get(address)
            if known is None:
                endpoint = Endpoint(
                    address,
                    one.host,
                    one.port,
                    one.labels,
                    self._take_slot(),
                    one.events,
                    one.name,
                    one.incarnation,
                )
                self.endpoints[address] = endpoint
                new.append(endpoint)
            elif before.get(address) is not one and (known.labels, known.name) != one.shown:
                known.labels, known.name = one.shown
                changed = True
        if changed or new:
            self._tell(gone, new)

    def restarted(self, endpoint: Endpoint) -> Endpoint:
        """The model server at an address is another than before: so is its endpoint, returned.

        Whatever is kept for the old one, which must be alive, is forgotten.
        """
        endpoint.alive = False
        heapq.heappush(self._free, endpoint.slot)
        new = replace(endpoint, slot=self._take_slot(), alive=True)
        self.endpoints[new.address] = new
        self._tell([endpoint], [new])
        return new

    def _tell(self, gone: Sequence[Endpoint], new: Sequence[Endpoint]) -> None:
        """Something has changed, and everybody hears of it."""
        self.slots = _frozen(sorted(endpoint.slot for endpoint in self.endpoints.values()))
        self._by_host = {}
        for endpoint in self.endpoints.values():
            self._by_host.setdefault(endpoint.host, []).append(endpoint.slot)
        self.revision += 1
        for listener in self._listeners:
            for endpoint in gone:
                listener.removed(endpoint)
            for endpoint in new:
                listener.added(endpoint)

    def among(self, subset: Sequence[str]) -> NDArray[np.intp]:
        """Slots of the endpoints that a subset names, ascending.

        An entry is `ip:port`, or an IP alone for all its ports; IPv6 with a port is in brackets.
        Blanks around it are ignored, and so is an entry that names no endpoint of the pool.
        """
        found: list[int] = []
        for entry in subset:
            endpoint = self.endpoints.get(entry)
            if endpoint is not None:
                found.append(endpoint.slot)
            else:
                found.extend(self._named_otherwise(entry.strip()))
        named = np.zeros(self.capacity, np.bool_)
        named[found] = True
        return np.flatnonzero(named)

    def _named_otherwise(self, entry: str) -> Sequence[int]:
        """Slots that an entry names by its IP alone, or IPv6 not spelled as we spell it."""
        if ":" in entry and len(entry) <= MAX_ADDRESS and entry not in self._by_host:
            entry = _our_spelling(entry)
        endpoint = self.endpoints.get(entry)
        return self._by_host.get(entry, ()) if endpoint is None else (endpoint.slot,)

    def _take_slot(self) -> int:
        if not self._free:
            self._free = list(range(self.capacity, 2 * self.capacity))
            self.capacity *= 2
        return heapq.heappop(self._free)


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of `ip:port`, the host without brackets in its shortest form.

    `localhost` is 127.0.0.1. Other names are errors: the protocol between gateway and endpoint
    picker knows pods by IP.

    Raises:
        ValueError: it says what is wrong with the address.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host:
        raise ValueError(f"endpoint address {address!r} has no port: write ip:port")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
        raise ValueError(f"endpoint address {address!r}: the port must be 1 to 65535")
    if host == "localhost":
        return "127.0.0.1", int(port)
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        ip = ipaddress.IPv6Address(host[1:-1]) if bracketed else ipaddress.IPv4Address(host)
    except ValueError:
        raise ValueError(_why_no_ip(address, host)) from None
    if ip.is_unspecified or ip.is_multicast or "%" in host:
        raise ValueError(f"endpoint address {address!r}: {host} is not the address of one pod")
    return str(ip), int(port)


def _why_no_ip(address: str, host: str) -> str:
    if ":" in host:
        return f"endpoint address {address!r} is no IPv6 address in brackets: write [ip]:port"
    if host.replace(".", "").isdigit():
        return f"endpoint address {address!r} is no IPv4 address and port: write ip:port"
    return (
        f"endpoint address {address!r}: {host!r} is a name; give the pod's IP, because gateways "
        "know pods by IP (only localhost is understood)"
    )


@lru_cache(maxsize=MAX_ENDPOINTS)  # a gateway names the same ones again and again
def _our_spelling(entry: str) -> str:
    """An IP, or an IP and a port, as they are kept; what is neither stays as it is."""
    bare = entry[1:-1] if entry.startswith("[") and entry.endswith("]") else entry
    try:
        return str(ipaddress.IPv6Address(bare))
    except ValueError:
        pass
    try:
        return _join(*parse_address(entry))
    except ValueError:
        return entry


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _Wanted(NamedTuple):
    spec: EndpointSpec
    host: str
    port: int
    labels: Mapping[str, str]
    events: Sequence[EventSource]
    name: str
    incarnation: str

    @property
    def shown(self) -> tuple[Mapping[str, str], str]:
        """What may change of an endpoint that stays."""
        return self.labels, self.name


def _by_address(specs: Sequence[EndpointSpec], before: Mapping[str, _Wanted]) -> dict[str, _Wanted]:
    """What a configuration wants at each address, checked; those it wanted before need no check."""
    if len(specs) > MAX_ENDPOINTS:
        raise ValueError(f"{len(specs)} endpoints in one pool: {MAX_ENDPOINTS} are the most")
    wanted: dict[str, _Wanted] = {}
    publishers: set[str] = set()
    for spec in specs:
        address, one = spec.address, before.get(spec.address)
        if one is None or one.spec is not spec:
            host, port = parse_address(spec.address)
            address, labels, events = _join(host, port), dict(spec.labels), tuple(spec.events)
            name = spec.name or address
            one = _Wanted(spec, host, port, labels, events, name, spec.incarnation)
        if address in wanted:
            raise ValueError(f"endpoint {address} is given twice")
        for source in one.events:
            if (publisher := written(source).live) in publishers:
                raise ValueError(f"event address {publisher} is given twice")
            publishers.add(publisher)
        wanted[address] = one
    return wanted


def _frozen(slots: list[int]) -> NDArray[np.intp]:
    array = np.array(slots, np.intp)
    array.flags.writeable = False
    return array
