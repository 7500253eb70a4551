"""Scorers rate the candidates of one request, by columns of numbers: one file each.

A name here is the name in warmpath.yaml; a scorer's parameters are its dataclass's fields.
"""

from __future__ import annotations

from scorers.active import Active
from scorers.context_length import ContextLength
from scorers.inflight import Inflight
from scorers.kv import KV
from scorers.label import Label
from scorers.load_aware import LoadAware
from scorers.lora import Lora
from scorers.no_hit_lru import NoHitLru
from scorers.pods import Scorer
from scorers.prefix import Prefix
from scorers.queue import Queue
from scorers.running import Running
from scorers.session import Session
from scorers.token_load import TokenLoad
from scorers.uncached import Uncached

SCORERS: dict[str, type[Scorer]] = {
    "prefix": Prefix,
    "queue": Queue,
    "kv": KV,
    "running": Running,
    "inflight": Inflight,
    "uncached": Uncached,
    "lora": Lora,
    "session": Session,
    "noHitLru": NoHitLru,
    "label": Label,
    "contextLength": ContextLength,
    "tokenLoad": TokenLoad,
    "active": Active,
    "loadAware": LoadAware,
}
