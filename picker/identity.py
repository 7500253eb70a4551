"""Whose request it is: by a JWT's claim, an API key, a header that is believed, or nobody's.

A tenant's name is fit for a subject of quotas, for logs and for labels, whoever sent it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

from picker.config import Identity as Settings
from picker.header_names import header_names
from picker.refusal import Refusal

MAX_TENANT = 200  # characters, as of all subjects of quotas
MAX_KEY = 512  # characters of an API key

CHALLENGE = ("www-authenticate", "Bearer")  # RFC 6750, to whom a key or a token is missing
WRONG_KEY = ("www-authenticate", 'Bearer error="invalid_token"')

KEY_HEADERS = ("authorization", "x-api-key", "api-key")  # OpenAI's, Anthropic's, Azure's


class Owner(NamedTuple):
    """Whose an API key is."""

    subject: str  # of quotas: `key/ID`
    tenant: str  # the name of its tenant


Keys = Callable[[str], Owner | None]
"""SHA-256 of an API key, in hexadecimal -> its owner. It compares in constant time."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks."""

    tenant: str  # that requests are fair to
    subject: str  # of quotas: `tenant/NAME`, or the key's
    digest: str | None = None  # of the API key that told


class Identities:
    """Tells callers from requests.

    Raises:
        ValueError: the default tenant is none.
    """

    def __init__(self, settings: Settings, keys: Keys | None = None) -> None:
        """`keys` is asked where `identity.keys` is set."""
        if not fit(settings.default):
            raise ValueError(f"identity.default: {settings.default!r} is no name of a tenant")
        self._settings = settings
        self._keys = keys if settings.keys else None
        self._headers = header_names(settings.header)
        self._default = Caller(settings.default, f"tenant/{settings.default}")

    @property
    def headers(self) -> tuple[str, ...]:
        """Request headers that are read, in lower case: a gateway must send these."""
        return self._headers + (KEY_HEADERS if self._keys is not None else ())

    def caller(self, headers: Mapping[str, str], claim: str | None = None) -> Caller:
        """
        Args:
            headers: of the request, names in lower case.
            claim: the value of `identity.claim` in the token that Envoy has verified.

        Raises:
            Refusal: 401: the API key is nobody's, or nothing names the tenant although something
                must; 400: what names the tenant is no name.
        """
        if claim is not None:
            return _tenant(claim, f"the claim {self._settings.claim}")
        if self._keys is not None and (digest := self.key_digest(headers)) is not None:
            owner = self._keys(digest)
            if owner is None:
                raise unknown_key()
            return Caller(owner.tenant, owner.subject, digest)
        for header in self._headers:
            if name := headers.get(header):
                return _tenant(name, f"the header {header}")
        if self._settings.required:
            ways = [f"the header {name}" for name in self._headers]
            ways += ["an API key"] if self._settings.keys else []
            ways += ["a token"] if self._settings.claim else []
            bearer = self._settings.keys or self._settings.claim
            raise Refusal(
                401,
                "no_identity",
                f"send {' or '.join(ways) or 'who you are'}",
                headers=[CHALLENGE] if bearer else [],
            )
        return self._default

    def key_digest(self, headers: Mapping[str, str]) -> str | None:
        """SHA-256 of the API key in a request, if there is one; of no key if it is too long."""
        for name in KEY_HEADERS:
            value = headers.get(name)
            if not value:
                continue
            if name == "authorization":
                scheme, _, value = value.partition(" ")
                if scheme.lower() != "bearer":
                    continue
            return sha256(value.strip()[: MAX_KEY + 1].encode("utf-8", "replace")).hexdigest()
        return None


def unknown_key() -> Refusal:
    """401: an API key is nobody's, or not any more."""
    why = "the API key is not known here"
    return Refusal(401, "invalid_api_key", why, headers=[WRONG_KEY])


def fit(name: str) -> bool:
    """Whether a tenant can have this name."""
    return 0 < len(name) <= MAX_TENANT and name.isprintable() and name == name.strip()


def _tenant(name: str, where: str) -> Caller:
    name = name.strip()
    if not fit(name):
        why = f"{where} is no name of a tenant: 1 to {MAX_TENANT} printable characters"
        raise Refusal(400, "invalid_tenant", why)
    return Caller(name, f"tenant/{name}")
