"""What a comparison shows over load: a table, and goodput, attainment and prefix hits as plots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean
from typing import Final

from expediter.studies.comparison import Comparison, LoadUnit
from expediter.studies.comparison_cell import Cell
from expediter.studies.page import (
    Axis,
    Figure,
    Markup,
    Page,
    Series,
    View,
    grid,
    heading,
    lines,
    table,
)
from expediter.studies.words import number, percent, seconds

_OFFERED: Final = Axis(label="offered rate, requests/s", name="offered")
_HITS_CAPTION: Final = (
    "Share of the prompt tokens that were reused from the KV cache instead of computed. It depends on what the "
    "entries keep and on whom they serve first."
)


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
    series = lines(comparison.names)
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
        series=lines(comparison.names),
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


def _over_load(comparison: Comparison, values: Callable[[Cell], Sequence[float]]) -> View:
    by_entry = [[values(cell) for cell in comparison.cells_of(name)] for name in comparison.names]
    return View(
        x=[point.offered_rps for point in comparison.loads],
        y=[[fmean(row) for row in rows] for rows in by_entry],
        ranges=[[(min(row), max(row)) for row in rows] if len(rows[0]) > 1 else None for rows in by_entry],
    )


def targets_in_words(comparison: Comparison, name: str) -> str:
    """Return the targets of an SLO class, or of what has none."""
    slo = comparison.slo_classes.get(name) or comparison.slo
    targets = (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s), ("E2E", slo.e2e_s))
    return ", ".join(f"{what} at most {seconds(value)}" for what, value in targets if value is not None) or "none"
