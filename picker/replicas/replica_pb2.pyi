from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Hello(_message.Message):
    __slots__ = ("replica", "pool")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    replica: int
    pool: str
    def __init__(self, replica: _Optional[int] = ..., pool: _Optional[str] = ...) -> None: ...

class Update(_message.Message):
    __slots__ = ("replica", "number", "begin", "complete", "loads", "learned", "expected", "services", "sessions", "entries")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    LEARNED_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    SERVICES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    replica: int
    number: int
    begin: Begin
    complete: bool
    loads: _containers.RepeatedCompositeFieldContainer[Load]
    learned: _containers.RepeatedCompositeFieldContainer[Learned]
    expected: _containers.RepeatedCompositeFieldContainer[Learned]
    services: _containers.RepeatedCompositeFieldContainer[Service]
    sessions: _containers.RepeatedCompositeFieldContainer[Session]
    entries: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, replica: _Optional[int] = ..., number: _Optional[int] = ..., begin: _Optional[_Union[Begin, _Mapping]] = ..., complete: _Optional[bool] = ..., loads: _Optional[_Iterable[_Union[Load, _Mapping]]] = ..., learned: _Optional[_Iterable[_Union[Learned, _Mapping]]] = ..., expected: _Optional[_Iterable[_Union[Learned, _Mapping]]] = ..., services: _Optional[_Iterable[_Union[Service, _Mapping]]] = ..., sessions: _Optional[_Iterable[_Union[Session, _Mapping]]] = ..., entries: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("running",)
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    running: float
    def __init__(self, running: _Optional[float] = ...) -> None: ...

class Pod(_message.Message):
    __slots__ = ("address", "incarnation")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    address: str
    incarnation: str
    def __init__(self, address: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("pod", "requests", "tokens", "sent", "waiting", "age")
    POD_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    pod: Pod
    requests: int
    tokens: int
    sent: int
    waiting: int
    age: float
    def __init__(self, pod: _Optional[_Union[Pod, _Mapping]] = ..., requests: _Optional[int] = ..., tokens: _Optional[int] = ..., sent: _Optional[int] = ..., waiting: _Optional[int] = ..., age: _Optional[float] = ...) -> None: ...

class Learned(_message.Message):
    __slots__ = ("naming", "pod", "chains", "tails")
    NAMING_FIELD_NUMBER: _ClassVar[int]
    POD_FIELD_NUMBER: _ClassVar[int]
    CHAINS_FIELD_NUMBER: _ClassVar[int]
    TAILS_FIELD_NUMBER: _ClassVar[int]
    naming: int
    pod: Pod
    chains: _containers.RepeatedScalarFieldContainer[bytes]
    tails: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, naming: _Optional[int] = ..., pod: _Optional[_Union[Pod, _Mapping]] = ..., chains: _Optional[_Iterable[bytes]] = ..., tails: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Service(_message.Message):
    __slots__ = ("priority", "tenant", "life", "service", "requests", "value")
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LIFE_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    priority: int
    tenant: str
    life: int
    service: float
    requests: int
    value: float
    def __init__(self, priority: _Optional[int] = ..., tenant: _Optional[str] = ..., life: _Optional[int] = ..., service: _Optional[float] = ..., requests: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...

class Session(_message.Message):
    __slots__ = ("key", "pod", "version", "replica", "age")
    KEY_FIELD_NUMBER: _ClassVar[int]
    POD_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    pod: Pod
    version: int
    replica: int
    age: float
    def __init__(self, key: _Optional[bytes] = ..., pod: _Optional[_Union[Pod, _Mapping]] = ..., version: _Optional[int] = ..., replica: _Optional[int] = ..., age: _Optional[float] = ...) -> None: ...
