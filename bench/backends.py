"""Model servers that answer at once: one Envoy with many ports that serves ready-made answers.

They cost little, so that on a small machine most of the time is left for what is measured. Each
port is a pod with a vLLM metrics page of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.envoys import FILTERS, HOST, MAX_BODY, address, envoy, listener
from bench.processes import free_ports
from picker.up.processes import Child

METRICS_PAGE = Path(__file__).parents[1] / "tests/data/vllm_metrics.txt"

COMPLETION = json.dumps(
    {
        "id": "chatcmpl-1f6e2a",
        "object": "chat.completion",
        "created": 1_795_950_403,
        "model": "llama",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "The harbour opens at nine. " * 4},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 1824,
            "completion_tokens": 24,
            "total_tokens": 1848,
            "prompt_tokens_details": {"cached_tokens": 1792},
        },
    }
)


def metrics_page(*, running: int, waiting: int, kv_usage: float) -> str:
    """The page of a real vLLM, with another load."""
    page = METRICS_PAGE.read_text()
    values = {
        "num_requests_running": running,
        "num_requests_waiting": waiting,
        "kv_cache_usage_perc": kv_usage,
    }
    for name, value in values.items():
        page, found = re.subn(rf"(?m)^(vllm:{name}{{[^}}]*}}) .*$", rf"\g<1> {value:.6g}", page)
        assert found == 1, name
    return page


def busy_pages(count: int) -> list[str]:
    """Pods that all run something, some of them more."""
    return [
        metrics_page(running=4 + i % 8, waiting=i % 3, kv_usage=0.2 + 0.01 * (i % 20))
        for i in range(count)
    ]


def idle_pages(count: int) -> list[str]:
    return [metrics_page(running=0, waiting=0, kv_usage=0.0)] * count


def backends(pages: Sequence[str], folder: Path, name: str = "backends") -> tuple[Child, list[str]]:
    """The process, and the addresses of its pods: one for each metrics page."""
    *ports, admin = free_ports(len(pages) + 1)
    config = {
        "admin": {"address": address(admin)},
        "static_resources": {
            "listeners": [_pod(port, page) for port, page in zip(ports, pages, strict=True)]
        },
    }
    child = envoy(name, config, folder, admin)
    return child, [f"{HOST}:{port}" for port in ports]


def _pod(port: int, page: str) -> dict[str, Any]:
    metrics = _answer("/metrics", page, "text/plain; version=0.0.4; charset=utf-8")
    whole_body_first = {
        "name": "envoy.filters.http.buffer",
        "typed_config": {
            "@type": FILTERS + "http.buffer.v3.Buffer",
            "max_request_bytes": MAX_BODY,
        },
    }
    return listener(port, [metrics, _answer("/", COMPLETION)], [whole_body_first])


def _answer(prefix: str, body: str, content_type: str = "application/json") -> dict[str, Any]:
    return {
        "match": {"prefix": prefix},
        "direct_response": {"status": 200, "body": {"inline_string": body}},
        "response_headers_to_add": [
            {
                "header": {"key": "content-type", "value": content_type},
                "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
            }
        ],
    }
