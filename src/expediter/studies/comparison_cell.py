"""One entry of a comparison at one load: what its simulations came to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from expediter.sim.distribution import Distribution
from expediter.sim.report import Curves, Report
from expediter.sim.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPoint:
    """A load.

    Attributes:
        load: in the comparison's unit.
        rate_scale: the same as a multiple of the trace's rate.
        offered_rps: the same as arrivals per second.
    """

    load: float
    rate_scale: float
    offered_rps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One entry at one load; means over the seeds where nothing else is said.

    Attributes:
        goodput_rps: requests that met their targets, per second in which requests arrive, which is `attainment` of the
            offered rate; by seed. (A simulation's own report divides by the whole run, until the last answer.)
        goodput_rps_per_gpu: the same per GPU; by seed.
        attainment: share of the arrived requests that met their targets; by seed.
        class_attainment: the same for each SLO class, if there are any.
        missed: share of the arrived requests by the first target that they missed (`Report.missed`).
        held_s: waiting per arrived request, by what held it; of requests that were started.
        ttft_s, tpot_s, e2e_s, queueing_s: seconds.
        num_preemptions: per arrived request.
        kv_used_share, kv_used_share_highest: KV blocks that running requests own, mean over the run and in the
            timeline's highest bucket.
        drain_share: time from the last arrival to the end, as a share of the time in which requests arrive.
        curves, timeline: of the first seed.
    """

    entry: str
    load: float
    goodput_rps: tuple[float, ...]
    goodput_rps_per_gpu: tuple[float, ...]
    attainment: tuple[float, ...]
    class_attainment: Mapping[str, float]
    missed: Mapping[str, float]
    held_s: Mapping[str, float]
    ttft_s: Distribution
    tpot_s: Distribution
    e2e_s: Distribution
    queueing_s: Distribution
    output_tokens_per_s: float | None
    prefix_hit_rate: float | None
    num_preemptions: float
    budget_used_share: float | None
    kv_used_share: float
    kv_used_share_highest: float
    drain_share: float
    curves: Curves
    timeline: Timeline


def cell_of(name: str, point: LoadPoint, reports: Sequence[Report]) -> Cell:
    """Return the cell of an entry at a load.

    Args:
        reports: a simulation for each seed, with timelines.
    """
    first = reports[0]
    assert first.timeline is not None
    assert first.curves is not None
    spans_s = [_span_s(report) for report in reports]
    attainment = tuple(report.slo_attainment or 0.0 for report in reports)
    goodput = tuple(share * point.offered_rps for share in attainment)
    return Cell(
        entry=name,
        load=point.load,
        goodput_rps=goodput,
        goodput_rps_per_gpu=tuple(rate / first.num_gpus for rate in goodput),
        attainment=attainment,
        class_attainment=_mean_by_name(reports, lambda r: {k: g.slo_attainment for k, g in r.classes.items()}),
        missed=_mean_by_name(reports, lambda r: {k: n / r.requests.arrived for k, n in r.missed.items()}),
        held_s=_mean_by_name(reports, lambda r: {k: s / r.requests.arrived for k, s in r.decisions.held_s.items()}),
        ttft_s=_mean_distribution([report.ttft_s for report in reports]),
        tpot_s=_mean_distribution([report.tpot_s for report in reports]),
        e2e_s=_mean_distribution([report.e2e_s for report in reports]),
        queueing_s=_mean_distribution([report.queueing_s for report in reports]),
        output_tokens_per_s=_mean([report.output_tokens_per_s for report in reports]),
        prefix_hit_rate=_mean([report.prefix_hit_rate for report in reports]),
        num_preemptions=fmean(report.num_preemptions / report.requests.arrived for report in reports),
        budget_used_share=_mean([report.decisions.budget_used_share for report in reports]),
        kv_used_share=fmean(_time_mean(report, report.timeline.kv_used_share) for report in reports if report.timeline),
        kv_used_share_highest=fmean(max(report.timeline.kv_used_share) for report in reports if report.timeline),
        drain_share=fmean(report.simulated_s / span_s - 1 for report, span_s in zip(reports, spans_s, strict=True)),
        curves=first.curves,
        timeline=first.timeline,
    )


def _span_s(report: Report) -> float:
    assert report.trace is not None
    return report.trace.span_s


def _time_mean(report: Report, values: Sequence[float]) -> float:
    """Return the mean of a timeline's row; its last bucket is shorter than the others."""
    assert report.timeline is not None
    bucket_s = report.timeline.bucket_s
    last_s = report.simulated_s - (len(values) - 1) * bucket_s
    return (sum(values[:-1]) * bucket_s + values[-1] * last_s) / report.simulated_s


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are there."""
    present = [value for value in values if value is not None]
    return fmean(present) if present else None


def _mean_distribution(distributions: Sequence[Distribution]) -> Distribution:
    return Distribution(
        mean=_mean([d.mean for d in distributions]),
        p50=_mean([d.p50 for d in distributions]),
        p90=_mean([d.p90 for d in distributions]),
        p99=_mean([d.p99 for d in distributions]),
    )


def _mean_by_name(reports: Sequence[Report], values: Callable[[Report], Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each name's value; where a report does not have it, it is 0."""
    by_report = [values(report) for report in reports]
    names = sorted({name for row in by_report for name in row})
    return {name: fmean(row.get(name, 0.0) for row in by_report) for name in names}
