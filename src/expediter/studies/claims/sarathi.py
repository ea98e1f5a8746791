"""Sarathi-Serve: how many more requests per second chunked prefill serves under a limit on gaps between tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from expediter.assembly.simulation import SimulationConfig, build_simulation
from expediter.perfmodel.constants import engine_named
from expediter.perfmodel.hardware import gpu_named
from expediter.perfmodel.roofline import RooflineModel
from expediter.perfmodel.shapes import shape_named
from expediter.studies.claims.capacity import capacity
from expediter.studies.claims.frame import Claim, Conclusion, Effort, Figure, Numbers, Table, best, number
from expediter.studies.claims.token_gaps import GapRecorder
from expediter.studies.claims.workloads import ARXIV, SHAREGPT4, LengthsByQuantiles, at_rps, poisson_trace

_MAX_SCHEDULING_DELAY_S = 2.0
_MAX_NUM_SEQS = 128
_BUDGETS = (256, 512, 1024, 2048)
_PAPERS_BUDGET = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A model on its GPUs, and its limit on the 99th percentile of gaps between tokens.

    Args:
        published: factor over vLLM on conversations.
        start_rps: where the capacity search begins (the rates at which the authors' own search begins).
    """

    model: str
    tensor_parallel: int
    max_gap_s: float
    published: float
    start_rps: float


SETTINGS = {
    "mistral-7b": Setting(model="mistral-7b", tensor_parallel=1, max_gap_s=0.1, published=2.6, start_rps=4.0),
    "yi-34b": Setting(model="yi-34b", tensor_parallel=2, max_gap_s=0.2, published=3.7, start_rps=2.0),
}
WORKLOADS = {"chat": SHAREGPT4, "arxiv": ARXIV}


def measure(
    setting: Setting,
    preset: str,
    budget: int | None,
    lengths: LengthsByQuantiles,
    num_requests: int,
    *,
    engine: str = "vllm",
    max_gap_s: float | None = None,
) -> Numbers:
    """Return the capacity in requests per second: median scheduling delay and P99 gap between tokens within limits."""
    trace = poisson_trace("sarathi", lengths, num_requests)
    limit_s = setting.max_gap_s if max_gap_s is None else max_gap_s

    def meets(rate_rps: float) -> bool:
        recorder = GapRecorder(
            RooflineModel(
                shape_named(setting.model), gpu_named("a100-80g"), setting.tensor_parallel, engine=engine_named(engine)
            )
        )
        config = SimulationConfig(
            preset=preset,
            model=setting.model,
            gpu="a100-80g",
            tensor_parallel=setting.tensor_parallel,
            max_num_seqs=_MAX_NUM_SEQS,
            max_model_len=lengths.max_tokens,
            max_num_batched_tokens=budget,
            prefix_caching=False,
            step_time=recorder,
            knows_step_time=False,
            jumps=False,
        )
        report = build_simulation(config).run(at_rps(trace, rate_rps))
        delay_s = report.queueing_s.p50
        assert delay_s is not None
        return delay_s <= _MAX_SCHEDULING_DELAY_S and recorder.quantile_s(0.99) <= limit_s

    return {"capacity_rps": capacity(meets, setting.start_rps)}


def _jobs(effort: Effort) -> Mapping[str, Callable[[], Numbers]]:
    num_requests = effort.choose(512, 64)
    jobs: dict[str, Callable[[], Numbers]] = {}
    for name, setting in SETTINGS.items():
        for workload, lengths in WORKLOADS.items():
            if workload == "arxiv" and effort.quick:
                continue
            jobs[f"{name}/{workload}/vllm"] = partial(measure, setting, "vllm", None, lengths, num_requests)
            for budget in _BUDGETS:
                jobs[f"{name}/{workload}/{budget}"] = partial(measure, setting, "sarathi", budget, lengths, num_requests)
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
            if workload == "chat":
                figures.append(
                    Figure(
                        what=f"{name}, conversations: capacity over vLLM",
                        low=setting.published,
                        high=setting.published,
                        ours=papers / vllm if vllm else float("inf"),
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
    return Conclusion(figures=tuple(figures), tables=(table,))


CLAIM = Claim(
    name="sarathi",
    title="Sarathi-Serve: 2.6 and 3.7 times vLLM's capacity under a strict limit on gaps between tokens",
    source="arXiv 2403.02310 (OSDI 2024), section 5.1 and figure 10",
    workload="",
    objective="",
    method="",
    jobs=_jobs,
    conclude=_conclude,
)
