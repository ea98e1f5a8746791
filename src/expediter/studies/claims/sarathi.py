"""Sarathi-Serve: how many more requests per second chunked prefill serves under a limit on gaps between tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from expediter.assembly.simulation import SimulationConfig, build_simulation
from expediter.perfmodel.roofline import DEFAULT_ENGINE
from expediter.studies.claims.capacity import capacity
from expediter.studies.claims.frame import Claim, Conclusion, Effort, Figure, Numbers, Table, best, number, ratio
from expediter.studies.claims.token_gaps import GapRecorder
from expediter.studies.claims.workloads import ARXIV, SHAREGPT4, LengthsByQuantiles, at_rps, poisson_trace

_MAX_SCHEDULING_DELAY_S = 2.0
_MAX_NUM_SEQS = 128
_BUDGETS = (256, 512, 1024)
_PAPERS_BUDGET = 512
_OLD_ENGINE = "eager-a100"
"""An engine of 2023 without CUDA graphs, fitted to Splitwise's measurements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A model on its GPUs, and its limit on the 99th percentile of gaps between tokens.

    Args:
        published: factor over vLLM by workload.
        start_rps: where the capacity search begins (the rates at which the authors' own search begins).
    """

    model: str
    tensor_parallel: int
    max_gap_s: float
    published: Mapping[str, float]
    start_rps: float


SETTINGS = {
    "mistral-7b": Setting(
        model="mistral-7b", tensor_parallel=1, max_gap_s=0.1, published={"chat": 2.6, "arxiv": 1.82}, start_rps=2.0
    ),
    "yi-34b": Setting(
        model="yi-34b", tensor_parallel=2, max_gap_s=0.2, published={"chat": 3.7, "arxiv": 1.69}, start_rps=2.0
    ),
}
WORKLOADS = {"chat": SHAREGPT4, "arxiv": ARXIV}


def measure(
    setting: Setting,
    lengths: LengthsByQuantiles,
    num_requests: int,
    resolution: float,
    preset: str,
    budget: int | None,
    engine: str = DEFAULT_ENGINE,
) -> Numbers:
    """Return the capacity in requests per second: median scheduling delay and P99 gap between tokens within "
    "limits."""
    trace = poisson_trace("sarathi", lengths, num_requests)

    def meets(rate_rps: float) -> bool:
        recorder = GapRecorder()
        config = SimulationConfig(
            preset=preset,
            model=setting.model,
            gpu="a100-80g",
            tensor_parallel=setting.tensor_parallel,
            max_num_seqs=_MAX_NUM_SEQS,
            max_model_len=lengths.max_tokens,
            max_num_batched_tokens=budget,
            prefix_caching=False,
            engine=engine,
        )
        simulation = build_simulation(config)
        simulation.watch_steps(recorder.stepped)
        report = simulation.run(at_rps(trace, rate_rps))
        delay_s = report.queueing_s.p50
        assert delay_s is not None
        return delay_s <= _MAX_SCHEDULING_DELAY_S and recorder.quantile_s(0.99) <= setting.max_gap_s

    return {"capacity_rps": capacity(meets, setting.start_rps, resolution=resolution)}


def _jobs(effort: Effort) -> Mapping[str, Callable[[], Numbers]]:
    num_requests, resolution = (120, 0.1) if effort.quick else (400, 0.03)
    settings, workloads = (["mistral-7b"], ["chat"]) if effort.quick else (SETTINGS, WORKLOADS)
    jobs: dict[str, Callable[[], Numbers]] = {}
    for name in settings:
        for workload in workloads:
            run = partial(measure, SETTINGS[name], WORKLOADS[workload], num_requests, resolution)
            jobs[f"{name}/{workload}/vllm"] = partial(run, "vllm", None)
            jobs.update({f"{name}/{workload}/{budget}": partial(run, "sarathi", budget) for budget in _BUDGETS})
    if not effort.quick:
        run = partial(measure, SETTINGS["yi-34b"], WORKLOADS["chat"], num_requests, resolution, engine=_OLD_ENGINE)
        jobs["old engine/vllm"] = partial(run, "vllm", None)
        jobs[f"old engine/{_PAPERS_BUDGET}"] = partial(run, "sarathi", _PAPERS_BUDGET)
    return jobs


def _conclude(results: Mapping[str, Numbers]) -> Conclusion:
    figures, rows = [], []
    for name, setting in SETTINGS.items():
        for workload in WORKLOADS:
            if f"{name}/{workload}/vllm" not in results:
                continue
            vllm = results[f"{name}/{workload}/vllm"]["capacity_rps"]
            budgets = [f"{name}/{workload}/{budget}" for budget in _BUDGETS]
            papers = results[f"{name}/{workload}/{_PAPERS_BUDGET}"]["capacity_rps"]
            tuned_name, tuned = best(results, budgets, "capacity_rps")
            published = setting.published[workload]
            figures.append(
                Figure(
                    what=f"{name}, {workload}: capacity over vLLM",
                    low=published,
                    high=published,
                    ours=ratio(papers, vllm),
                    unit="x",
                )
            )
            rows.append(
                (f"{name}, {workload}", number(vllm), number(papers), number(tuned), tuned_name.rsplit("/", 1)[1])
            )
    table = Table(
        title="Capacity in requests/s",
        columns=("model, workload", "vllm", f"sarathi {_PAPERS_BUDGET}", "sarathi tuned", "its budget"),
        rows=tuple(rows),
    )
    why = ""
    if "old engine/vllm" in results:
        old_vllm, old = (results[f"old engine/{each}"]["capacity_rps"] for each in ("vllm", _PAPERS_BUDGET))
        why = (
            "The factor hangs on how many prompts take longer than the limit by themselves, and so on the "
            "engine's speed: the figures are with the step times of today's vLLM. With those of an engine of 2023 "
            f"on the same GPUs Yi-34B's capacities for conversations are {number(old_vllm)} and {number(old)}, a "
            f"factor of {number(ratio(old, old_vllm))}."
        )
    return Conclusion(figures=tuple(figures), tables=(table,), why=why)


CLAIM = Claim(
    name="sarathi",
    title="Sarathi-Serve: 2.6 and 3.7 times vLLM's capacity under a strict limit on gaps between tokens",
    source="arXiv 2403.02310 (OSDI 2024), section 5.1, tables 2 and 3, figure 10; search settings from its repository",
    workload=(
        "Lengths of openchat_sharegpt4 (input median 1730, P90 5696; output 415, 834; at most 8192 together) and of "
        "arxiv_summarization (7059, 12985; 208, 371; 16384), lognormal with these quantiles; Poisson arrivals."
    ),
    objective=(
        "Capacity is the largest rate with a median scheduling delay of at most 2 s and a P99 of all gaps between "
        "tokens of at most 0.1 s (Mistral-7B) or 0.2 s (Yi-34B), the paper's strict limits."
    ),
    method=(
        "Mistral-7B on one and Yi-34B on two modelled A100s; at most 128 running requests for both systems; 512 "
        "tokens per step for Sarathi, as published for strict limits; no prefix cache. The arXiv factors are read "
        "from figure 10."
    ),
    jobs=_jobs,
    conclude=_conclude,
)
