"""Presets side by side: every entry serves the same traffic at the same loads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

import msgspec

from expediter import __version__
from expediter.core.errors import ConfigurationError
from expediter.core.slo import NO_SLO, Slo, SloClass
from expediter.sim.report import Report
from expediter.sim.trace import TraceSummary, trace_summary
from expediter.studies.comparison_cell import Cell, LoadPoint, cell_of
from expediter.studies.entries import Entry
from expediter.studies.findings import Findings, Outcome, findings
from expediter.studies.runs import RunSpec, TraceSpec, run_all
from expediter.studies.workers import Progress, Workers

FORMAT: Final = 1
"""Of the JSON; grows when a field goes or changes its meaning."""
_AT_ONCE: Final = 1e12
"""A rate scale at which everything arrives before the first step is over."""


class LoadUnit(Enum):
    """What a load of 1 is."""

    CAPACITY = "capacity"
    """The rate at which the first entry finishes requests when all of them are there from the start."""
    TRACE = "trace"
    """The trace's own rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonSpec:
    """What to compare.

    Args:
        entries: by name; the first one's capacity is the measure of load.
        trace: the traffic; its `rate_scale`, `seed` and `jitter` are set by the loads and seeds.
        loads: multiples of `unit`.
        seeds: each is another draw of the same traffic; a single one takes the arrivals as they are recorded.
    Raises:
        ConfigurationError: nothing to compare, or a load that is no finite number above 0, or the same twice.
    """

    entries: tuple[Entry, ...]
    trace: TraceSpec
    loads: tuple[float, ...] = (0.5, 0.75, 1.0, 1.25, 1.5)
    unit: LoadUnit = LoadUnit.CAPACITY
    seeds: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        for what, values in (("preset", self.entries), ("load", self.loads), ("seed", self.seeds)):
            if not values:
                raise ConfigurationError(f"a comparison needs at least one {what}")
        for load in self.loads:
            if not (math.isfinite(load) and load > 0):
                raise ConfigurationError(f"a load must be a finite number above 0, not {load}")
        if len(set(self.loads)) < len(self.loads):
            raise ConfigurationError("a load is given twice")


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryFacts:
    """What was simulated under a name.

    Attributes:
        settings: what it has of its own beside the preset.
        cost_per_hour: of all its GPUs, in dollars; None if their prices are not known.
        configuration: as in a simulation's report.
    """

    name: str
    settings: Mapping[str, str]
    num_gpus: int
    cost_per_hour: float | None
    configuration: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What came out.

    Attributes:
        format, version: of this form, and of Expediter.
        trace: the traffic at its own rate.
        slo, slo_classes: the targets.
        capacity_rps: what a load of 1 is, if it was measured.
        cells: by load, then by entry.
        findings: what follows, in words and figures.
    """

    format: int
    version: str
    entries: tuple[EntryFacts, ...]
    trace: TraceSummary
    slo: Slo
    slo_classes: Mapping[str, SloClass]
    unit: LoadUnit
    capacity_rps: float | None
    loads: tuple[LoadPoint, ...]
    seeds: tuple[int, ...]
    cells: tuple[Cell, ...]
    findings: Findings

    @property
    def per_gpu(self) -> bool:
        """Whether the entries have different numbers of GPUs, so that only goodput per GPU compares."""
        return len({entry.num_gpus for entry in self.entries}) > 1

    @property
    def names(self) -> list[str]:
        """Names of the entries."""
        return [entry.name for entry in self.entries]

    def cells_of(self, name: str) -> list[Cell]:
        """Return the cells of an entry, by load."""
        return [cell for cell in self.cells if cell.entry == name]

    def cells_at(self, load: float) -> list[Cell]:
        """Return the cells of a load, in the order of the entries."""
        return [cell for cell in self.cells if cell.load == load]

    def to_json(self) -> bytes:
        """Return everything as indented JSON with a final newline; the same bytes for the same comparison."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


def num_runs(spec: ComparisonSpec) -> int:
    """Return how many simulations `compare` makes of it."""
    return len(spec.entries) * len(spec.loads) * len(spec.seeds) + (spec.unit is LoadUnit.CAPACITY)


def compare(spec: ComparisonSpec, workers: Workers, progress: Progress | None = None) -> Comparison:
    """Run a comparison.

    Args:
        progress: told of every simulation that is done; there are `num_runs`.
    Raises:
        ConfigurationError: the trace or an entry cannot be used, or all requests arrive at once.
    """
    recorded = trace_summary(replace(spec.trace, rate_scale=1.0).load())
    if recorded.mean_rate_rps is None:
        raise ConfigurationError(f"{recorded.name}: all requests arrive at once, so there is no load to vary")
    capacity_rps = None
    num_done = 0
    if spec.unit is LoadUnit.CAPACITY:
        capacity_rps = _capacity_rps(spec, workers)
        num_done = 1
        if progress is not None:
            progress(num_done, "capacity")
    unit_rps = recorded.mean_rate_rps if capacity_rps is None else capacity_rps
    points = [
        LoadPoint(load=load, rate_scale=load * unit_rps / recorded.mean_rate_rps, offered_rps=load * unit_rps)
        for load in sorted(spec.loads)
    ]
    specs = _specs(spec, points)
    shifted = None if progress is None else _shifted(progress, num_done)
    reports = [report for _, report in run_all(specs, workers, shifted)]
    cells, num_seeds = [], len(spec.seeds)
    places = [(point, entry) for point in points for entry in spec.entries]
    for number, (point, entry) in enumerate(places):
        cells.append(cell_of(entry.name, point, reports[number * num_seeds : (number + 1) * num_seeds]))
    entries = tuple(_facts(entry, reports[number * num_seeds]) for number, entry in enumerate(spec.entries))
    per_gpu = len({facts.num_gpus for facts in entries}) > 1
    found = findings(_outcomes(cells, points, recorded.num_requests), per_gpu=per_gpu)
    return Comparison(
        format=FORMAT,
        version=__version__,
        entries=entries,
        trace=recorded,
        slo=spec.entries[0].config.slo,
        slo_classes=spec.entries[0].config.slo_classes,
        unit=spec.unit,
        capacity_rps=capacity_rps,
        loads=tuple(points),
        seeds=spec.seeds,
        cells=tuple(cells),
        findings=replace(found, caveats=(*found.caveats, *_left_out(recorded))),
    )


def _left_out(trace: TraceSummary) -> list[str]:
    if not trace.num_defects:
        return []
    return [f"Rows of the trace with a defect were left out: {trace.num_defects:,} (`expediter trace` names them)."]


def _facts(entry: Entry, report: Report) -> EntryFacts:
    return EntryFacts(
        name=entry.name,
        settings=entry.settings,
        num_gpus=report.num_gpus,
        cost_per_hour=report.cost_per_hour,
        configuration=report.configuration,
    )


def _shifted(progress: Progress, num_before: int) -> Progress:
    return lambda num_done, label: progress(num_before + num_done, label)


def _capacity_rps(spec: ComparisonSpec, workers: Workers) -> float:
    """Return the rate at which the first entry finishes requests when all are there from the start, without targets."""
    first = spec.entries[0]
    config = replace(
        first.config,
        slo=NO_SLO,
        slo_classes={name: SloClass(value=c.value) for name, c in first.config.slo_classes.items()},
    )
    trace = replace(spec.trace, rate_scale=_AT_ONCE)
    ((_, report),) = run_all([RunSpec(label=f"capacity of {first.name}", config=config, trace=trace)], workers)
    if not report.requests.finished:
        raise ConfigurationError(
            f"{first.name} finishes no request of this trace, so its capacity is no measure of load"
        )
    return report.requests.finished / report.simulated_s


def _specs(spec: ComparisonSpec, points: Sequence[LoadPoint]) -> Iterator[RunSpec]:
    for point in points:
        for entry in spec.entries:
            for seed in spec.seeds:
                yield RunSpec(
                    label=f"{entry.name} at load {point.load:g}",
                    config=replace(entry.config, timeline=True),
                    trace=replace(spec.trace, rate_scale=point.rate_scale, seed=seed, jitter=len(spec.seeds) > 1),
                )


def _outcomes(cells: Sequence[Cell], points: Sequence[LoadPoint], num_requests: int) -> list[Outcome]:
    offered = {point.load: point.offered_rps for point in points}
    return [
        Outcome(
            entry=cell.entry,
            load=cell.load,
            offered_rps=offered[cell.load],
            num_requests=num_requests,
            goodput_rps=cell.goodput_rps,
            goodput_rps_per_gpu=cell.goodput_rps_per_gpu,
            attainment=cell.attainment,
            missed=cell.missed,
            held_s=cell.held_s,
            kv_used_share=cell.kv_used_share,
            drain_share=cell.drain_share,
        )
        for cell in cells
    ]
