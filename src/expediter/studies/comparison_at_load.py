"""What a comparison shows for one load at a time: distributions, timelines, waiting, misses, and all figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Final

import numpy as np

from expediter.sim.report import CURVE_PERCENTS, Curve
from expediter.sim.timeline import Timeline
from expediter.studies.comparison import Comparison
from expediter.studies.comparison_cell import Cell
from expediter.studies.page import (
    Axis,
    Bar,
    Figure,
    Mark,
    Markup,
    Page,
    View,
    bars,
    framed,
    grid,
    heading,
    lines,
    section,
    subheading,
    table,
)
from expediter.studies.words import number, percent, seconds

_GRID_POINTS: Final = 160
_HELD_SHORT: Final = {
    "queued": "queued behind others",
    "budget": "token budget",
    "no_slot": "no free slot",
    "no_blocks": "no KV memory",
    "batch": "batch in progress",
    "step": "step in progress",
    "fairness": "tenant's share",
    "late": "late already",
    "preempted": "preempted",
}
_HELD_CAPTION: Final = (
    "Seconds that a request waited before it was started (again), on average over all requests, by what held the "
    "queue meanwhile. Requests that were never started are left out. No free slot: as many requests ran as "
    "max_num_seqs allows. Token budget: the steps were full."
)
_MISSED_SHORT: Final = {
    "served": "refused or unfinished",
    "ttft": "first token too late",
    "tpot": "tokens too slow",
    "e2e": "ended too late",
}
_MISSED_CAPTION: Final = "Share of all requests that missed their targets, by the first target that each missed."
_CURVE_CAPTION: Final = (
    "How many of all requests had this or less. Further left is better; the axis is logarithmic. A line that ends "
    "below 100 % belongs to requests that were refused or not finished."
)
_FIGURES_NOTE: Final = (
    '<p class="note">Goodput in requests/s; queued is the mean from arrival to start; KV used is the mean over the '
    "run, KV peak the highest point of the timeline; preemptions are per request; budget used is the mean share of "
    "the token budget in steps that compute prompts.</p>"
)


def add_at_load(page: Page, comparison: Comparison) -> None:
    """Add what is shown for one load at a time, and the choice of it."""
    queue, memory, running, fullest = _timelines(comparison)
    has_replicas = any(
        entry.configuration["replicas"] > 1 or entry.configuration["pools"] for entry in comparison.entries
    )
    held = _bars_by_load(comparison, lambda cell: cell.held_s, _HELD_SHORT, seconds)
    missed = _bars_by_load(comparison, lambda cell: cell.missed, _MISSED_SHORT, percent)
    page.add(
        section(
            heading("At one load"),
            page.choice(),
            grid(
                page.figure(_curve_figure(comparison, "ttft", "Time to first token", lambda cell: cell.curves.ttft_s)),
                page.figure(
                    _curve_figure(comparison, "tpot", "Time per output token", lambda cell: cell.curves.tpot_s)
                ),
                page.figure(queue),
                page.figure(memory),
                *([page.figure(running), page.figure(fullest)] if has_replicas else []),
                framed("Where the waiting time went", page.choice_views(held), _HELD_CAPTION),
                framed("What was missed", page.choice_views(missed), _MISSED_CAPTION),
            ),
            page.choice_views({f"{p.load:g}": _figures_table(comparison, p.load) for p in comparison.loads}),
        )
    )


def _draw(comparison: Comparison) -> str:
    return "" if len(comparison.seeds) == 1 else " Of the first draw."


def _curve_figure(comparison: Comparison, name: str, title: str, curve_of: Callable[[Cell], Curve]) -> Figure:
    target = getattr(comparison.slo, f"{name}_s")
    marks = [] if target is None or comparison.slo_classes else [Mark(x=target, label="target")]
    return Figure(
        name=name,
        title=title,
        caption=f"{_CURVE_CAPTION}{_draw(comparison)}",
        x=Axis(label="seconds", name="at most", unit="s", log=True),
        y=Axis(label="share of all requests", unit="share", min=0.0, max=1.0),
        series=lines(comparison.names),
        views={
            f"{point.load:g}": _curve_view(comparison.cells_at(point.load), curve_of, marks)
            for point in comparison.loads
        },
    )


def _curve_view(cells: Sequence[Cell], curve_of: Callable[[Cell], Curve], marks: Sequence[Mark]) -> View:
    """Return the distributions on one logarithmic grid, that of all values that occur."""
    curves = [curve_of(cell) for cell in cells]
    values = [value for curve in curves for value in curve.percentiles if value > 0] or [1.0]
    values += [mark.x for mark in marks]
    x = np.geomspace(min(values) * 0.9, max(values) * 1.1, _GRID_POINTS)
    shares = np.array(CURVE_PERCENTS) / 100
    rows: list[list[float | None]] = []
    for curve in curves:
        if not curve.percentiles:
            rows.append([None] * len(x))
            continue
        reached = np.interp(x, curve.percentiles, shares, left=0.0, right=1.0) * curve.share_of_arrived
        rows.append(reached.tolist())
    return View(x=x.tolist(), y=rows, marks=marks)


def _timelines(comparison: Comparison) -> tuple[Figure, ...]:
    """Return the plots over time: the queue, KV memory, what runs, and KV memory of the fullest replica."""
    first = _draw(comparison)
    queue = _timeline_figure(
        comparison,
        "queue",
        "Queue over time",
        "Requests that wait to be started, at all replicas. A queue that only grows is overload. Time goes on until "
        f"the last request has ended.{first}",
        Axis(label="waiting requests", name="waiting", min=0.0),
        lambda timeline: timeline.num_waiting,
    )
    memory = _timeline_figure(
        comparison,
        "kv",
        "KV memory over time",
        "Share of the KV blocks of all replicas that running requests own. At 100 % nobody can start, and requests are "
        f"preempted.{first}",
        Axis(label="KV blocks in use", name="in use", unit="share", min=0.0, max=1.0),
        lambda timeline: timeline.kv_used_share,
    )
    running = _timeline_figure(
        comparison,
        "running",
        "Running requests over time",
        f"At all replicas.{first}",
        Axis(label="running requests", name="running", min=0.0),
        lambda timeline: timeline.num_running,
    )
    fullest = _timeline_figure(
        comparison,
        "fullest",
        "KV memory of the fullest replica",
        "Share of its KV blocks that running requests own; in each interval of whichever replica has most in use. Far "
        f"above the plot of all replicas, work is spread unevenly, or replicas have different roles.{first}",
        Axis(label="KV blocks in use", name="in use", unit="share", min=0.0, max=1.0),
        lambda timeline: timeline.kv_used_share_highest,
    )
    return queue, memory, running, fullest


def _timeline_figure(
    comparison: Comparison, name: str, title: str, caption: str, y: Axis, row_of: Callable[[Timeline], Sequence[float]]
) -> Figure:
    return Figure(
        name=name,
        title=title,
        caption=caption,
        x=Axis(label="seconds since the first arrival", name="at"),
        y=y,
        series=lines(comparison.names),
        views={
            f"{point.load:g}": _timeline_view(
                [cell.timeline for cell in comparison.cells_at(point.load)],
                row_of,
                comparison.trace.span_s / point.rate_scale,
            )
            for point in comparison.loads
        },
    )


def _timeline_view(
    timelines: Sequence[Timeline], row_of: Callable[[Timeline], Sequence[float]], last_arrival_s: float
) -> View:
    """Return the timelines in buckets of the longest one's length; the others' are halves, quarters ... of it."""
    bucket_s = max(timeline.bucket_s for timeline in timelines)
    rows: list[list[float | None]] = []
    for timeline in timelines:
        row, size = row_of(timeline), round(bucket_s / timeline.bucket_s)
        rows.append([fmean(row[start : start + size]) for start in range(0, len(row), size)])
    length = max(map(len, rows))
    return View(
        x=[(place + 0.5) * bucket_s for place in range(length)],
        y=[[*row, *[None] * (length - len(row))] for row in rows],
        marks=[Mark(x=last_arrival_s, label="last arrival")],
    )


def _bars_by_load(
    comparison: Comparison,
    parts_of: Callable[[Cell], Mapping[str, float]],
    labels: Mapping[str, str],
    say: Callable[[float], str],
) -> dict[str, Markup]:
    known = {name for cell in comparison.cells for name in parts_of(cell)}
    labels = {**labels, **{name: name for name in sorted(known - set(labels))}}
    return {
        f"{point.load:g}": bars(
            [
                Bar(name=cell.entry, parts=parts_of(cell), total=say(sum(parts_of(cell).values())))
                for cell in comparison.cells_at(point.load)
            ],
            labels,
        )
        for point in comparison.loads
    }


def _figures_table(comparison: Comparison, load: float) -> Markup:
    cells = comparison.cells_at(load)
    return Markup(
        subheading("The same in figures")
        + _latencies(cells)
        + _rates(cells, per_gpu=comparison.per_gpu)
        + _FIGURES_NOTE
    )


def _latencies(cells: Sequence[Cell]) -> Markup:
    return table(
        (
            "seconds",
            "TTFT mean",
            "p50",
            "p90",
            "p99",
            "TPOT mean",
            "p50",
            "p90",
            "p99",
            "E2E mean",
            "p50",
            "p99",
            "queued",
        ),
        [
            (
                cell.entry,
                *(seconds(value) for d in (cell.ttft_s, cell.tpot_s) for value in (d.mean, d.p50, d.p90, d.p99)),
                *map(seconds, (cell.e2e_s.mean, cell.e2e_s.p50, cell.e2e_s.p99, cell.queueing_s.mean)),
            )
            for cell in cells
        ],
    )


def _rates(cells: Sequence[Cell], *, per_gpu: bool) -> Markup:
    head = (
        "",
        "in time",
        "goodput",
        "output tokens/s",
        "prefix hits",
        "KV used",
        "KV peak",
        "preemptions",
        "budget used",
    )
    return table(
        head if not per_gpu else (*head, "goodput per GPU"),
        [
            (
                cell.entry,
                percent(fmean(cell.attainment)),
                number(fmean(cell.goodput_rps)),
                _or_dash(number, cell.output_tokens_per_s),
                _or_dash(percent, cell.prefix_hit_rate),
                percent(cell.kv_used_share),
                percent(cell.kv_used_share_highest),
                number(cell.num_preemptions),
                _or_dash(percent, cell.budget_used_share),
                *([number(fmean(cell.goodput_rps_per_gpu))] if per_gpu else []),
            )
            for cell in cells
        ],
    )


def _or_dash(say: Callable[[float], str], value: float | None) -> str:
    return "-" if value is None else say(value)
