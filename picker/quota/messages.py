"""Between what the rest of the program knows and the messages of proto/admin.proto.

A message and the type that it stands for have fields of the same names, and that is all that is
needed to turn one into the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgspec
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

M = TypeVar("M", bound=Message)
T = TypeVar("T")


def put(message: M, value: object) -> M:
    """Fill a message from the attributes of the same names; what is None stays unset."""
    for field in message.DESCRIPTOR.fields:
        given = getattr(value, field.name)
        if given is None:
            continue
        held = getattr(message, field.name)
        if field.message_type is None:
            if field.is_repeated:
                held.extend(given)
            else:
                setattr(message, field.name, given)
        elif _is_map(field):
            for key, each in given.items():
                put(held[key], each)
        elif field.is_repeated:
            for each in given:
                put(held.add(), each)
        else:
            held.SetInParent()
            put(held, given)
    return message


def take(message: Message, kind: type[T]) -> T:
    """What a message stands for. Fields that the message does not have keep their defaults."""
    hints = _hints(cast(Any, kind))
    given = {}
    for field in message.DESCRIPTOR.fields:
        if field.name in hints:
            given[field.name] = _value(message, field, hints[field.name])
    return kind(**given)


def _value(message: Message, field: FieldDescriptor, hint: Any) -> Any:
    if field.has_presence and not message.HasField(field.name):
        return None
    value = getattr(message, field.name)
    kinds = [each for each in _parts(hint) if each is not NoneType]
    if _is_map(field):
        return {key: take(each, get_args(kinds[0])[1]) for key, each in value.items()}
    if field.is_repeated:
        item = get_args(kinds[0])[0]
        whole = value if field.message_type is None else (take(each, item) for each in value)
        return tuple(whole) if get_origin(kinds[0]) is tuple else list(whole)
    return value if field.message_type is None else take(value, kinds[0])


def _parts(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (UnionType, Union) else (hint,)


def _is_map(field: FieldDescriptor) -> bool:
    kind = field.message_type
    return kind is not None and bool(kind.GetOptions().map_entry)


@cache
def _hints(kind: Any) -> Mapping[str, Any]:
    """The types of a type's fields."""
    hints = get_type_hints(kind)
    if issubclass(kind, msgspec.Struct):
        names = set(kind.__struct_fields__)
    elif is_dataclass(kind):
        names = {field.name for field in fields(kind)}
    else:
        names = set(getattr(kind, "_fields", ()))  # of a NamedTuple
    return {name: hints[name] for name in names}
