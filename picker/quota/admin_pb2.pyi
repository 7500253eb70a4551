from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Limit(_message.Message):
    __slots__ = ("what", "amount", "window", "model", "zone", "shadow", "on_failure")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    AMOUNT_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    ON_FAILURE_FIELD_NUMBER: _ClassVar[int]
    what: str
    amount: int
    window: str
    model: str
    zone: str
    shadow: bool
    on_failure: str
    def __init__(self, what: _Optional[str] = ..., amount: _Optional[int] = ..., window: _Optional[str] = ..., model: _Optional[str] = ..., zone: _Optional[str] = ..., shadow: _Optional[bool] = ..., on_failure: _Optional[str] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("id", "limit", "amount", "expires", "model", "reason")
    ID_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    AMOUNT_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    id: str
    limit: str
    amount: int
    expires: float
    model: str
    reason: str
    def __init__(self, id: _Optional[str] = ..., limit: _Optional[str] = ..., amount: _Optional[int] = ..., expires: _Optional[float] = ..., model: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Key(_message.Message):
    __slots__ = ("digest", "hint", "created")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    digest: str
    hint: str
    created: float
    def __init__(self, digest: _Optional[str] = ..., hint: _Optional[str] = ..., created: _Optional[float] = ...) -> None: ...

class Subject(_message.Message):
    __slots__ = ("parent", "limits", "grants", "blocked", "expires", "key")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    BLOCKED_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    parent: str
    limits: _containers.RepeatedCompositeFieldContainer[Limit]
    grants: _containers.RepeatedCompositeFieldContainer[Grant]
    blocked: str
    expires: float
    key: Key
    def __init__(self, parent: _Optional[str] = ..., limits: _Optional[_Iterable[_Union[Limit, _Mapping]]] = ..., grants: _Optional[_Iterable[_Union[Grant, _Mapping]]] = ..., blocked: _Optional[str] = ..., expires: _Optional[float] = ..., key: _Optional[_Union[Key, _Mapping]] = ...) -> None: ...

class Record(_message.Message):
    __slots__ = ("revision", "subject")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    revision: int
    subject: Subject
    def __init__(self, revision: _Optional[int] = ..., subject: _Optional[_Union[Subject, _Mapping]] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Policy(_message.Message):
    __slots__ = ("version", "records", "on_failure")
    class RecordsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Record
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Record, _Mapping]] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    ON_FAILURE_FIELD_NUMBER: _ClassVar[int]
    version: str
    records: _containers.MessageMap[str, Record]
    on_failure: str
    def __init__(self, version: _Optional[str] = ..., records: _Optional[_Mapping[str, Record]] = ..., on_failure: _Optional[str] = ...) -> None: ...

class Why(_message.Message):
    __slots__ = ("reason", "request_id", "if_revision", "dry_run")
    REASON_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    IF_REVISION_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    reason: str
    request_id: str
    if_revision: int
    dry_run: bool
    def __init__(self, reason: _Optional[str] = ..., request_id: _Optional[str] = ..., if_revision: _Optional[int] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class Written(_message.Message):
    __slots__ = ("name", "revision", "before", "after")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    name: str
    revision: int
    before: Subject
    after: Subject
    def __init__(self, name: _Optional[str] = ..., revision: _Optional[int] = ..., before: _Optional[_Union[Subject, _Mapping]] = ..., after: _Optional[_Union[Subject, _Mapping]] = ...) -> None: ...

class SetRequest(_message.Message):
    __slots__ = ("name", "limits", "parent", "why", "keep")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    name: str
    limits: _containers.RepeatedCompositeFieldContainer[Limit]
    parent: str
    why: Why
    keep: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., limits: _Optional[_Iterable[_Union[Limit, _Mapping]]] = ..., parent: _Optional[str] = ..., why: _Optional[_Union[Why, _Mapping]] = ..., keep: _Optional[_Iterable[str]] = ...) -> None: ...

class UnsetRequest(_message.Message):
    __slots__ = ("name", "limits", "whole", "model", "why")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    name: str
    limits: _containers.RepeatedScalarFieldContainer[str]
    whole: bool
    model: str
    why: Why
    def __init__(self, name: _Optional[str] = ..., limits: _Optional[_Iterable[str]] = ..., whole: _Optional[bool] = ..., model: _Optional[str] = ..., why: _Optional[_Union[Why, _Mapping]] = ...) -> None: ...

class BlockRequest(_message.Message):
    __slots__ = ("name", "reason", "why")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    name: str
    reason: str
    why: Why
    def __init__(self, name: _Optional[str] = ..., reason: _Optional[str] = ..., why: _Optional[_Union[Why, _Mapping]] = ...) -> None: ...

class UnblockRequest(_message.Message):
    __slots__ = ("name", "why")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    name: str
    why: Why
    def __init__(self, name: _Optional[str] = ..., why: _Optional[_Union[Why, _Mapping]] = ...) -> None: ...

class ExpireRequest(_message.Message):
    __slots__ = ("name", "at", "why")
    NAME_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    name: str
    at: float
    why: Why
    def __init__(self, name: _Optional[str] = ..., at: _Optional[float] = ..., why: _Optional[_Union[Why, _Mapping]] = ...) -> None: ...

class GrantRequest(_message.Message):
    __slots__ = ("name", "grant", "why")
    NAME_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    name: str
    grant: Grant
    why: Why
    def __init__(self, name: _Optional[str] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., why: _Optional[_Union[Why, _Mapping]] = ...) -> None: ...

class RevokeGrantRequest(_message.Message):
    __slots__ = ("name", "id", "why")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    name: str
    id: str
    why: Why
    def __init__(self, name: _Optional[str] = ..., id: _Optional[str] = ..., why: _Optional[_Union[Why, _Mapping]] = ...) -> None: ...

class CreateKeyRequest(_message.Message):
    __slots__ = ("parent", "id", "expires", "why")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    parent: str
    id: str
    expires: float
    why: Why
    def __init__(self, parent: _Optional[str] = ..., id: _Optional[str] = ..., expires: _Optional[float] = ..., why: _Optional[_Union[Why, _Mapping]] = ...) -> None: ...

class RotateKeyRequest(_message.Message):
    __slots__ = ("name", "why")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    name: str
    why: Why
    def __init__(self, name: _Optional[str] = ..., why: _Optional[_Union[Why, _Mapping]] = ...) -> None: ...

class RevokeKeyRequest(_message.Message):
    __slots__ = ("name", "why")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    name: str
    why: Why
    def __init__(self, name: _Optional[str] = ..., why: _Optional[_Union[Why, _Mapping]] = ...) -> None: ...

class CreatedKey(_message.Message):
    __slots__ = ("written", "secret")
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    written: Written
    secret: str
    def __init__(self, written: _Optional[_Union[Written, _Mapping]] = ..., secret: _Optional[str] = ...) -> None: ...

class ApplyRequest(_message.Message):
    __slots__ = ("subjects", "prune", "why")
    class SubjectsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Subject
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Subject, _Mapping]] = ...) -> None: ...
    SUBJECTS_FIELD_NUMBER: _ClassVar[int]
    PRUNE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    subjects: _containers.MessageMap[str, Subject]
    prune: bool
    why: Why
    def __init__(self, subjects: _Optional[_Mapping[str, Subject]] = ..., prune: _Optional[bool] = ..., why: _Optional[_Union[Why, _Mapping]] = ...) -> None: ...

class Diff(_message.Message):
    __slots__ = ("added", "changed", "removed")
    class AddedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Pair
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Pair, _Mapping]] = ...) -> None: ...
    class ChangedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Pair
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Pair, _Mapping]] = ...) -> None: ...
    class RemovedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Pair
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Pair, _Mapping]] = ...) -> None: ...
    ADDED_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    added: _containers.MessageMap[str, Pair]
    changed: _containers.MessageMap[str, Pair]
    removed: _containers.MessageMap[str, Pair]
    def __init__(self, added: _Optional[_Mapping[str, Pair]] = ..., changed: _Optional[_Mapping[str, Pair]] = ..., removed: _Optional[_Mapping[str, Pair]] = ...) -> None: ...

class Pair(_message.Message):
    __slots__ = ("before", "after")
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    before: Subject
    after: Subject
    def __init__(self, before: _Optional[_Union[Subject, _Mapping]] = ..., after: _Optional[_Union[Subject, _Mapping]] = ...) -> None: ...

class ViewsRequest(_message.Message):
    __slots__ = ("subject", "model")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    subject: str
    model: str
    def __init__(self, subject: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class OwnViewsRequest(_message.Message):
    __slots__ = ("subjects",)
    SUBJECTS_FIELD_NUMBER: _ClassVar[int]
    subjects: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, subjects: _Optional[_Iterable[str]] = ...) -> None: ...

class View(_message.Message):
    __slots__ = ("subject", "limit", "used", "reserved", "remaining", "resets", "granted", "default")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    REMAINING_FIELD_NUMBER: _ClassVar[int]
    RESETS_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_FIELD_NUMBER: _ClassVar[int]
    subject: str
    limit: Limit
    used: float
    reserved: int
    remaining: int
    resets: float
    granted: int
    default: bool
    def __init__(self, subject: _Optional[str] = ..., limit: _Optional[_Union[Limit, _Mapping]] = ..., used: _Optional[float] = ..., reserved: _Optional[int] = ..., remaining: _Optional[int] = ..., resets: _Optional[float] = ..., granted: _Optional[int] = ..., default: _Optional[bool] = ...) -> None: ...

class ViewList(_message.Message):
    __slots__ = ("views",)
    VIEWS_FIELD_NUMBER: _ClassVar[int]
    views: _containers.RepeatedCompositeFieldContainer[View]
    def __init__(self, views: _Optional[_Iterable[_Union[View, _Mapping]]] = ...) -> None: ...

class VerdictRequest(_message.Message):
    __slots__ = ("subject", "model", "prompt_tokens", "output_tokens")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    subject: str
    model: str
    prompt_tokens: int
    output_tokens: int
    def __init__(self, subject: _Optional[str] = ..., model: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ...) -> None: ...

class VerdictReply(_message.Message):
    __slots__ = ("passes", "binding", "wait", "barred", "views")
    PASSES_FIELD_NUMBER: _ClassVar[int]
    BINDING_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    BARRED_FIELD_NUMBER: _ClassVar[int]
    VIEWS_FIELD_NUMBER: _ClassVar[int]
    passes: bool
    binding: View
    wait: float
    barred: Barred
    views: _containers.RepeatedCompositeFieldContainer[View]
    def __init__(self, passes: _Optional[bool] = ..., binding: _Optional[_Union[View, _Mapping]] = ..., wait: _Optional[float] = ..., barred: _Optional[_Union[Barred, _Mapping]] = ..., views: _Optional[_Iterable[_Union[View, _Mapping]]] = ...) -> None: ...

class Barred(_message.Message):
    __slots__ = ("subject", "reason")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    subject: str
    reason: str
    def __init__(self, subject: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class UsesRequest(_message.Message):
    __slots__ = ("since", "subject")
    SINCE_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    since: int
    subject: str
    def __init__(self, since: _Optional[int] = ..., subject: _Optional[str] = ...) -> None: ...

class UseRow(_message.Message):
    __slots__ = ("day", "subject", "model", "use")
    DAY_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    USE_FIELD_NUMBER: _ClassVar[int]
    day: int
    subject: str
    model: str
    use: Use
    def __init__(self, day: _Optional[int] = ..., subject: _Optional[str] = ..., model: _Optional[str] = ..., use: _Optional[_Union[Use, _Mapping]] = ...) -> None: ...

class Use(_message.Message):
    __slots__ = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "denied")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DENIED_FIELD_NUMBER: _ClassVar[int]
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    denied: int
    def __init__(self, requests: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., denied: _Optional[int] = ...) -> None: ...

class UseList(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[UseRow]
    def __init__(self, rows: _Optional[_Iterable[_Union[UseRow, _Mapping]]] = ...) -> None: ...

class Count(_message.Message):
    __slots__ = ("value", "settled", "level")
    VALUE_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    value: int
    settled: int
    level: float
    def __init__(self, value: _Optional[int] = ..., settled: _Optional[int] = ..., level: _Optional[float] = ...) -> None: ...

class Corrected(_message.Message):
    __slots__ = ("subject", "limit", "before", "after")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    subject: str
    limit: Limit
    before: Count
    after: Count
    def __init__(self, subject: _Optional[str] = ..., limit: _Optional[_Union[Limit, _Mapping]] = ..., before: _Optional[_Union[Count, _Mapping]] = ..., after: _Optional[_Union[Count, _Mapping]] = ...) -> None: ...

class CorrectedList(_message.Message):
    __slots__ = ("corrected",)
    CORRECTED_FIELD_NUMBER: _ClassVar[int]
    corrected: _containers.RepeatedCompositeFieldContainer[Corrected]
    def __init__(self, corrected: _Optional[_Iterable[_Union[Corrected, _Mapping]]] = ...) -> None: ...

class AdjustRequest(_message.Message):
    __slots__ = ("name", "limit", "amount", "model", "why")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    AMOUNT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    name: str
    limit: str
    amount: int
    model: str
    why: Why
    def __init__(self, name: _Optional[str] = ..., limit: _Optional[str] = ..., amount: _Optional[int] = ..., model: _Optional[str] = ..., why: _Optional[_Union[Why, _Mapping]] = ...) -> None: ...

class ResetRequest(_message.Message):
    __slots__ = ("name", "limit", "model", "why")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    name: str
    limit: str
    model: str
    why: Why
    def __init__(self, name: _Optional[str] = ..., limit: _Optional[str] = ..., model: _Optional[str] = ..., why: _Optional[_Union[Why, _Mapping]] = ...) -> None: ...

class ReservationsRequest(_message.Message):
    __slots__ = ("subject",)
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    subject: str
    def __init__(self, subject: _Optional[str] = ...) -> None: ...

class Reservation(_message.Message):
    __slots__ = ("id", "subject", "model", "lines", "ttl", "expires", "expired")
    ID_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    id: str
    subject: str
    model: str
    lines: _containers.RepeatedCompositeFieldContainer[Line]
    ttl: float
    expires: float
    expired: bool
    def __init__(self, id: _Optional[str] = ..., subject: _Optional[str] = ..., model: _Optional[str] = ..., lines: _Optional[_Iterable[_Union[Line, _Mapping]]] = ..., ttl: _Optional[float] = ..., expires: _Optional[float] = ..., expired: _Optional[bool] = ...) -> None: ...

class Line(_message.Message):
    __slots__ = ("key", "amount", "what", "seq", "draws", "rate", "until")
    KEY_FIELD_NUMBER: _ClassVar[int]
    AMOUNT_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    DRAWS_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    key: str
    amount: int
    what: int
    seq: int
    draws: bool
    rate: float
    until: float
    def __init__(self, key: _Optional[str] = ..., amount: _Optional[int] = ..., what: _Optional[int] = ..., seq: _Optional[int] = ..., draws: _Optional[bool] = ..., rate: _Optional[float] = ..., until: _Optional[float] = ...) -> None: ...

class ReservationList(_message.Message):
    __slots__ = ("reservations",)
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    reservations: _containers.RepeatedCompositeFieldContainer[Reservation]
    def __init__(self, reservations: _Optional[_Iterable[_Union[Reservation, _Mapping]]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("id", "why")
    ID_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    id: str
    why: Why
    def __init__(self, id: _Optional[str] = ..., why: _Optional[_Union[Why, _Mapping]] = ...) -> None: ...

class Released(_message.Message):
    __slots__ = ("released",)
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: bool
    def __init__(self, released: _Optional[bool] = ...) -> None: ...

class DenialsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Denial(_message.Message):
    __slots__ = ("at", "subject", "model", "limit", "amount", "wait", "shadow")
    AT_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    AMOUNT_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    at: float
    subject: str
    model: str
    limit: str
    amount: int
    wait: float
    shadow: bool
    def __init__(self, at: _Optional[float] = ..., subject: _Optional[str] = ..., model: _Optional[str] = ..., limit: _Optional[str] = ..., amount: _Optional[int] = ..., wait: _Optional[float] = ..., shadow: _Optional[bool] = ...) -> None: ...

class DenialList(_message.Message):
    __slots__ = ("denials",)
    DENIALS_FIELD_NUMBER: _ClassVar[int]
    denials: _containers.RepeatedCompositeFieldContainer[Denial]
    def __init__(self, denials: _Optional[_Iterable[_Union[Denial, _Mapping]]] = ...) -> None: ...

class AuditRequest(_message.Message):
    __slots__ = ("subject", "limit")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    subject: str
    limit: int
    def __init__(self, subject: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class Entry(_message.Message):
    __slots__ = ("at", "actor", "action", "subject", "before", "after", "reason", "request_id", "revision")
    AT_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    at: float
    actor: str
    action: str
    subject: str
    before: str
    after: str
    reason: str
    request_id: str
    revision: int
    def __init__(self, at: _Optional[float] = ..., actor: _Optional[str] = ..., action: _Optional[str] = ..., subject: _Optional[str] = ..., before: _Optional[str] = ..., after: _Optional[str] = ..., reason: _Optional[str] = ..., request_id: _Optional[str] = ..., revision: _Optional[int] = ...) -> None: ...

class EntryList(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[Entry]
    def __init__(self, entries: _Optional[_Iterable[_Union[Entry, _Mapping]]] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Fault(_message.Message):
    __slots__ = ("key", "value", "settled", "open")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: int
    settled: int
    open: int
    def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ..., settled: _Optional[int] = ..., open: _Optional[int] = ...) -> None: ...

class FaultList(_message.Message):
    __slots__ = ("faults",)
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    faults: _containers.RepeatedCompositeFieldContainer[Fault]
    def __init__(self, faults: _Optional[_Iterable[_Union[Fault, _Mapping]]] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StoreStatus(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...

class Conflict(_message.Message):
    __slots__ = ("subject", "expected", "found")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    subject: str
    expected: int
    found: int
    def __init__(self, subject: _Optional[str] = ..., expected: _Optional[int] = ..., found: _Optional[int] = ...) -> None: ...
