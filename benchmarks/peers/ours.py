"""Expediter on the same cases as its peers."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks.peers.protocol import CHAIN, LENGTHS, NUM_SEQUENCES, RUNNING, VOCAB_SIZE, Case, cpu_us, serve
from benchmarks.prefix import Cache, bytes_per_token
from benchmarks.step import POLICIES, STEP_S, decode_step, decoding_scheduler, result_of
from expediter.core.events import Admitted
from expediter.core.request import Request, TokenArray
from expediter.core.slo import Slo
from expediter.scheduling.build import CacheConfig, build_scheduler
from expediter.scheduling.config import SchedulerConfig

_BLOCK_SIZE = 16
_MAX_MODEL_LEN = 65_536


def decode(num_running: int, policy: str) -> Case:
    scheduler = decoding_scheduler(num_running, 7000, policy)
    steps = itertools.count()
    for _ in range(16):
        decode_step(scheduler, next(steps) * STEP_S)
    return lambda num_samples: [decode_step(scheduler, next(steps) * STEP_S)[1] for _ in range(num_samples)]


def admission(length: int, policy: str, *, hit: bool) -> Case:
    config = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=_MAX_MODEL_LEN, max_model_len=_MAX_MODEL_LEN)
    scheduler = build_scheduler(config=config, cache=CacheConfig(num_blocks=40_000), policy=POLICIES[policy])
    names = map(str, itertools.count())
    rng = np.random.default_rng(0)

    def new_prompt() -> TokenArray:
        return rng.integers(10, VOCAB_SIZE, length, dtype=np.int32)

    def admit(prompt: TokenArray, num_cached: int) -> float:
        request_id = next(names)
        start = time.thread_time_ns()
        request = Request(
            request_id=request_id, prompt=prompt, max_tokens=100, stop_token_ids=(2,), slo=Slo(ttft_s=5.0, tpot_s=0.05)
        )
        scheduler.add(request, 0.0)
        plan = scheduler.plan(0.0)
        taken = (time.thread_time_ns() - start) / 1e3
        admitted = [event for event in plan.events if isinstance(event, Admitted)]
        if [event.num_cached_tokens for event in admitted] != [num_cached]:
            raise SystemExit(f"not {num_cached} of {length} tokens came from the cache")
        scheduler.apply(result_of(plan), 0.0)
        scheduler.abort(request_id, 0.0)
        return taken

    known = new_prompt()
    if not hit:
        return lambda num_samples: [admit(new_prompt(), 0) for _ in range(num_samples)]
    admit(known, 0)
    return lambda num_samples: [admit(known, length - _BLOCK_SIZE) for _ in range(num_samples)]


def match(length: int, *, chain: bool) -> Case:
    cache = Cache(NUM_SEQUENCES)
    tokens = cache.new_tokens(length)
    (cache.put_chain if chain else cache.put)(tokens)
    raw, count = tokens.tobytes(), length // _BLOCK_SIZE
    if cache.tree.match(raw, "", count).num_blocks != count:
        raise SystemExit("the prompt is not in the cache")
    return lambda num_samples: [cpu_us(lambda: cache.tree.match(raw, "", count)) for _ in range(num_samples)]


def insert(length: int) -> Case:
    cache = Cache(NUM_SEQUENCES, spare_blocks=1_000_000)
    return lambda num_samples: [cache.insert_new(length) for _ in range(num_samples)]


def evict() -> Case:
    cache = Cache(NUM_SEQUENCES)
    return lambda num_samples: [cpu_us(lambda: cache.tree.evict(256 // _BLOCK_SIZE)) for _ in range(num_samples)]


def density() -> Case:
    cache = Cache(NUM_SEQUENCES)
    return lambda _: [bytes_per_token(cache)]


def _set_up(make: Callable[[], Case]) -> Case:
    case = make()
    gc.collect()
    gc.disable()
    return case


def all_cases() -> dict[str, Callable[[], Case]]:
    """Return what sets each case up, by the names that the peers use too; the policy `slo` has cases of its own."""
    makers: dict[str, Callable[[], Case]] = {}
    for policy in POLICIES:
        mark = "" if policy == "fcfs" else f", {policy}"
        for num_running in RUNNING:
            makers[f"decode, {num_running} running{mark}"] = partial(decode, num_running, policy)
        for length in LENGTHS:
            makers[f"admission, {length} tokens, cold{mark}"] = partial(admission, length, policy, hit=False)
            makers[f"admission, {length} tokens, full hit{mark}"] = partial(admission, length, policy, hit=True)
    for length in LENGTHS:
        makers[f"match with ids, 1 node, {length} tokens"] = partial(match, length, chain=False)
        makers[f"match with ids, {CHAIN} nodes, {length} tokens"] = partial(match, length, chain=True)
        makers[f"insert, {length} tokens"] = partial(insert, length)
    makers["evict, 256-token leaf"] = evict
    makers["bytes per cached token"] = density
    return {name: partial(_set_up, make) for name, make in makers.items()}


if __name__ == "__main__":
    serve(all_cases())
