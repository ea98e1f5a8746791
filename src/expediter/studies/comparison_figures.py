"""The tables and plots of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Final

import numpy as np

from expediter.sim.report import CURVE_PERCENTS, Curve
from expediter.sim.timeline import Timeline
from expediter.studies.comparison import Cell, Comparison, LoadUnit
from expediter.studies.page import (
    Axis,
    Bar,
    Figure,
    Mark,
    Markup,
    Page,
    Series,
    View,
    bars,
    framed,
    grid,
    heading,
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
_OFFERED: Final = Axis(label="offered rate, requests/s", name="offered")
_HITS_CAPTION: Final = (
    "Share of the prompt tokens that were reused from the KV cache instead of computed. It depends on what the "
    "entries keep and on whom they serve first."
)
_HELD_CAPTION: Final = (
    "Seconds that a request waited before it was started (again), on average over all requests, by what held the "
    "queue meanwhile. Requests that were never started are left out. No free slot: as many requests ran as "
    "max_num_seqs allows. Token budget: the steps were full."
)
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
_MISSED_SHORT: Final = {
    "served": "refused or unfinished",
    "ttft": "first token too late",
    "tpot": "tokens too slow",
    "e2e": "ended too late",
}


# -- figures over load ------------------------------------------------------------------------------------------------


def add_over_load(page: Page, comparison: Comparison) -> None:
    """Add what depends on load: a table, and goodput, attainment and prefix hits as plots."""
    figures = [_goodput_figure(comparison), *_attainment_figures(comparison)]
    if any(cell.prefix_hit_rate for cell in comparison.cells):
        figures.append(_share_figure(comparison, "hits", "Prefix hit rate", _HITS_CAPTION, _hits))
    page.add(
        heading("Over load"),
        _meaning_of_load(comparison),
        _goodput_table(comparison),
        grid(*map(page.figure, figures)),
    )


def _goodput_figure(comparison: Comparison) -> Figure:
    view = _over_load(comparison, lambda cell: cell.goodput_rps_per_gpu if comparison.per_gpu else cell.goodput_rps)
    series = _series(comparison)
    leaves = ""
    if not comparison.per_gpu:  # otherwise every entry is offered another rate per GPU
        view = View(x=view.x, y=[*view.y, view.x], ranges=view.ranges)
        series.append(Series(name="all in time", colour="reference"))
        leaves = "; one that leaves the dotted line no longer serves all in time"
    drawn = " Bars run from the lowest to the highest draw." if len(comparison.seeds) > 1 else ""
    of_gpu = " and GPU" if comparison.per_gpu else ""
    return Figure(
        name="goodput",
        title="Goodput against load",
        caption=f"Requests that met their targets, per second{of_gpu} in which requests arrive. Higher is better. A "
        f"line that falls with more load collapses{leaves}.{drawn}",
        x=_OFFERED,
        y=Axis(label=f"requests in time, per second{of_gpu}", name="goodput", min=0.0),
        series=series,
        views={"": view},
        points=True,
    )


def _attainment_figures(comparison: Comparison) -> list[Figure]:
    """Return a plot per SLO class, or one of all requests if there are no classes."""
    caption = "Share of all requests that met their targets. Higher is better."
    figures = [_share_figure(comparison, "attainment", "Requests in time", caption, lambda cell: cell.attainment)]
    classes = sorted({name for cell in comparison.cells for name in cell.class_attainment})
    for place, name in enumerate(classes):
        title = f"Requests in time: {f'class {name}' if name else 'without a class'}"
        caption = f"Share of these requests that met their targets ({targets_in_words(comparison, name)})."
        figures.append(_share_figure(comparison, f"class-{place}", title, caption, partial(_class_attainment, name)))
    return figures


def _share_figure(
    comparison: Comparison, name: str, title: str, caption: str, values: Callable[[Cell], Sequence[float]]
) -> Figure:
    return Figure(
        name=name,
        title=title,
        caption=caption,
        x=_OFFERED,
        y=Axis(
            label="share of requests" if name != "hits" else "share of prompt tokens", unit="share", min=0.0, max=1.0
        ),
        series=_series(comparison),
        views={"": _over_load(comparison, values)},
        points=True,
    )


def _class_attainment(name: str, cell: Cell) -> Sequence[float]:
    return (cell.class_attainment.get(name, 0.0),)


def _hits(cell: Cell) -> Sequence[float]:
    return (cell.prefix_hit_rate or 0.0,)


def _meaning_of_load(comparison: Comparison) -> str:
    own = f"the trace itself brings {number(comparison.trace.mean_rate_rps or 0.0)} requests/s"
    if comparison.unit is LoadUnit.TRACE:
        return f"A load is a multiple of the trace's own rate; {own}. The same requests come faster or slower."
    return (
        f"Load 1 is {number(comparison.capacity_rps or 0.0)} requests/s: the rate at which {comparison.names[0]} "
        f"finishes these requests when all are there from the start. ({own[0].upper()}{own[1:]}.) Above it "
        f"{comparison.names[0]}'s queue grows for as long as requests come."
    )


def _goodput_table(comparison: Comparison) -> Markup:
    verdicts = comparison.findings.verdicts
    rows = []
    for name in comparison.names:
        row = [name]
        for cell, verdict in zip(comparison.cells_of(name), verdicts, strict=True):
            goodput = fmean(cell.goodput_rps_per_gpu if comparison.per_gpu else cell.goodput_rps)
            leads = verdict.runner_up is not None and name in verdict.leaders
            row.append(
                Markup(
                    f"<td{' class=lead' if leads else ''}>{number(goodput)}<br>"
                    f"<small>{percent(fmean(cell.attainment))}</small></td>"
                )
            )
        rows.append(row)
    head = [
        "goodput per GPU" if comparison.per_gpu else "goodput",
        *(f"load {point.load:g}" for point in comparison.loads),
    ]
    rows.append(["offered", *(number(point.offered_rps) for point in comparison.loads)])
    return Markup(
        table(head, rows)
        + '<p class="note">Requests in time per second, and as a share of all. Shaded: leads at this load (with those '
        "that tie with it); where nothing is shaded, all tie.</p>"
    )


# -- figures at one load ----------------------------------------------------------------------------------------------


def add_at_load(page: Page, comparison: Comparison) -> None:
    """Add what is shown for one load at a time, and the choice of it."""
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
        series=_series(comparison),
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


def _timeline_figure(
    comparison: Comparison, name: str, title: str, caption: str, y: Axis, row_of: Callable[[Timeline], Sequence[float]]
) -> Figure:
    return Figure(
        name=name,
        title=title,
        caption=caption,
        x=Axis(label="seconds since the first arrival", name="at"),
        y=y,
        series=_series(comparison),
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
    latency = table(
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
    rest = table(
        head if not comparison.per_gpu else (*head, "goodput per GPU"),
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
                *([number(fmean(cell.goodput_rps_per_gpu))] if comparison.per_gpu else []),
            )
            for cell in cells
        ],
    )
    return Markup(subheading("The same in figures") + latency + rest + _FIGURES_NOTE)


def targets_in_words(comparison: Comparison, name: str) -> str:
    """Return the targets of an SLO class, or of what has none."""
    slo = comparison.slo_classes.get(name) or comparison.slo
    targets = (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s), ("E2E", slo.e2e_s))
    return ", ".join(f"{what} at most {seconds(value)}" for what, value in targets if value is not None) or "none"


# -- small things -----------------------------------------------------------------------------------------------------


def _series(comparison: Comparison) -> list[Series]:
    return [Series(name=name, colour=f"series-{i % 8}", dash=i) for i, name in enumerate(comparison.names)]


def _over_load(comparison: Comparison, values: Callable[[Cell], Sequence[float]]) -> View:
    by_entry = [[values(cell) for cell in comparison.cells_of(name)] for name in comparison.names]
    return View(
        x=[point.offered_rps for point in comparison.loads],
        y=[[fmean(row) for row in rows] for rows in by_entry],
        ranges=[[(min(row), max(row)) for row in rows] if len(rows[0]) > 1 else None for rows in by_entry],
    )


def _or_dash(say: Callable[[float], str], value: float | None) -> str:
    return "-" if value is None else say(value)
