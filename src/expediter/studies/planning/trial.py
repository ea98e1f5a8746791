"""One simulation of a set-up, and what the planner wants to know of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np

from expediter.assembly.simulation import SimulationConfig, build_simulation
from expediter.assembly.trace_generation import GenerationConfig, generated_trace
from expediter.sim.distribution import Distribution
from expediter.sim.metrics import Outcome, RequestRecord
from expediter.sim.report import Report
from expediter.sim.trace import Trace
from expediter.studies.planning.coverage import Coverage, StepWatch
from expediter.studies.runs import TraceSpec

Traffic = TraceSpec | GenerationConfig

_TARGETS: Final = ("ttft", "tpot", "e2e")


@lru_cache(maxsize=4)  # a worker serves the same few traces all the time
def load_traffic(traffic: Traffic, seed: int) -> Trace:
    """Return the requests; each seed above 0 is another draw of the same traffic.

    Raises:
        ConfigurationError: the trace cannot be read or generated.
    """
    if isinstance(traffic, TraceSpec):
        return replace(traffic, seed=traffic.seed + seed, jitter=traffic.jitter or seed > 0).load()
    return generated_trace(replace(traffic, seed=traffic.seed + seed))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What to simulate.

    Args:
        config: the set-up.
        traffic: the requests.
        attainment: share of them that is to meet its targets; slacks are taken at it.
        limit: only the first so many.
        rate_scale: arrival rate as a multiple of the traffic's own.
        seed: which draw of the traffic.
    """

    config: SimulationConfig
    traffic: Traffic
    attainment: float
    limit: int | None = None
    rate_scale: float = 1.0
    seed: int = 0


class _Lost(Exception):  # noqa: N818 - an outcome, not an error
    """More requests have missed their targets than may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a trial showed.

    Attributes:
        num_requests: sequences that arrived.
        attainment: share of them that met all their targets.
        attainment_by_class: the same by SLO class, if there are any.
        missed: requests that missed each target, and those that were `refused` or `unservable`; one may miss several.
        slack: by target, 1 less the share of it that is used up at the attainment's quantile; below 0 it is missed.
        ttft_s, tpot_s, e2e_s: seconds.
        late_queueing_share: of requests with a late first token, the share of their TTFT before they were scheduled.
        held_s: seconds that requests waited, all together, by what held them.
        num_preemptions: of all requests.
        budget_used_share: of the token budget, in steps with prompts.
        prefix_hit_rate: prompt tokens that came from the cache.
        goodput_rps, simulated_s: as in `Report`.
        prompt_time_share: of the time of all steps, the share of those that compute prompts.
        decode_step_use: of requests with late later tokens, the share of their TPOT target that the mean step without
            prompts takes.
        peak_kv_use: largest share of a replica's KV blocks that requests held.
        room_share, network_share: of the time between first and last tokens, how much requests waited for room on the
            replica that goes on with them, and for their KV to come.
        coverage: how far the steps lie outside what their times were fitted to.
    """

    num_requests: int
    attainment: float
    attainment_by_class: Mapping[str, float]
    missed: Mapping[str, int]
    slack: Mapping[str, float]
    ttft_s: Distribution
    tpot_s: Distribution
    e2e_s: Distribution
    late_queueing_share: float | None
    held_s: Mapping[str, float]
    num_preemptions: int
    budget_used_share: float | None
    prefix_hit_rate: float | None
    goodput_rps: float | None
    simulated_s: float
    prompt_time_share: float
    decode_step_use: float | None
    peak_kv_use: float
    room_share: float
    network_share: float
    coverage: Coverage


def measure(trial: Trial) -> Measured:
    """Simulate and measure.

    Raises:
        ConfigurationError: the traffic or the configuration cannot be used.
    """
    return _measured(trial, None)


def measure_unless_lost(trial: Trial) -> Measured | None:
    """Simulate and measure, but give up as soon as more requests have missed their targets than may: then None.

    Raises:
        ConfigurationError: the traffic or the configuration cannot be used.
    """
    try:
        return _measured(trial, trial.attainment)
    except _Lost:
        return None


def _measured(trial: Trial, attainment: float | None) -> Measured:
    """Measure a trial; raises _Lost when it is certain that its attainment stays below the one given."""
    trace = load_traffic(trial.traffic, trial.seed)
    trace = trace if trial.limit is None else trace.take(trial.limit)
    watch = StepWatch(trial.config.engine)
    simulation = build_simulation(replace(trial.config, timeline=True))
    simulation.watch_steps(watch.add)
    records: list[RequestRecord] = []
    simulation.metrics.on_end.append(records.append)
    if attainment is not None:
        simulation.metrics.on_end.append(_giving_up(trace, attainment))
    report = simulation.run(trace if trial.rate_scale == 1 else trace.at_rate(trial.rate_scale))
    assert report.slo_attainment is not None  # a trace has requests
    assert report.timeline is not None
    waits = _handoff_shares(report, records)
    return Measured(
        num_requests=len(records),
        attainment=report.slo_attainment,
        attainment_by_class={name: group.slo_attainment for name, group in report.classes.items()},
        missed=_missed(records),
        slack=_slack(records, trial.attainment),
        ttft_s=report.ttft_s,
        tpot_s=report.tpot_s,
        e2e_s=report.e2e_s,
        late_queueing_share=_late_queueing_share(records),
        held_s=report.decisions.held_s,
        num_preemptions=report.num_preemptions,
        budget_used_share=report.decisions.budget_used_share,
        prefix_hit_rate=report.prefix_hit_rate,
        goodput_rps=report.goodput_rps,
        simulated_s=report.simulated_s,
        prompt_time_share=watch.prompt_s / watch.total_s if watch.total_s else 0.0,
        decode_step_use=_decode_step_use(watch, records),
        peak_kv_use=max(report.timeline.kv_used_share_highest),
        room_share=waits[0],
        network_share=waits[1],
        coverage=watch.coverage,
    )


def num_may_miss(num_requests: int, attainment: float) -> int:
    """Return how many requests may miss their targets."""
    return math.floor((1 - attainment) * num_requests + 1e-9)


def _giving_up(trace: Trace, attainment: float) -> Callable[[RequestRecord], None]:
    num_requests = len(trace) if trace.num_sequences is None else int(trace.num_sequences.sum())
    num_left = num_may_miss(num_requests, attainment)

    def ended(record: RequestRecord) -> None:
        nonlocal num_left
        num_left -= not record.is_met
        if num_left < 0:
            raise _Lost

    return ended


def _used(record: RequestRecord, name: str) -> float | None:
    """Return the share of a target that a request used up; None if it has no such target, or could not miss it."""
    target = getattr(record.slo, f"{name}_s")
    if target is None:
        return None
    value = getattr(record, f"{name}_s")
    if value is None:
        is_done = record.e2e_s is not None  # an output of one token has no TPOT
        return None if is_done else float("inf")
    return float(value) / float(target)


def _missed(records: Sequence[RequestRecord]) -> dict[str, int]:
    missed = dict.fromkeys((*_TARGETS, "refused", "unservable"), 0)
    for record in records:
        if record.e2e_s is None:
            missed["unservable" if record.outcome is Outcome.UNSERVABLE else "refused"] += 1
            continue
        for name in _TARGETS:
            missed[name] += (_used(record, name) or 0.0) > 1
    return missed


def _slack(records: Sequence[RequestRecord], attainment: float) -> dict[str, float]:
    slack = {}
    for name in _TARGETS:
        used = [share for record in records if (share := _used(record, name)) is not None]
        if used:
            slack[name] = 1 - float(np.quantile(used, attainment, method="higher"))
    return slack


def _decode_step_use(watch: StepWatch, records: Sequence[RequestRecord]) -> float | None:
    targets = [r.slo.tpot_s for r in records if r.slo.tpot_s is not None and (_used(r, "tpot") or 0.0) > 1]
    if not targets or not watch.num_decodes:
        return None
    return watch.decode_s / watch.num_decodes / (sum(targets) / len(targets))


def _handoff_shares(report: Report, records: Sequence[RequestRecord]) -> tuple[float, float]:
    """Return the shares of the time between first and last tokens that go by waiting for room and for the network."""
    later_s = sum(r.e2e_s - r.ttft_s for r in records if r.e2e_s is not None and r.ttft_s is not None)
    totals = report.transfers
    if totals is None or not later_s:
        return 0.0, 0.0
    return (totals.exposed_s - totals.network_s) / later_s, totals.network_s / later_s


def _late_queueing_share(records: Sequence[RequestRecord]) -> float | None:
    late = [record for record in records if (_used(record, "ttft") or 0.0) > 1]
    total = sum(record.ttft_s for record in late if record.ttft_s is not None)
    queued = sum(record.queueing_s for record in late if record.ttft_s is not None and record.queueing_s is not None)
    return queued / total if total else None
