"""The result of a simulation in figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np

from expediter.core.slo import Slo
from expediter.sim.metrics import MetricsCollector, Outcome, RequestCounts, RequestRecord
from expediter.sim.timeline import Timeline, TimelineRecorder
from expediter.sim.trace import TraceSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Mean and percentiles (linear interpolation) of a sample; all None if it is empty."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Distribution:
        """Return the distribution of the values that are there."""
        present = np.array([value for value in values if value is not None], np.float64)
        if not len(present):
            return cls(mean=None, p50=None, p90=None, p99=None)
        p50, p90, p99 = np.percentile(present, (50, 90, 99)).tolist()
        return cls(mean=float(present.mean()), p50=p50, p90=p90, p99=p99)


CURVE_SHARES: Final = (*(step / 50 for step in range(50)), 0.99, 0.995, 0.999, 1.0)
"""At which shares of the requests the curves are given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A whole distribution, to be drawn.

    Attributes:
        share_of_arrived: requests that have this value, as a share of all arrived: the curve ends there.
        quantiles: the value at each of `CURVE_SHARES` of those requests; empty if there are none.
    """

    share_of_arrived: float
    quantiles: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Curve:
        """Return the curve of the values that are there."""
        present = np.array([value for value in values if value is not None], np.float64)
        if not len(present):
            return cls(share_of_arrived=0.0, quantiles=())
        quantiles = np.quantile(present, CURVE_SHARES).tolist()
        return cls(share_of_arrived=len(present) / len(values), quantiles=tuple(quantiles))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a simulation says. Rates are over `simulated_s`; None stands for what has no value, never NaN.

    Attributes:
        requests: arrived = finished + rejected + unservable + aborted, checked.
        ttft_s, tpot_s, e2e_s, queueing_s: seconds; TPOT leaves out outputs of one token, E2E what did not finish.
        slo: the targets; `slo_attainment` is the share of all arrived requests that finished and met them, so a
            rejected request misses. Goodput is such requests per second, over all GPUs and per GPU.
        weighted_attainment: the same share by the requests' `value`.
        classes, tenants: by name, if any request has one; "" are the others.
        decisions: what the schedulers did.
        prefix_hit_rate: prompt tokens reused from the cache at first admission / prompt tokens admitted.
        num_steps: forward passes of all replicas, each step of a jump counted.
        simulated_s: first arrival to last event, in virtual time.
        wall_s: how long the simulation took; the only figure that differs from run to run.
        trace: what was asked for, if a trace was.
        configuration: what was simulated.
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
    goodput_rps: float | None
    goodput_rps_per_gpu: float | None
    output_tokens_per_s: float | None
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
    num_steps: int,
    wall_s: float,
    decisions: DecisionReport,
    trace: TraceSummary | None,
    configuration: dict[str, Any],
    timeline: TimelineRecorder | None = None,
) -> Report:
    """Return the report on a simulation that has ended; with timeline and curves if there is a `timeline`.

    Raises:
        InvariantError: a request is unaccounted for.
    """
    records = metrics.records
    counts = metrics.counts()
    first_s = records[0].arrival_s if records else 0.0
    simulated_s = metrics.last_event_s - first_s
    num_met = sum(record.is_met for record in records)
    num_output = sum(record.num_output_tokens for record in records)
    goodput = num_met / simulated_s if simulated_s > 0 else None
    return Report(
        requests=counts,
        ttft_s=Distribution.of(record.ttft_s for record in records),
        tpot_s=Distribution.of(record.tpot_s for record in records),
        e2e_s=Distribution.of(record.e2e_s for record in records),
        queueing_s=Distribution.of(record.queueing_s for record in records),
        slo=slo,
        slo_attainment=num_met / counts.arrived if counts.arrived else None,
        weighted_attainment=_weighted_attainment(records),
        goodput_rps=goodput,
        goodput_rps_per_gpu=None if goodput is None else goodput / num_gpus,
        output_tokens_per_s=num_output / simulated_s if simulated_s > 0 else None,
        prefix_hit_rate=_hit_rate(records),
        num_prompt_tokens=sum(record.num_prompt_tokens for record in records),
        num_output_tokens=num_output,
        num_preemptions=sum(metrics.preemptions.values()),
        classes=_groups(records, lambda record: record.slo_class, simulated_s),
        tenants=_groups(records, lambda record: record.tenant, simulated_s),
        decisions=decisions,
        num_steps=num_steps,
        num_gpus=num_gpus,
        simulated_s=simulated_s,
        wall_s=wall_s,
        trace=trace,
        configuration=configuration,
        timeline=None if timeline is None else timeline.finish(metrics.last_event_s),
        curves=None if timeline is None else _curves(records),
    )


def _curves(records: Sequence[RequestRecord]) -> Curves:
    return Curves(
        ttft_s=Curve.of([record.ttft_s for record in records]),
        tpot_s=Curve.of([record.tpot_s for record in records]),
        e2e_s=Curve.of([record.e2e_s for record in records]),
    )


def _weighted_attainment(records: Sequence[RequestRecord]) -> float | None:
    total = sum(record.value for record in records)
    return sum(record.value for record in records if record.is_met) / total if total else None


def _groups(
    records: Sequence[RequestRecord], name: Callable[[RequestRecord], str], simulated_s: float
) -> dict[str, GroupReport]:
    members: dict[str, list[RequestRecord]] = {}
    for record in records:
        members.setdefault(name(record), []).append(record)
    if set(members) <= {""}:
        return {}
    return {key: _group(members[key], simulated_s) for key in sorted(members)}


def _group(records: Sequence[RequestRecord], simulated_s: float) -> GroupReport:
    num_met = sum(record.is_met for record in records)
    return GroupReport(
        arrived=len(records),
        finished=sum(record.outcome is Outcome.FINISHED for record in records),
        slo_attainment=num_met / len(records),
        goodput_rps=num_met / simulated_s if simulated_s > 0 else None,
        ttft_s=Distribution.of(record.ttft_s for record in records),
        tpot_s=Distribution.of(record.tpot_s for record in records),
        e2e_s=Distribution.of(record.e2e_s for record in records),
        queueing_s=Distribution.of(record.queueing_s for record in records),
        prefix_hit_rate=_hit_rate(records),
    )


def _hit_rate(records: Sequence[RequestRecord]) -> float | None:
    admitted = [record for record in records if record.first_scheduled_s is not None]
    if not admitted:
        return None
    return sum(r.num_cached_tokens for r in admitted) / sum(r.num_prompt_tokens for r in admitted)
