"""DistServe: requests per second and GPU that meet both latency targets, with prefill and decode on GPUs of "
"their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from expediter.assembly.pools import PoolConfig
from expediter.assembly.simulation import SimulationConfig, build_simulation
from expediter.control.fleet import Role
from expediter.core.slo import Slo
from expediter.perfmodel.distserve import DistServeModel
from expediter.sim.trace import Trace
from expediter.studies.claims.capacity import capacity
from expediter.studies.claims.frame import Claim, Conclusion, Effort, Figure, Numbers, Table, best, number, ratio
from expediter.studies.claims.workloads import DISTSERVE_SHAREGPT, at_rps, poisson_trace

_REQUIRED_ATTAINMENT = 0.9
_KV_TOKENS = {1: 66_144, 2: 163_008, 4: 356_736}
"""Of OPT-13B by number of GPUs. Source: DistServe's simulator, profile_data/max_num_tokens.csv."""
_BLOCK_SIZE = 16
_NVLINK_BANDWIDTH = 300e9
"""Each way, byte/s; the paper's prefill and decode instances share a node. Its simulator counts no time for "
"transfers."""
_BUDGETS = (512, 1024, 2048)
_THEIR_NUM_REQUESTS = 300
_THEIR_MAX_RPS_PER_GPU = 5.0
_THEIR_RESOLUTION_RPS = 0.25
_TTFT_S = {"readme": 0.2, "paper": 0.25}


def disaggregated() -> SimulationConfig:
    """Return one prefill instance on two GPUs and one decode instance on one.

    Its simulator computes all prompts that wait in one step, whatever their number; so does this.
    """
    pools = (_pool("prefill", 2), _pool("decode", 1))
    return replace(
        _BASE,
        preset="distserve",
        pools=pools,
        network_bandwidth=_NVLINK_BANDWIDTH,
        max_num_batched_tokens=_KV_TOKENS[2],
    )


def _pool(role: Role, num_gpus: int) -> PoolConfig:
    return PoolConfig(
        role=role,
        tensor_parallel=num_gpus,
        num_blocks=_KV_TOKENS[num_gpus] // _BLOCK_SIZE,
        step_time=DistServeModel("opt-13b", num_gpus),
    )


def colocated(preset: str, num_gpus: int, engine: str, budget: int | None) -> SimulationConfig:
    """Return one replica that does everything, with the step times of DistServe's engine or of vLLM's."""
    return replace(
        _BASE,
        preset=preset,
        tensor_parallel=num_gpus,
        num_blocks=_KV_TOKENS[num_gpus] // _BLOCK_SIZE,
        step_time=DistServeModel("opt-13b", num_gpus, engine=engine),
        max_num_batched_tokens=budget,
    )


_BASE = SimulationConfig(model="opt-13b", gpu="a100-80g", max_model_len=2048, prefix_caching=False)


def attainment(config: SimulationConfig, trace: Trace, ttft_s: float) -> float:
    """Return the share of requests that have their first token in time and 0.1 s per token after it."""
    report = build_simulation(replace(config, slo=Slo(ttft_s=ttft_s, tpot_s=0.1))).run(trace)
    return report.slo_attainment or 0.0


def measure(config: SimulationConfig, num_gpus: int, num_requests: int, ttft_s: float, resolution: float) -> Numbers:
    """Return the largest rate per GPU at which 90 % meet both targets, over a long run."""
    trace = poisson_trace("distserve", DISTSERVE_SHAREGPT, num_requests)

    def meets(rate_rps: float) -> bool:
        return attainment(config, at_rps(trace, rate_rps), ttft_s) >= _REQUIRED_ATTAINMENT

    return {"rps_per_gpu": capacity(meets, 1.5 * num_gpus, resolution=resolution) / num_gpus}


def their_search(draw: int) -> Numbers:
    """Return what the authors' search gives: 300 requests, rates per GPU bisected from [0, 5] until 0.25 apart.

    Arrivals are theirs, request by request: NumPy's legacy generator with seed 0. Which 300 prompts they drew is not
    known; draw 0 are the first 300 of their own sample, others are drawn from all of it.
    """
    if draw:
        lengths = poisson_trace("draw", DISTSERVE_SHAREGPT, _THEIR_NUM_REQUESTS, seed=draw)
    else:
        lengths = poisson_trace("draw", DISTSERVE_SHAREGPT.first, _THEIR_NUM_REQUESTS)
    low, high, found = 0.0, _THEIR_MAX_RPS_PER_GPU, 0.0
    while high - low > _THEIR_RESOLUTION_RPS:
        per_gpu = (low + high) / 2
        gaps_s = np.random.RandomState(0).gamma(1.0, 1 / (3 * per_gpu), _THEIR_NUM_REQUESTS - 1)
        trace = replace(lengths, arrival_s=np.concatenate([[0.0], np.cumsum(gaps_s)]))
        if attainment(disaggregated(), trace, _TTFT_S["readme"]) >= _REQUIRED_ATTAINMENT:
            low = found = per_gpu
        else:
            high = per_gpu
    return {"rps_per_gpu": found}


def _jobs(effort: Effort) -> Mapping[str, Callable[[], Numbers]]:
    num_requests, resolution, num_draws = (200, 0.1, 1) if effort.quick else (400, 0.04, 8)
    jobs: dict[str, Callable[[], Numbers]] = {}
    for name, ttft_s in _TTFT_S.items():
        run = partial(measure, num_requests=num_requests, ttft_s=ttft_s, resolution=resolution)
        jobs[f"distserve/{name}"] = partial(run, disaggregated(), 3)
        for n in _KV_TOKENS:
            jobs[f"vllm/{n}/{name}"] = partial(run, colocated("vllm", n, "vllm", None), n)
            if name == "readme":
                jobs[f"same engine/{n}"] = partial(run, colocated("vllm", n, "distserve", None), n)
                for budget in _BUDGETS:
                    jobs[f"sarathi/{n}/{budget}"] = partial(run, colocated("sarathi", n, "distserve", budget), n)
    jobs.update({f"draw/{draw}": partial(their_search, draw) for draw in range(num_draws)})
    return jobs


def _conclude(results: Mapping[str, Numbers]) -> Conclusion:
    of = {name: numbers["rps_per_gpu"] for name, numbers in results.items()}
    draws = sorted(found for name, found in of.items() if name.startswith("draw/"))
    long_run = of["distserve/readme"]
    least_factor = ratio(of["distserve/paper"], max(of[f"vllm/{n}/paper"] for n in _KV_TOKENS))
    tuned_name, tuned = best(results, [f"sarathi/{n}/{b}" for n in _KV_TOKENS for b in _BUDGETS], "rps_per_gpu")
    same = {n: of[f"same engine/{n}"] for n in _KV_TOKENS}
    figures = (
        Figure(
            what="requests/s per GPU, prefill on 2 and decode on 1 (the authors' search, first draw)",
            low=1.56,
            high=1.56,
            ours=of["draw/0"],
            tolerance=0.1,
        ),
        Figure(
            what="the same by our search over 400 requests",
            low=1.56,
            high=1.56,
            ours=long_run,
            tolerance=0.1,
        ),
        Figure(
            what="factor over vLLM on conversations (vLLM on its best number of GPUs)",
            low=2.0,
            high=4.6,
            ours=least_factor,
            unit="x",
        ),
    )
    colocated_table = Table(
        title="One replica that does both, requests/s per GPU by number of GPUs (TTFT 0.2 s unless said)",
        columns=("system", *map(str, _KV_TOKENS)),
        rows=(
            ("vLLM's policy, vLLM's step times", *(number(of[f"vllm/{n}/readme"]) for n in _KV_TOKENS)),
            ("the same, TTFT 0.25 s as in the paper", *(number(of[f"vllm/{n}/paper"]) for n in _KV_TOKENS)),
            ("vLLM's policy, DistServe's step times", *(number(same[n]) for n in _KV_TOKENS)),
            *(
                (f"chunks of {b}, DistServe's step times", *(number(of[f"sarathi/{n}/{b}"]) for n in _KV_TOKENS))
                for b in _BUDGETS
            ),
        ),
    )
    at_most = sum(found <= 1.5625 for found in draws)
    draws_table = Table(
        title="The authors' search over other draws of 300 prompts, requests/s per GPU",
        columns=("draws", "least", "median", "largest", "at most 1.56"),
        rows=((str(len(draws)), number(draws[0]), number(float(np.median(draws))), number(draws[-1]), str(at_most)),),
    )
    _, gpus, budget = tuned_name.split("/")
    best_n = max(same, key=lambda n: same[n])
    why = (
        "1.56 is 5 * 5/16, a point of the search's grid, from one minute of one draw of prompts: other draws give "
        f"{number(draws[0])} to {number(draws[-1])}, {at_most} of {len(draws)} at most 1.56, and 400 requests give "
        f"{number(long_run)}. The factor over vLLM is that of two engines as much as of two policies. With vLLM's "
        "measured step times on one GPU, as the paper ran it, a tenth of the prompts takes longer than the "
        f"target by itself, so no rate meets it; on its best number of GPUs the factor is {number(least_factor)}. "
        f"With the step times of DistServe for both, one replica on {best_n} GPUs reaches {number(same[best_n])} "
        f"with vLLM's policy and {number(tuned)} with chunks of {budget} (on {gpus} GPUs), against "
        f"{number(long_run)}: decodes meet 0.1 s per token by far, so separating them buys little here."
    )
    return Conclusion(figures=figures, tables=(colocated_table, draws_table), why=why)


CLAIM = Claim(
    name="distserve",
    title="DistServe: 1.56 requests/s per GPU within both targets, 2.0 to 4.6 times vLLM on conversations",
    source="README of the simulator in LLMServe/DistServe; arXiv 2401.09670 (OSDI 2024), section 6",
    workload=(
        "OPT-13B, ShareGPT: 438 pairs of lengths from the authors' own sample (762 prompt and 176 output tokens "
        "on average; the paper gives 755.5 and 200.3 for all), Poisson arrivals."
    ),
    objective=(
        "90 % of the requests have their first token in 0.2 s (0.25 s in the paper) and 0.1 s per token after it."
    ),
    method=(
        "Step times are the authors' coefficients for A100s (`perfmodel.distserve`), KV memory is that of their "
        "simulator, one prefill replica on two GPUs and one decode replica on one, KV pulled over NVLink. Our "
        "search serves 400 requests at each rate. The chunked-prefill baseline needs steps that mix prompts and "
        "decodes, for which there are no coefficients: ours are taken to read the weights once."
    ),
    jobs=_jobs,
    conclude=_conclude,
)
