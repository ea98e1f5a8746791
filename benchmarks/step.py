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
from expediter.core.slo import Slo
from expediter.scheduling.build import CacheConfig, PolicyConfig, build_scheduler
from expediter.scheduling.config import SchedulerConfig
from expediter.scheduling.scheduler import Scheduler

_BLOCK_SIZE = 16
_PROMPT_TOKENS = 512
_EOS = 2


POLICIES = {
    "fcfs": PolicyConfig(),
    "slo": PolicyConfig(ordering="slo", budget="slack", victims="least_value"),
}
_TARGETS = Slo(ttft_s=5.0, tpot_s=0.05)
STEP_S = 0.02


def decoding_scheduler(num_running: int, num_steps: int, policy: str = "fcfs") -> Scheduler:
    """Return a scheduler in which `num_running` sequences decode and go on for `num_steps` more steps.

    Steps take `STEP_S` each, of which the policy `slo` has learned by then.
    """
    tokens_each = _PROMPT_TOKENS + num_steps + 64
    config = SchedulerConfig(
        max_num_seqs=num_running,
        max_num_batched_tokens=max(8192, num_running),
        max_model_len=tokens_each,
    )
    num_blocks = num_running * (tokens_each // _BLOCK_SIZE + 1)
    cache = CacheConfig(num_blocks=num_blocks, block_size=_BLOCK_SIZE)
    scheduler = build_scheduler(config=config, cache=cache, policy=POLICIES[policy])
    rng = np.random.default_rng(0)
    for index in range(num_running):
        # Lengths differ, so that block edges spread over the steps as they do in service.
        prompt = rng.integers(10, 30_000, _PROMPT_TOKENS - index % _BLOCK_SIZE, dtype=np.int32)
        request = Request(
            request_id=str(index),
            prompt=prompt,
            max_tokens=tokens_each - len(prompt),
            stop_token_ids=(_EOS,),
            slo=_TARGETS,
        )
        scheduler.add(request, 0.0)
    while True:
        plan = scheduler.plan(0.0)
        scheduler.apply(result_of(plan), 0.0)
        if plan.num_decodes == num_running:
            return scheduler


def result_of(plan: StepPlan) -> StepResult:
    """Return what a step of `STEP_S` would yield: the same token for everybody."""
    return StepResult(plan.step_id, np.full((1, len(plan.sampled)), 7, np.int32), STEP_S)


def decode_step(scheduler: Scheduler, now_s: float) -> tuple[float, float]:
    """Run one step; return the CPU time of `plan`, and of `plan` and `apply` together, in microseconds."""
    start = time.thread_time_ns()
    plan = scheduler.plan(now_s)
    planned = time.thread_time_ns()
    result = result_of(plan)
    ready = time.thread_time_ns()
    scheduler.apply(result, now_s + STEP_S)
    applied = time.thread_time_ns()
    return (planned - start) / 1e3, (planned - start + applied - ready) / 1e3


def measure(num_running: int, num_steps: int, policy: str) -> Row:
    """Time `num_steps` decode steps."""
    scheduler = decoding_scheduler(num_running, num_steps + 16, policy)
    plans: list[float] = []
    totals: list[float] = []
    gc.collect()
    gc.disable()
    for step in range(num_steps + 16):
        planned_us, total_us = decode_step(scheduler, step * STEP_S)
        if step >= 16:
            plans.append(planned_us)
            totals.append(total_us)
    gc.enable()
    return {
        "running": num_running,
        "policy": policy,
        "plan_median_us": spread(plans)["median_us"],
        **spread(totals),
        "steps": num_steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", default="1,16,64,256,1024", help="comma-separated numbers of sequences")
    parser.add_argument("--policies", default=",".join(POLICIES), help="comma-separated: " + ", ".join(POLICIES))
    parser.add_argument("--steps", type=int, default=2000)
    add_json_option(parser)
    args = parser.parse_args()
    rows = [
        measure(int(running), args.steps, policy)
        for policy in args.policies.split(",")
        for running in args.running.split(",")
    ]
    publish("plan + apply per decode step", rows, args.json)


if __name__ == "__main__":
    main()
