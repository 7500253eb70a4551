"""API keys: made here, shown once, kept as hashes."""

from __future__ import annotations

import secrets
from hashlib import sha256

from picker.quota.model import Key

PREFIX = "wp-"
SECRET_BYTES = 32
HINT_CHARACTERS = 4


def new_key(created: float) -> tuple[str, Key]:
    """A new secret, and what is kept of it.

    The secret has 256 random bits, so that a fast hash without salt is as good as a slow one.
    """
    secret = PREFIX + secrets.token_urlsafe(SECRET_BYTES)
    return secret, Key(digest(secret), secret[-HINT_CHARACTERS:], float(round(created)))


def digest(secret: str) -> str:
    """SHA-256 in hexadecimal, by which a key is looked up."""
    return sha256(secret.encode()).hexdigest()
