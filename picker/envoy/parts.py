"""The few pieces of Envoy's configuration that everything else is made of."""

from __future__ import annotations

from datetime import timedelta
from typing import Any as Json
from typing import cast

from betterproto2 import Casing, Message
from envoy_data_plane.envoy.config.core.v3 import (
    Address,
    HeaderValue,
    HeaderValueOption,
    HeaderValueOptionHeaderAppendAction,
    SocketAddress,
    TypedExtensionConfig,
)
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter
from envoy_data_plane.envoy.type.matcher.v3 import ListStringMatcher, StringMatcher
from envoy_data_plane.google.protobuf import Any

from picker.config import Config

RETRYABLE = "connect-failure,refused-stream,reset"  # nothing was answered yet
PICK_SECONDS = 5.0  # the picker answers at once, or hangs
WAIT_SECONDS = 3600.0  # in its queue, where that has no limit
NO_LIMIT = 1 << 30  # of circuit breakers: the picker and the pods know better


def socket(host: str, port: int) -> Address:
    """A TCP address, such as ("::1", 8001); brackets around IPv6 are taken off."""
    return Address(socket_address=SocketAddress(address=host.strip("[]"), port_value=port))


def as_dict(message: Message) -> dict[str, Json]:
    """A message as JSON, its fields named as in Envoy's reference."""
    # betterproto's own casings write `5_xx`, which Envoy does not know; `str` changes no name.
    return message.to_dict(casing=cast(Casing, str))


def extension(name: str, config: Message) -> TypedExtensionConfig:
    return TypedExtensionConfig(name=name, typed_config=Any.pack(config))


def pick_timeout(config: Config) -> timedelta:
    """After which the picker is taken to hang: its queue may hold a request before it answers."""
    flow = config.flow
    return timedelta(seconds=PICK_SECONDS + ((flow.ttl or WAIT_SECONDS) if flow.enabled else 0.0))


def http_filter(name: str, config: Message) -> HttpFilter:
    return HttpFilter(name=name, typed_config=Any.pack(config))


def set_header(name: str, value: str) -> HeaderValueOption:
    """Replaces whatever the header was; an empty value sets nothing."""
    return HeaderValueOption(
        header=HeaderValue(key=name, value=value),
        append_action=HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
    )


def names(*exact: str, prefixes: tuple[str, ...] = ()) -> ListStringMatcher:
    """Matches headers by their lower-case names."""
    patterns = [StringMatcher(exact=name) for name in exact]
    patterns += [StringMatcher(prefix=prefix) for prefix in prefixes]
    return ListStringMatcher(patterns=patterns)
