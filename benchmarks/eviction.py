"""Prefix hits by eviction policy: a trace runs through the KV cache alone, at shares of its unlimited working set.

Every request takes its blocks on arrival, holds them for a fixed pace (10,000 prompt tokens and 33 output tokens per
second) and leaves them cached; without room it waits for others to end. What is measured is the share of prompt tokens
found in the cache. Output tokens fill the cache, but no trace says which later prompt repeats them.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.report import Row, add_json_option, publish
from expediter.kvcache.eviction import EvictionPolicy
from expediter.kvcache.manager import KVCacheManager
from expediter.scheduling.build import EVICTIONS
from expediter.sim.synthetic_tokens import output_base, output_tokens
from expediter.sim.trace import Trace
from expediter.sim.trace_readers import read_trace

_BLOCK_SIZE = 16
_MAX_NUM_SEQS = 4096
_PREFILL_TOKENS_PER_S = 10_000
_OUTPUT_TOKENS_PER_S = 33


class Replay:
    """A trace against one cache.

    Attributes:
        num_hit_tokens, num_prompt_tokens: so far.
    """

    def __init__(self, kv: KVCacheManager) -> None:
        self.kv = kv
        self.num_hit_tokens = self.num_prompt_tokens = 0
        self._now_s = 0.0
        self._ends: list[tuple[float, int, bytes]] = []
        self._slots = list(range(_MAX_NUM_SEQS))

    def run(self, trace: Trace) -> float:
        """Return the hit rate."""
        for row, request in enumerate(trace.requests()):
            num_output = request.max_tokens
            output = output_tokens(
                np.array([output_base(row)], np.int32), np.array([len(request.prompt)], np.int32), num_output
            )
            self._start(request.arrival_s, request.prompt.tobytes(), output.tobytes())
        return self.num_hit_tokens / self.num_prompt_tokens

    def _start(self, arrival_s: float, prompt: bytes, output: bytes) -> None:
        kv, total = self.kv, (len(prompt) + len(output)) // 4
        if kv.blocks_for(total) > kv.num_blocks:
            return
        self._now_s = max(self._now_s, arrival_s)
        while self._ends and self._ends[0][0] <= self._now_s:
            self._end()
        while not self._slots or kv.shortage(kv.match(prompt, ""), total, 0) > 0:
            self._end()
        match, slot = kv.match(prompt, ""), self._slots.pop()
        kv.admit(slot, match, total, 0, self._now_s)
        num_prompt, num_hit = len(prompt) // 4, match.num_blocks * _BLOCK_SIZE
        self.num_hit_tokens += num_hit
        self.num_prompt_tokens += num_prompt
        kv.commit(slot, prompt, "", num_prompt)
        duration_s = (num_prompt - num_hit) / _PREFILL_TOKENS_PER_S + len(output) / 4 / _OUTPUT_TOKENS_PER_S
        heapq.heappush(self._ends, (self._now_s + duration_s, slot, prompt + output))

    def _end(self) -> None:
        end_s, slot, tokens = heapq.heappop(self._ends)
        self._now_s = max(self._now_s, end_s)
        self.kv.commit(slot, tokens, "", len(tokens) // 4 - 1)
        self.kv.release(slot, self._now_s)
        self._slots.append(slot)


def make_cache(trace: Trace, num_blocks: int, policy: EvictionPolicy | None) -> KVCacheManager:
    return KVCacheManager(
        num_blocks=num_blocks,
        block_size=_BLOCK_SIZE,
        max_num_seqs=_MAX_NUM_SEQS,
        max_model_len=int((trace.input_tokens + trace.output_tokens).max()),
        eviction=policy,
    )


def measure(
    trace: Trace, shares: Sequence[float], policies: Mapping[str, Callable[[int], EvictionPolicy]]
) -> list[Row]:
    num_tokens = int(trace.input_tokens.sum(dtype=np.int64) + trace.output_tokens.sum(dtype=np.int64))
    unlimited = make_cache(trace, num_tokens // _BLOCK_SIZE + len(trace), None)
    best = Replay(unlimited).run(trace)
    working_set = unlimited.tree.num_blocks
    rows: list[Row] = []
    for share in shares:
        row: Row = {"trace": trace.name, "pool": f"{share:.0%}", "tokens": int(share * working_set) * _BLOCK_SIZE}
        for name, policy in policies.items():
            num_blocks = int(share * working_set)
            row[name] = round(Replay(make_cache(trace, num_blocks, policy(num_blocks))).run(trace), 4)
        rows.append({**row, "unlimited": round(best, 4)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--limit", type=int, default=1_000_000)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.01, 0.05, 0.2])
    add_json_option(parser)
    args = parser.parse_args()
    rows: list[Row] = []
    for path in args.traces:
        rows += measure(read_trace(path).take(args.limit), args.shares, EVICTIONS)
    publish("share of prompt tokens found in the cache", rows, args.json)


if __name__ == "__main__":
    main()
