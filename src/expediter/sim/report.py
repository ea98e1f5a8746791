"""The result of a simulation in figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from expediter.core.slo import Slo
from expediter.sim.distribution import Distribution, Sample
from expediter.sim.failures import FailureTotals
from expediter.sim.metrics import Groups, MetricsCollector, Outcome, RequestCounts, Tally
from expediter.sim.replica import SimulatedReplica
from expediter.sim.stores import StoreTotals, TierName
from expediter.sim.timeline import Timeline, TimelineRecorder
from expediter.sim.trace import TraceSummary
from expediter.sim.transfers import TransferTotals

CURVE_PERCENTS: Final = (*map(float, range(0, 100, 2)), 99.0, 99.5, 99.9, 100.0)
"""At which percents of the requests the curves are given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A whole distribution, to be drawn.

    Attributes:
        share_of_arrived: requests that have this value, as a share of all arrived: the curve ends there.
        percentiles: the values at `CURVE_PERCENTS` of those requests; empty if there are none.
    """

    share_of_arrived: float
    percentiles: tuple[float, ...]

    @classmethod
    def of(cls, sample: Sample, num_arrived: int) -> Curve:
        """Return the curve of values that `num_arrived` requests gave."""
        if not len(sample):
            return cls(share_of_arrived=0.0, percentiles=())
        return cls(share_of_arrived=len(sample) / num_arrived, percentiles=tuple(sample.percentiles(CURVE_PERCENTS)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Distributions of all requests, in seconds."""

    ttft_s: Curve
    tpot_s: Curve
    e2e_s: Curve


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """The requests of one SLO class or of one tenant; fields as in `Report`."""

    arrived: int
    finished: int
    slo_attainment: float
    goodput_rps: float | None
    ttft_s: Distribution
    tpot_s: Distribution
    e2e_s: Distribution
    queueing_s: Distribution
    prefix_hit_rate: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionReport:
    """What the schedulers decided.

    Attributes:
        held_s: seconds that requests waited, all together, by what held them (`core.explanation.Reason`).
        preemptions: by cause.
        budget_used_share: mean share of the token budget that a step with prompts used.
        step_time_actual_s, step_time_predicted_s: of the steps that schedulers learned from, if they did; summed.
        step_time_error: mean absolute error of those predictions as a share of the actual time.
    """

    held_s: Mapping[str, float]
    preemptions: Mapping[str, int]
    budget_used_share: float | None
    step_time_actual_s: float
    step_time_predicted_s: float
    step_time_error: float | None


NO_STORES: Final[Mapping[str, StoreTotals]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolReport:
    """The replicas of one pool.

    Attributes:
        role: what they are for.
        busy_share: of the simulated time, how much their steps took; the mean over the replicas.
        num_steps: of all of them.
    """

    role: str
    replicas: int
    num_gpus: int
    busy_share: float | None
    num_steps: int

    @classmethod
    def of(cls, replicas: Sequence[SimulatedReplica], num_gpus: int, simulated_s: float, end_s: float) -> PoolReport:
        """Return the figures of replicas after a simulation that ended at `end_s`."""
        busy_s = sum(replica.busy_s(end_s) for replica in replicas)
        return cls(
            role=replicas[0].role,
            replicas=len(replicas),
            num_gpus=num_gpus,
            busy_share=busy_s / (len(replicas) * simulated_s) if simulated_s > 0 else None,
            num_steps=sum(replica.num_steps for replica in replicas),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a simulation says. Rates are over `simulated_s`; None stands for what has no value, never NaN.

    Attributes:
        requests: arrived = finished + rejected + unservable + aborted, checked.
        ttft_s, tpot_s, e2e_s, queueing_s: seconds; TPOT leaves out outputs of one token, E2E what did not finish.
            Percentiles of more than 100,000 requests are within 0.1 % (`sim.distribution`).
        slo: the targets; `slo_attainment` is the share of all arrived requests that finished and met them, so a
            rejected request misses. Goodput is such requests per second, over all GPUs and per GPU.
        weighted_attainment: the same share by the requests' `value`.
        missed: requests that missed their targets, by the first that they missed: `served` (not finished), `ttft`,
            `tpot`, `e2e`.
        classes, tenants: by name, if any request has one; "" are the others.
        decisions: what the schedulers did.
        cost_per_hour, cost_per_million_output_tokens: US dollars for all GPUs; None if their prices are not known.
        prefix_hit_rate: prompt tokens reused from the cache at first admission / prompt tokens admitted.
        num_steps: forward passes of all replicas, each step of a jump counted.
        simulated_s: first arrival to last event, in virtual time.
        wall_s: how long the simulation took; the only figure that differs from run to run.
        trace: what was asked for, if a trace was.
        configuration: what was simulated.
        pools: the replicas, pool by pool.
        transfers: of KV between replicas, if there could be any.
        failures: what went wrong, if anything could.
        num_migrations: running requests that moved to a replica with more room.
        stores: what tiers of storage were good for, by name, if there are any.
        timeline, curves: how it went over time, and whole distributions; if they were asked for.
    """

    requests: RequestCounts
    ttft_s: Distribution
    tpot_s: Distribution
    e2e_s: Distribution
    queueing_s: Distribution
    slo: Slo
    slo_attainment: float | None
    weighted_attainment: float | None
    missed: Mapping[str, int]
    goodput_rps: float | None
    goodput_rps_per_gpu: float | None
    output_tokens_per_s: float | None
    cost_per_hour: float | None
    cost_per_million_output_tokens: float | None
    prefix_hit_rate: float | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int
    classes: Mapping[str, GroupReport]
    tenants: Mapping[str, GroupReport]
    decisions: DecisionReport
    num_steps: int
    num_gpus: int
    simulated_s: float
    wall_s: float
    trace: TraceSummary | None
    configuration: dict[str, Any]
    pools: Sequence[PoolReport]
    transfers: TransferTotals | None
    failures: FailureTotals | None
    num_migrations: int
    stores: Mapping[str, StoreTotals]
    timeline: Timeline | None
    curves: Curves | None

    def to_json(self) -> bytes:
        """Return the report as indented JSON with a final newline."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


def build_report(
    metrics: MetricsCollector,
    *,
    slo: Slo,
    num_gpus: int,
    cost_per_hour: float | None = None,
    num_steps: int,
    wall_s: float,
    decisions: DecisionReport,
    trace: TraceSummary | None,
    configuration: dict[str, Any],
    timeline: TimelineRecorder | None = None,
    pools: Sequence[PoolReport] = (),
    transfers: TransferTotals | None = None,
    failures: FailureTotals | None = None,
    num_migrations: int = 0,
    stores: Mapping[str, StoreTotals] | Mapping[TierName, StoreTotals] = NO_STORES,
) -> Report:
    """Return the report on a simulation that has ended; with timeline and curves if there is a `timeline`.

    Raises:
        InvariantError: a request is unaccounted for.
    """
    counts, total = metrics.counts(), metrics.total
    simulated_s = metrics.last_event_s - (metrics.first_event_s or 0.0)
    goodput = total.num_met / simulated_s if simulated_s > 0 else None
    output_tokens_per_s = total.num_output_tokens / simulated_s if simulated_s > 0 else None
    return Report(
        requests=counts,
        ttft_s=total.ttft_s.distribution(),
        tpot_s=total.tpot_s.distribution(),
        e2e_s=total.e2e_s.distribution(),
        queueing_s=total.queueing_s.distribution(),
        slo=slo,
        slo_attainment=total.num_met / counts.arrived if counts.arrived else None,
        weighted_attainment=total.value_met / total.value if total.value else None,
        missed=dict(sorted(total.missed.items())),
        goodput_rps=goodput,
        goodput_rps_per_gpu=None if goodput is None else goodput / num_gpus,
        output_tokens_per_s=output_tokens_per_s,
        cost_per_hour=cost_per_hour,
        cost_per_million_output_tokens=(
            cost_per_hour / 3600 / output_tokens_per_s * 1e6
            if cost_per_hour is not None and output_tokens_per_s
            else None
        ),
        prefix_hit_rate=_hit_rate(total),
        num_prompt_tokens=total.num_prompt_tokens,
        num_output_tokens=total.num_output_tokens,
        num_preemptions=sum(metrics.preemptions.values()),
        classes=_groups(metrics.classes, simulated_s),
        tenants=_groups(metrics.tenants, simulated_s),
        decisions=decisions,
        num_steps=num_steps,
        num_gpus=num_gpus,
        simulated_s=simulated_s,
        wall_s=wall_s,
        trace=trace,
        configuration=configuration,
        pools=pools,
        transfers=transfers,
        failures=failures,
        num_migrations=num_migrations,
        stores={str(tier): totals for tier, totals in stores.items()},
        timeline=None if timeline is None else timeline.finish(metrics.last_event_s),
        curves=None if timeline is None else _curves(total),
    )


def _curves(tally: Tally) -> Curves:
    return Curves(
        ttft_s=Curve.of(tally.ttft_s, tally.num_arrived),
        tpot_s=Curve.of(tally.tpot_s, tally.num_arrived),
        e2e_s=Curve.of(tally.e2e_s, tally.num_arrived),
    )


def _groups(groups: Groups, simulated_s: float) -> dict[str, GroupReport]:
    return {name: _group(groups.tallies[name], simulated_s) for name in sorted(groups.tallies)}


def _group(tally: Tally, simulated_s: float) -> GroupReport:
    return GroupReport(
        arrived=tally.num_arrived,
        finished=tally.num_ended[Outcome.FINISHED],
        slo_attainment=tally.num_met / tally.num_arrived,
        goodput_rps=tally.num_met / simulated_s if simulated_s > 0 else None,
        ttft_s=tally.ttft_s.distribution(),
        tpot_s=tally.tpot_s.distribution(),
        e2e_s=tally.e2e_s.distribution(),
        queueing_s=tally.queueing_s.distribution(),
        prefix_hit_rate=_hit_rate(tally),
    )


def _hit_rate(tally: Tally) -> float | None:
    return tally.num_cached_tokens / tally.num_admitted_tokens if tally.num_admitted_tokens else None
