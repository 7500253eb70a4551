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

SEPARATOR = b"\1"  # between what came out for each piece
HARNESS = """
function envoy_on_request(handle)
  local kind, cuts = string.match(handle:headers():get(":path"), "^/(%l+)/(.*)$")
  local body = handle:body()
  local text, from = body:getBytes(0, body:length()), 1
  local feed, finish = MAKER
  local out = {}
  for cut in string.gmatch(cuts, "%d+") do
    out[#out + 1] = feed(string.sub(text, from, tonumber(cut)))
    from = tonumber(cut) + 1
  end
  out[#out + 1] = feed(string.sub(text, from))
  out[#out + 1] = finish()
  handle:respond({[":status"] = "200"}, table.concat(out, "\\1"))
end
"""


@asynccontextmanager
async def running_splice(maker: str) -> AsyncIterator[aiohttp.ClientSession]:
    """Feeds bodies to what `maker`, a call in Lua, returns: cut where the path `/KIND/1,2,3` tells.

    The call may look at `kind`.
    """
    told = bootstrap(Config(envoy=Envoy(profile="lean")))
    *_, router = manager(told)["http_filters"]
    only = {
        "name": "lua",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua",
            "default_source_code": {"inline_string": SCRIPT + HARNESS.replace("MAKER", maker)},
        },
    }
    manager(told)["http_filters"] = [only, router]
    async with running_envoy(told) as envoy, aiohttp.ClientSession(envoy.url) as http:
        yield http
        assert "script" not in envoy.log
