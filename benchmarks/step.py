"""`plan` + `apply` of one decode step, by number of running sequences, in microseconds of the thread's CPU time.

Each step appends a token to every sequence, meets the block edges that fall due (one sequence in `block_size` per step)
and tests every sequence for its end. Nothing arrives and nothing ends while it is measured; the model is left out.
"""

from __future__ import annotations

import argparse
import gc
import time

import numpy as np

from benchmarks.report import Row, add_json_option, publish, spread
from expediter.core.plan import StepPlan, StepResult
from expediter.core.request import Request
from expediter.scheduling.build import CacheConfig, build_scheduler
from expediter.scheduling.config import SchedulerConfig
from expediter.scheduling.scheduler import Scheduler

_BLOCK_SIZE = 16
_PROMPT_TOKENS = 512
_EOS = 2


def decoding_scheduler(num_running: int, num_steps: int) -> Scheduler:
    """Return a scheduler in which `num_running` sequences decode and go on for `num_steps` more steps."""
    tokens_each = _PROMPT_TOKENS + num_steps + 64
    config = SchedulerConfig(
        max_num_seqs=num_running,
        max_num_batched_tokens=max(8192, num_running),
        max_model_len=tokens_each,
    )
    num_blocks = num_running * (tokens_each // _BLOCK_SIZE + 1)
    scheduler = build_scheduler(config=config, cache=CacheConfig(num_blocks=num_blocks, block_size=_BLOCK_SIZE))
    rng = np.random.default_rng(0)
    for index in range(num_running):
        # Lengths differ, so that block edges spread over the steps as they do in service.
        prompt = rng.integers(10, 30_000, _PROMPT_TOKENS - index % _BLOCK_SIZE, dtype=np.int32)
        request = Request(
            request_id=str(index), prompt=prompt, max_tokens=tokens_each - len(prompt), stop_token_ids=(_EOS,)
        )
        scheduler.add(request, 0.0)
    while True:
        plan = scheduler.plan(0.0)
        scheduler.apply(_result(plan), 0.0)
        if plan.num_decodes == num_running:
            return scheduler


def _result(plan: StepPlan) -> StepResult:
    return StepResult(plan.step_id, np.full((1, len(plan.sampled)), 7, np.int32), 0.0)


def measure(num_running: int, num_steps: int) -> Row:
    """Time `num_steps` decode steps."""
    scheduler = decoding_scheduler(num_running, num_steps + 16)
    plans: list[float] = []
    totals: list[float] = []
    gc.collect()
    gc.disable()
    for step in range(num_steps + 16):
        start = time.thread_time_ns()
        plan = scheduler.plan(0.0)
        planned = time.thread_time_ns()
        result = _result(plan)
        ready = time.thread_time_ns()
        scheduler.apply(result, 0.0)
        applied = time.thread_time_ns()
        if step >= 16:
            plans.append((planned - start) / 1e3)
            totals.append((planned - start + applied - ready) / 1e3)
    gc.enable()
    return {
        "running": num_running,
        "plan_median_us": spread(plans)["median_us"],
        **spread(totals),
        "steps": num_steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", default="1,16,64,256,1024", help="comma-separated numbers of sequences")
    parser.add_argument("--steps", type=int, default=2000)
    add_json_option(parser)
    args = parser.parse_args()
    rows = [measure(int(running), args.steps) for running in args.running.split(",")]
    publish("plan + apply per decode step", rows, args.json)


if __name__ == "__main__":
    main()
