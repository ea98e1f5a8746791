"""A plan as a page for somebody who was not there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise
from typing import Final

from expediter.studies.page import (
    Axis,
    Figure,
    Mark,
    Markup,
    Page,
    Series,
    View,
    facts,
    grid,
    heading,
    items,
    table,
    words,
)
from expediter.studies.planning.answer import Choice, Plan, Point
from expediter.studies.planning.remarks import remarks_on
from expediter.studies.words import number, percent, seconds

_COST: Final = Axis(label="cost, dollars per hour", name="cost", min=0)
_NUM_COLOURS: Final = 8


def plan_page(plan: Plan, command: str) -> str:
    """Return the page as HTML.

    Args:
        command: how to get the same plan again.
    """
    trace = plan.trace
    page = Page(title=f"The cheapest GPUs for {plan.model}")
    rate = "all at once" if trace.mean_rate_rps is None else f"{number(trace.mean_rate_rps)} requests/s"
    page.add(
        Markup(f"<h1>{escape(page.title)}</h1>"),
        Markup(
            f'<p class="under">Simulated: {escape(trace.name)}, {trace.num_requests:,} requests at {rate}; prompts of '
            f"{number(trace.input_tokens_mean)} tokens and outputs of {number(trace.output_tokens_mean)} in the mean. "
            f"{percent(plan.attainment)} of the requests must meet all their targets.</p>"
        ),
        _summary(plan),
    )
    if plan.points:
        figures = [_attainment_figure(plan), _latency_figure(plan, "ttft"), _latency_figure(plan, "tpot")]
        page.add(
            heading("Cost against what is reached"), grid(*map(page.figure, figures)), _frontier_table(plan.frontier)
        )
    if plan.choices:
        page.add(heading("The cheapest that meet the targets"), _choices_table(plan.choices))
        page.add(grid(page.figure(_load_figure(plan))))
        page.add(heading("What breaks first"), facts(map(_breaks, plan.choices)))
        page.add(heading("To serve them"), *_commands(plan.choices))
    if plan.ruled_out:
        rows = [(f"{out.gpu} {out.split}", str(out.num_setups), out.reason) for out in plan.ruled_out]
        page.add(heading("Ruled out without a simulation"), table(("kind", "set-ups", "why"), rows, is_text=True))
    page.add(
        heading("What to know before relying on it"),
        items(remarks_on(plan)),
        heading("The same again"),
        Markup(f"<pre><code>{escape(command)}</code></pre>"),
    )
    return page.html()


def _summary(plan: Plan) -> Markup:
    if plan.choices:
        best = plan.choices[0]
        point = best.point
        text = (
            f"{point.setup.describe(point.replicas)} meets them for ${point.cost_per_hour:.2f} per hour, with "
            f"{percent(point.measured.attainment)} of the requests in time. It bears "
            f"{number(best.bears)} times the load."
        )
    elif plan.nearest is None:
        text = "Nothing can meet the targets: every set-up is ruled out."
    else:
        point, limit = plan.nearest
        text = (
            f"Nothing that was tried meets the targets. {point.setup.describe(point.replicas)} comes nearest, with "
            f"{percent(point.measured.attainment)} of the requests in time: {limit.words}."
        )
    return Markup(f'<section class="summary"><h2>What came out</h2><p>{words(text)}</p></section>')


def _attainment_figure(plan: Plan) -> Figure:
    best = {(point.cost_per_hour, point.measured.attainment) for point in plan.frontier}
    others = {(p.cost_per_hour, p.measured.attainment) for p in plan.points} - best
    return Figure(
        name="attainment",
        title="In time",
        caption="Share of the requests that met all their targets. The line joins what nothing cheaper surpasses; "
        "every other simulated set-up is a point. Simulations that were given up early are not shown.",
        x=_COST,
        y=Axis(
            label="in time", name="in time", unit="share", min=_floor(p.measured.attainment for p in plan.points), max=1
        ),
        series=[Series(name="best", colour="series-0", dash=0), Series(name="others", colour="series-1", dash=1)],
        views={"": _scatter(sorted(best), sorted(others))},
        points=True,
    )


def _latency_figure(plan: Plan, name: str) -> Figure:
    values = [(p.cost_per_hour, v) for p in plan.points if (v := getattr(p.measured, f"{name}_s").p90) is not None]
    best: list[tuple[float, float]] = []
    for cost, value in sorted(values):
        if not best or value < best[-1][1]:
            best.append((cost, value))
    return Figure(
        name=name,
        title=f"{name.upper()}, 90th percentile",
        caption="The line joins what nothing cheaper surpasses; every other simulated set-up is a point.",
        x=_COST,
        y=Axis(label="seconds", name=name.upper(), unit="s", min=0),
        series=[Series(name="best", colour="series-0", dash=0), Series(name="others", colour="series-1", dash=1)],
        views={"": _scatter(best, sorted(set(values) - set(best)))},
        points=True,
    )


def _floor(shares: Iterable[float]) -> float:
    """Return where an axis of shares begins that ends at 1."""
    return max(0.0, math.floor(min(shares) * 10 - 0.5) / 10)


def _scatter(line: Sequence[tuple[float, float]], points: Sequence[tuple[float, float]]) -> View:
    """Return a line and single points over one axis; a gap behind each point keeps it single."""
    rows: list[tuple[float, float | None, float | None]] = [(x, y, None) for x, y in line]
    for x, y in points:
        rows += [(x, None, y), (x, None, None)]
    rows.sort(key=lambda row: row[0])
    # The line must not break at the points between its own, so it is given there, too.
    ordered = list(line)
    joined = [_between(ordered, x) if own is None else own for x, own, _ in rows]
    return View(x=[row[0] for row in rows], y=[joined, [row[2] for row in rows]])


def _between(line: Sequence[tuple[float, float]], x: float) -> float | None:
    """Return the height of the line at x; None outside of it."""
    for (x0, y0), (x1, y1) in pairwise(line):
        if x0 <= x <= x1 and x1 > x0:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return None


def _load_figure(plan: Plan) -> Figure:
    shares = [share for choice in plan.choices for _, share in choice.loads]
    loads = sorted({load for choice in plan.choices for load, _ in choice.loads})
    return Figure(
        name="load",
        title="With more load",
        caption="Share of the requests in time at multiples of the traffic's rate, as far as they were tried.",
        x=Axis(label="load, as a multiple", name="load"),
        y=Axis(label="in time", name="in time", unit="share", min=_floor(shares), max=1),
        series=[
            Series(
                name=f"{place + 1}: {choice.point.setup.describe(choice.point.replicas)}",
                colour=f"series-{place % _NUM_COLOURS}",
                dash=place % _NUM_COLOURS,
            )
            for place, choice in enumerate(plan.choices)
        ],
        views={
            "": View(
                x=loads,
                y=[[_between(choice.loads, load) for load in loads] for choice in plan.choices],
                marks=[Mark(x=1.0, label="the traffic as asked")],
            )
        },
        points=True,
        wide=True,
    )


def _choices_table(choices: Sequence[Choice]) -> Markup:
    head = (
        "",
        "set-up",
        "$/h",
        "GPUs",
        "in time",
        "worst draw",
        "bears",
        "TTFT p90",
        "to spare",
        "TPOT p90",
        "to spare",
    )
    rows = []
    for place, choice in enumerate(choices, 1):
        point, measured = choice.point, choice.point.measured
        spare = {name: f"{slack:.0%}" for name, slack in measured.slack.items()}
        rows.append(
            (
                str(place),
                point.setup.describe(point.replicas),
                f"{point.cost_per_hour:.2f}",
                str(point.num_gpus),
                percent(measured.attainment),
                percent(min(point.attainments)),
                f"{choice.bears:g}x",
                _seconds(measured.ttft_s.p90),
                spare.get("ttft", "-"),
                _seconds(measured.tpot_s.p90),
                spare.get("tpot", "-"),
            )
        )
    return table(head, rows)


def _frontier_table(points: Sequence[Point]) -> Markup:
    head = ("set-up", "$/h", "in time", "TTFT p90", "TPOT p90", "KV used at most", "prefix hits")
    rows = []
    for point in points:
        measured = point.measured
        hits = measured.prefix_hit_rate
        rows.append(
            (
                point.setup.describe(point.replicas),
                f"{point.cost_per_hour:.2f}",
                percent(measured.attainment),
                _seconds(measured.ttft_s.p90),
                _seconds(measured.tpot_s.p90),
                f"{measured.peak_kv_use:.0%}",
                "-" if hits is None else percent(hits),
            )
        )
    return table(head, rows)


def _breaks(choice: Choice) -> tuple[str, str]:
    name = choice.point.setup.describe(choice.point.replicas)
    if choice.fails_at is None:
        return name, f"nothing, up to {choice.bears:g} times the load, the most that was tried"
    limit = choice.limit
    return name, f"{limit.cause}, at {choice.fails_at:g} times the load: {limit.words}"


def _commands(choices: Sequence[Choice]) -> list[str]:
    lines = "\n".join(choice.command.line or "-" for choice in choices)
    notes = dict.fromkeys(note for choice in choices for note in choice.command.notes)
    return [Markup(f"<pre><code>{escape(lines)}</code></pre>"), items(notes)]


def _seconds(value: float | None) -> str:
    return "-" if value is None else seconds(value)
