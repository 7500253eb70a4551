"""What the engine would be given for a request: the answers of the /render endpoints.

Routers use them to learn the token ids of a chat without running it.
"""

from __future__ import annotations

from typing import Any

from worker.api.prompts import Prompt
from worker.api.responses import Answer
from worker.sequence import SamplingParams


def rendered(answer: Answer, prompt: Prompt, params: SamplingParams) -> dict[str, Any]:
    """One prompt, in the shape of vLLM's answer."""
    ask = answer.ask
    return {
        "request_id": answer.id,
        "token_ids": prompt.token_ids,
        "token_offsets": None,
        "features": None,
        "content_parts": None,
        "sampling_params": {
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "repetition_penalty": params.repetition_penalty,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "seed": params.seed,
            "stop": ask.stop_strings,
            "stop_token_ids": sorted(ask.stop_token_ids or ()),
            "max_tokens": params.max_tokens,
            "min_tokens": params.min_tokens,
        },
        "model": answer.model,
        "stream": bool(ask.stream),
        "stream_options": ask.stream_options,
        "cache_salt": ask.cache_salt,
        "priority": ask.priority or 0,
        "kv_transfer_params": None,
    }
