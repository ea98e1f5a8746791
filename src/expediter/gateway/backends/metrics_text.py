"""What a backend's Prometheus metrics say of its load, under the names of each engine.

Scanned by hand: a page of vLLM has some thousand lines of which a handful count, and prometheus_client's parser would
hold up the event loop for milliseconds per page.
"""

from __future__ import annotations

import math
import re
from typing import Final, NamedTuple


class Load(NamedTuple):
    """What a page of metrics says.

    Attributes:
        num_running, num_waiting: requests, all engines behind the backend together.
        kv_use: share of the KV cache in use, the fullest engine's; None if it does not say.
        max_kv_tokens: tokens that the KV caches hold together; None if it does not say.
    """

    num_running: int
    num_waiting: int
    kv_use: float | None
    max_kv_tokens: int | None


# Expediter has vLLM's names. SGLang's and llama.cpp's metrics have to be switched on there; TGI's are always on.
_RUNNING: Final = frozenset(
    {"vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing", "tgi_batch_current_size"}
)
_WAITING: Final = frozenset(
    {"vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred", "tgi_queue_size"}
)
_KV_USE: Final = frozenset(
    {
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",  # before 0.10
        "sglang:token_usage",
        "llamacpp:kv_cache_usage_ratio",
    }
)
_KV_TOKENS: Final = "sglang:max_total_num_tokens"
_CACHE_CONFIG: Final = "vllm:cache_config_info"
_PREFIXES: Final = ("vllm:", "sglang:", "llamacpp:", "tgi_")
_LABEL: Final = re.compile(r'(kv_cache_size_tokens|num_gpu_blocks|block_size)="(\d+)"')


def read_load(page: str) -> Load | None:
    """Read a page of metrics; None if it says nothing of the requests there. What is malformed is passed over."""
    running: list[float] = []
    waiting: list[float] = []
    kv_use: list[float] = []
    kv_tokens: list[float] = []
    for line in page.splitlines():
        if not line.startswith(_PREFIXES):
            continue
        name, labels, value = _sample(line)
        if name in _RUNNING:
            running.append(value)
        elif name in _WAITING:
            waiting.append(value)
        elif name in _KV_USE:
            kv_use.append(value)
        elif name == _KV_TOKENS:
            kv_tokens.append(value)
        elif name == _CACHE_CONFIG:
            kv_tokens.append(_cache_tokens(labels))
    counts = [each for each in running + waiting if math.isfinite(each) and each >= 0]
    if not counts:
        return None
    uses = [each for each in kv_use if 0 <= each <= 1]
    tokens = sum(each for each in kv_tokens if each > 0 and math.isfinite(each))
    return Load(_total(running), _total(waiting), max(uses, default=None), int(tokens) or None)


def _total(values: list[float]) -> int:
    return int(sum(each for each in values if math.isfinite(each) and each > 0))


def _sample(line: str) -> tuple[str, str, float]:
    """Take `name{labels} value [time]` apart; a label's value may hold spaces and braces."""
    name, brace, rest = line.partition("{")
    labels, _, values = rest.rpartition("}") if brace else ("", "", line.partition(" ")[2])
    name = name if brace else line.partition(" ")[0]
    try:
        return name, labels, float(values.split()[0])
    except (ValueError, IndexError):
        return name, labels, math.nan


def _cache_tokens(labels: str) -> float:
    found = {name: int(value) for name, value in _LABEL.findall(labels)}
    return found.get("kv_cache_size_tokens", found.get("num_gpu_blocks", 0) * found.get("block_size", 0))
