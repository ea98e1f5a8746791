"""The gateway in front of vLLM as the tests see it."""

from __future__ import annotations

import json
import random
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MODEL = "smollm2"
WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school")


def kv_events_flags(port: int) -> list[str]:
    """Return vLLM's flags for KV events; it only listens where its endpoint has a star."""
    return ["--kv-events-config", json.dumps({"enable_kv_cache_events": True, "endpoint": f"tcp://*:{port}"})]


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    data = json.dumps({"model": MODEL, **body}).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())


def text(seed: int, num_words: int) -> str:
    """Return words that are a token each."""
    return " ".join(random.Random(seed).choices(WORDS, k=num_words))


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> float:
    """Return how long it took."""
    started_s = time.monotonic()
    while not condition():
        assert time.monotonic() - started_s < timeout_s, f"{what}: not in {timeout_s} s"
        time.sleep(0.05)
    return time.monotonic() - started_s


@dataclass(frozen=True)
class VllmDoor:
    """Its two addresses."""

    url: str
    admin_url: str

    def backends(self) -> list[dict[str, Any]]:
        """Return what the admin listener says of the backends, in the order of the configuration."""
        with urllib.request.urlopen(f"{self.admin_url}/backends", timeout=30) as answer:
            found: list[dict[str, Any]] = json.loads(answer.read())["backends"]
            return found

    def complete(self, prompt: str, **fields: Any) -> Any:
        return post(self.url, "/v1/completions", {"prompt": prompt, "max_tokens": 4, "temperature": 0, **fields})
