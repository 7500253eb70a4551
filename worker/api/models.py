"""The names under which a worker serves its one model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from worker.api.errors import ApiError, show


class Models:
    """The first name is the model's own; the others are aliases."""

    def __init__(self, names: Sequence[str], max_model_len: int) -> None:
        self._names = list(names)
        self._max_model_len = max_model_len
        self._created = int(time.time())

    def resolve(self, wanted: str | None) -> str:
        """The name to answer under.

        Raises:
            ApiError: 404, no such model is served here.
        """
        if wanted is None:
            return self._names[0]
        if wanted not in self._names:
            aliases = ", ".join(self._names)
            raise ApiError(
                f"The model `{show(wanted)}` does not exist. Valid aliases: {aliases}.",
                status=404,
                param="model",
            )
        return wanted

    def cards(self) -> dict[str, Any]:
        """What GET /v1/models answers."""
        return {"object": "list", "data": [self._card(name) for name in self._names]}

    def card(self, name: str) -> dict[str, Any]:
        """What GET /v1/models/{name} answers; ApiError 404 if it is not served here."""
        return self._card(self.resolve(name))

    def _card(self, name: str) -> dict[str, Any]:
        permission = {
            "id": f"modelperm-{name}",
            "object": "model_permission",
            "created": self._created,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "warmpath",
            "root": self._names[0],
            "parent": None,
            "max_model_len": self._max_model_len,
            "permission": [permission],
        }
