"""QoServe (Niyama): goodput with three classes of targets, against first come first served and earliest deadline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from expediter.assembly.simulation import SimulationConfig, build_simulation
from expediter.core.request import RequestState
from expediter.core.slo import Slo
from expediter.scheduling.lazy_heap import Key
from expediter.scheduling.ordering.base import KeyOrdering
from expediter.sim.trace import Trace
from expediter.studies.claims.capacity import capacity
from expediter.studies.claims.frame import Claim, Conclusion, Effort, Figure, Numbers, Table, best, number, ratio
from expediter.studies.claims.workloads import AZURE_CODE, at_rps, poisson_trace

_REQUIRED_ATTAINMENT = 0.99
_BUDGETS = (256, 512)
_PAPERS_BUDGET = 256
_START_RPS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Horizon:
    """How long requests arrive, and the long targets; the paper's long targets go with an hour of arrivals.

    A shorter run with long targets that are shorter in proportion has the same room to put work off. Seconds.
    """

    duration_s: float
    middle_s: float
    long_s: float

    @classmethod
    def shortened(cls, times: float) -> Horizon:
        """Return the paper's targets and an hour, all divided by `times`."""
        return cls(duration_s=3600 / times, middle_s=600 / times, long_s=1800 / times)


class QoServeOrder(KeyOrdering):
    """Arrival + target of the first token, or of the end, + 8 ms for each prompt token still to compute.

    Prompts under way share the budget in the same order. Bound: the targets themselves. Source: QoServe (2503.22562),
    with its weight for a loaded replica.
    """

    interleaves = True

    def key(self, state: RequestState, now_s: float) -> Key:  # noqa: ARG002 - depends on the request alone
        slo = state.request.slo
        target_s = slo.ttft_s if slo.ttft_s is not None else slo.e2e_s
        assert target_s is not None
        left = state.num_known_tokens - state.num_computed_tokens
        return (state.request.arrival_s + target_s + 0.008 * left,)


_HARDWARE = SimulationConfig(model="llama-3.1-8b", gpu="a100-80g", max_model_len=16384, prefix_caching=False)
SYSTEMS: Mapping[str, SimulationConfig] = {
    **{f"fcfs/{b}": replace(_HARDWARE, preset="sarathi", max_num_batched_tokens=b) for b in _BUDGETS},
    **{
        f"edf/{b}": replace(_HARDWARE, preset="sarathi", max_num_batched_tokens=b, ordering="earliest_deadline")
        for b in _BUDGETS
    },
    "qoserve": replace(_HARDWARE, preset="sarathi", max_num_batched_tokens=8192, budget="slack", ordering=QoServeOrder),
    "expediter": replace(_HARDWARE, preset="expediter"),
}


def requests(rate_rps: float, horizon: Horizon, *, seed: int = 0) -> Trace:
    """Return Azure's code requests at that rate, a third each with TTFT 6 s and TPOT 50 ms, and the two long "
    "targets."""
    num_requests = max(8, round(rate_rps * horizon.duration_s))
    targets = (Slo(ttft_s=6.0, tpot_s=0.05), Slo(e2e_s=horizon.middle_s), Slo(e2e_s=horizon.long_s))
    classes = np.random.default_rng(seed + 1).integers(0, 3, num_requests).tolist()
    trace = poisson_trace("qoserve", AZURE_CODE, num_requests, seed=seed)
    return at_rps(replace(trace, slos=tuple(targets[each] for each in classes)), rate_rps)


def measure(config: SimulationConfig, horizon: Horizon, resolution: float) -> Numbers:
    """Return the largest rate at which 99 % of the requests meet their targets."""

    def meets(rate_rps: float) -> bool:
        attainment = build_simulation(config).run(requests(rate_rps, horizon)).slo_attainment
        return attainment is not None and attainment >= _REQUIRED_ATTAINMENT

    return {"capacity_rps": capacity(meets, _START_RPS, resolution=resolution)}


def _jobs(effort: Effort) -> Mapping[str, Callable[[], Numbers]]:
    horizon = Horizon.shortened(effort.choose(24, 120))
    resolution = 0.2 if effort.quick else 0.04
    jobs: dict[str, Callable[[], Numbers]] = {
        name: partial(measure, config, horizon, resolution) for name, config in SYSTEMS.items()
    }
    if not effort.quick:
        # Nothing can be put off: the long targets are as short as the interactive one.
        urgent = replace(horizon, middle_s=6.0, long_s=6.0)
        for name in (f"fcfs/{_PAPERS_BUDGET}", f"edf/{_PAPERS_BUDGET}", "qoserve"):
            jobs[f"urgent/{name}"] = partial(measure, SYSTEMS[name], urgent, resolution)
    return jobs


def _conclude(results: Mapping[str, Numbers]) -> Conclusion:
    of = {name: numbers["capacity_rps"] for name, numbers in results.items()}
    fcfs, edf = of[f"fcfs/{_PAPERS_BUDGET}"], of[f"edf/{_PAPERS_BUDGET}"]
    figures = (
        Figure(
            what="goodput over first come first served", low=1.5, high=2.4, ours=ratio(of["qoserve"], fcfs), unit="x"
        ),
        Figure(
            what="goodput over earliest deadline first", low=1.2, high=1.4, ours=ratio(of["qoserve"], edf), unit="x"
        ),
    )
    rows = []
    for kind, words in (("fcfs", "first come first served"), ("edf", "earliest deadline first")):
        tuned_name, tuned = best(results, [f"{kind}/{b}" for b in _BUDGETS], "capacity_rps")
        rows.append((words, number(of[f"{kind}/{_PAPERS_BUDGET}"]), number(tuned), tuned_name.split("/")[1]))
    rows.append(("QoServe", number(of["qoserve"]), "-", "dynamic"))
    rows.append(("preset expediter", number(of["expediter"]), "-", "dynamic"))
    tables = [
        Table(
            title="Largest rate at which 99 % of the requests meet their targets, in requests/s",
            columns=("order", f"budget {_PAPERS_BUDGET}", "best fixed budget", "which"),
            rows=tuple(rows),
        )
    ]
    if "urgent/qoserve" in of:
        tables.append(
            Table(
                title="The same if everything is due 6 s after its arrival, so that nothing can be put off",
                columns=("order", "requests/s"),
                rows=(
                    ("first come first served", number(of[f"urgent/fcfs/{_PAPERS_BUDGET}"])),
                    ("earliest deadline first", number(of[f"urgent/edf/{_PAPERS_BUDGET}"])),
                    ("QoServe", number(of["urgent/qoserve"])),
                ),
            )
        )
    return Conclusion(figures=figures, tables=tuple(tables))


CLAIM = Claim(
    name="qoserve",
    title="QoServe: 1.5 to 2.4 times the goodput of arrival order, 1.2 to 1.4 times that of earliest deadline first",
    source="arXiv 2503.22562 (ASPLOS 2026)",
    workload=(
        "Azure's code requests, lengths drawn from the trace, Poisson arrivals. A third each wants its first "
        "token in 6 s and 50 ms per token; its end in 600 s; its end in 1800 s."
    ),
    objective="Goodput is the largest rate at which 99 % of all requests meet their targets.",
    method=(
        "Llama-3.1-8B on a modelled A100. QoServe is its order (arrival + target + 8 ms per prompt token left) "
        "and the slack budget; the baselines are Sarathi's chunks of 256 tokens. Ours is how long requests "
        "arrive: the paper's long targets with an hour of arrivals, both divided by 24, which leaves the room to "
        "put work off as it is."
    ),
    jobs=_jobs,
    conclude=_conclude,
)
