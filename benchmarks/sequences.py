"""What several sequences of one prompt cost: prefill tokens computed, and blocks in use, as a group and apart.

Apart, they are so many requests that arrive together: each finds what the prefix cache holds when it starts. Blocks are
counted at their peak until all have their first token (apart, they hold equal blocks until these are computed), and
when each has 64. Nothing here depends on time.
"""

from __future__ import annotations

import argparse
from collections import Counter

import numpy as np

from benchmarks.report import Row, add_json_option, publish
from expediter.core.events import Tokens
from expediter.core.plan import StepPlan, StepResult
from expediter.core.request import Request
from expediter.scheduling.build import CacheConfig, build_scheduler
from expediter.scheduling.config import SchedulerConfig

_OUTPUT_TOKENS = 64
_BLOCK_SIZE = 16


def measure(num_prompt_tokens: int, n: int, budget: int, *, as_group: bool) -> Row:
    """Run `n` sequences of one prompt until each has 64 output tokens."""
    config = SchedulerConfig(max_num_seqs=max(n, 8), max_num_batched_tokens=budget, max_model_len=32_768)
    scheduler = build_scheduler(config=config, cache=CacheConfig(num_blocks=8192, block_size=_BLOCK_SIZE))
    prompt = np.random.default_rng(0).integers(10, 30_000, num_prompt_tokens, dtype=np.int32)
    requests = [Request(request_id=str(i), prompt=prompt, max_tokens=_OUTPUT_TOKENS + 64) for i in range(n)]
    if as_group:
        scheduler.add_group(requests, 0.0)
    else:
        for request in requests:
            scheduler.add(request, 0.0)
    num_outputs: Counter[str] = Counter()
    num_prefill = num_steps = peak_blocks = 0
    while True:
        plan = scheduler.plan(0.0)
        num_prefill += plan.features.num_prefill_tokens
        if plan.num_decodes < n:
            num_steps += 1
            peak_blocks = max(peak_blocks, scheduler.kv.num_used_blocks)
        for event in scheduler.apply(_different_tokens(plan), 0.0):
            if isinstance(event, Tokens):
                num_outputs.update(state.request_id for state in event.states)
        if len(num_outputs) == n and min(num_outputs.values()) >= _OUTPUT_TOKENS:
            break
    return {
        "sequences": "group" if as_group else "apart",
        "budget": budget,
        "prefill_tokens": num_prefill,
        "steps_to_first_tokens": num_steps,
        "peak_blocks": peak_blocks,
        f"blocks_at_{_OUTPUT_TOKENS}_tokens": scheduler.kv.num_used_blocks,
    }


def _different_tokens(plan: StepPlan) -> StepResult:
    return StepResult(plan.step_id, 100 + plan.sample_slots[None].astype(np.int32), 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=1000, help="prompt tokens")
    parser.add_argument("--n", type=int, default=4, help="sequences")
    add_json_option(parser)
    args = parser.parse_args()
    rows = [
        measure(args.prompt, args.n, budget, as_group=as_group)
        for budget in (512, 2048, 8192)
        for as_group in (False, True)
    ]
    publish(f"{args.n} sequences of a prompt of {args.prompt} tokens, blocks of {_BLOCK_SIZE}", rows, args.json)


if __name__ == "__main__":
    main()
