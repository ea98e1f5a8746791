"""What a backend's Prometheus metrics say of its load and its work, under the names of each engine.

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
        work: grows whenever anything is computed, in no unit; None if nothing there does.
    """

    num_running: int
    num_waiting: int
    kv_use: float | None
    max_kv_tokens: int | None
    work: float | None


# Expediter has vLLM's names. SGLang's and llama.cpp's metrics have to be switched on; TGI's are always on. Sources:
# vllm/v1/metrics/loggers.py (0.32), sglang/srt/observability/metrics_collector.py (0.5.23), llama.cpp's
# tools/server/server-task.cpp (build 11434), text-generation-inference's backends/v3/src/backend.rs and queue.rs.
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
        "llamacpp:kv_cache_usage_ratio",  # before May 2025; since then it does not say
    }
)
_WORK: Final = frozenset(
    {
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "sglang:prompt_tokens_total",
        "sglang:generation_tokens_total",  # of requests that have ended
        "sglang:realtime_tokens_total",
        "llamacpp:n_decode_total",
        "tgi_batch_inference_count",
    }
)
_KV_TOKENS: Final = "sglang:max_total_num_tokens"
_CACHE_CONFIG: Final = "vllm:cache_config_info"
_PREFIXES: Final = ("vllm:", "sglang:", "llamacpp:", "tgi_")
_RANK: Final = re.compile(r'dp_rank="(\d+)"')
_LABEL: Final = re.compile(r'(kv_cache_size_tokens|num_gpu_blocks|block_size)="(\d+)"')


def read_load(page: str) -> Load | None:
    """Read a page of metrics; None if it says nothing of the requests there. What is malformed is passed over."""
    running: dict[str, float] = {}
    waiting: dict[str, float] = {}
    kv_tokens: dict[str, float] = {}
    kv_use: list[float] = []
    work: list[float] = []
    for line in page.splitlines():
        if not line.startswith(_PREFIXES):
            continue
        name, labels, value = _sample(line)
        if not 0 <= value < math.inf:
            continue
        if name in _RUNNING:
            _count(running, labels, value)
        elif name in _WAITING:
            _count(waiting, labels, value)
        elif name in _KV_USE:
            kv_use.append(value)
        elif name in _WORK:
            work.append(value)
        elif name == _KV_TOKENS:
            _count(kv_tokens, labels, value)
        elif name == _CACHE_CONFIG:
            _count(kv_tokens, labels, _cache_tokens(labels))
    if not running and not waiting:
        return None
    uses = [each for each in kv_use if each <= 1]
    total_tokens = int(sum(kv_tokens.values()))
    num_running, num_waiting = int(sum(running.values())), int(sum(waiting.values()))
    return Load(num_running, num_waiting, max(uses, default=None), total_tokens or None, sum(work) if work else None)


def _count(counts: dict[str, float], labels: str, value: float) -> None:
    """Count what one engine says once.

    Engines behind one address, vLLM's and SGLang's data-parallel ones, each have lines of their own, and all of them
    count. SGLang has several for one: every stage of a pipeline repeats the number, with `--enable-metrics-for-all-
    schedulers` every rank does, and with `--enable-priority-scheduling` each priority has a line beside the total.
    """
    engine = labels
    if "tp_rank=" in labels:
        rank = _RANK.search(labels)
        engine = "" if rank is None else rank[1]
    counts[engine] = max(counts.get(engine, 0.0), value)


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
