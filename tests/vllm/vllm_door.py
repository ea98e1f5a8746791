"""What the tests with vLLM share."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tests.engines.engine_door import EngineDoor, post

MODEL = "smollm2"


def kv_events_flags(port: int) -> list[str]:
    """Return vLLM's flags for KV events; it only listens where its endpoint has a star."""
    return ["--kv-events-config", json.dumps({"enable_kv_cache_events": True, "endpoint": f"tcp://*:{port}"})]


@dataclass(frozen=True)
class VllmDoor(EngineDoor):
    """The gateway in front of two vLLM servers."""

    def complete(self, prompt: str, **fields: Any) -> Any:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}
        return post(self.url, "/v1/completions", body)
