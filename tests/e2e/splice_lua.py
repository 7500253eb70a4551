"""The functions of splice.lua by themselves, in a real Envoy that answers with what they return."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

import picker.envoy
from picker.config import Config, Envoy
from picker.envoy.bootstrap import bootstrap
from tests.e2e.gateway import manager
from tests.envoy_process import running_envoy

SCRIPT = Path(picker.envoy.__path__[0], "splice.lua").read_text()


@asynccontextmanager
async def running_splice(harness: str) -> AsyncIterator[aiohttp.ClientSession]:
    """`harness`: Lua that calls functions of the script on each request, and answers it."""
    told = bootstrap(Config(envoy=Envoy(profile="lean")))
    *_, router = manager(told)["http_filters"]
    only = {
        "name": "lua",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua",
            "default_source_code": {"inline_string": SCRIPT + harness},
        },
    }
    manager(told)["http_filters"] = [only, router]
    async with running_envoy(told) as envoy, aiohttp.ClientSession(envoy.url) as http:
        yield http
        assert "script" not in envoy.log
