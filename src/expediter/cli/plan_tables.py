"""What `expediter plan` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from expediter.studies.planning.answer import Choice, Plan, Point

_SHOWN_POINTS: Final = 10
_SHOWN_REASONS: Final = 12


def print_plan(plan: Plan) -> None:
    """Print the choices, or what came nearest; then what they cost against what they reach, and how sure this is."""
    from expediter.studies.planning.remarks import remarks_on

    console = Console(highlight=False, soft_wrap=True)
    trace = plan.trace
    rate = "all at once" if trace.mean_rate_rps is None else f"{trace.mean_rate_rps:.3g} requests/s"
    console.print(
        f"[bold]{plan.model}[/] for [bold]{trace.name}[/]: {trace.num_requests} requests, {rate}, input "
        f"{trace.input_tokens_mean:.0f} tokens, output {trace.output_tokens_mean:.0f} on average; "
        f"{plan.attainment:.1%} of them must meet their targets"
    )
    if plan.choices:
        console.print(_choices_table(plan.choices))
        for number, choice in enumerate(plan.choices, 1):
            console.print(f"{number}. {_latencies(choice.point)}. {_breaks(choice)}")
        console.print("\nTo serve:")
        for number, choice in enumerate(plan.choices, 1):
            console.print(f"{number}. {choice.command.line or '-'}")
        for note in dict.fromkeys(note for choice in plan.choices for note in choice.command.notes):
            console.print(f"   ({note})")
    else:
        _print_failure(plan, console)
    if len(plan.frontier) > 1:
        console.print("\nMore money reaches more:")
        console.print(_frontier_table(plan.frontier))
    console.print()
    for line in remarks_on(plan):
        console.print(line)


def _choices_table(choices: Sequence[Choice]) -> Table:
    table = Table("", "replicas", "preset", "$/h", "attained", "bears", "breaks first")
    for column in table.columns[3:6]:
        column.justify = "right"
    for number, choice in enumerate(choices, 1):
        setup, limit = choice.point.setup, choice.limit
        low, high = (f"{share:.1%}" for share in (min(choice.point.attainments), max(choice.point.attainments)))
        table.add_row(
            str(number),
            setup.replicas_text(choice.point.replicas),
            setup.policy,
            f"{choice.point.cost_per_hour:.2f}",
            low if low == high else f"{low} to {high}",
            f"{choice.bears:.2f}x",
            " ".join(part for part in (limit.target.upper(), limit.cause) if part),
        )
    return table


def _latencies(point: Point) -> str:
    measured = point.measured
    said = [
        f"{name.upper()} p90 {_seconds(getattr(measured, f'{name}_s').p90)}, {slack:.0%} of the target to spare"
        for name, slack in measured.slack.items()
    ]
    return "; ".join(said) or "no targets"


def _breaks(choice: Choice) -> str:
    if choice.fails_at is None:
        return f"Bears {choice.bears:g} times the load, the most that was tried"
    return f"At {choice.fails_at:g} times the load {choice.limit.words}"


def _frontier_table(points: Sequence[Point]) -> Table:
    table = Table("set-up", "$/h", "attained", "TTFT p90", "TPOT p90", "KV used at most")
    for column in table.columns[1:]:
        column.justify = "right"
    for point in points[:_SHOWN_POINTS]:
        measured = point.measured
        table.add_row(
            point.setup.describe(point.replicas),
            f"{point.cost_per_hour:.2f}",
            f"{measured.attainment:.2%}",
            _seconds(measured.ttft_s.p90),
            _seconds(measured.tpot_s.p90),
            f"{measured.peak_kv_use:.0%}",
        )
    return table


def _print_failure(plan: Plan, console: Console) -> None:
    console.print("[bold]Nothing that was tried meets the targets.[/]")
    if plan.nearest is not None:
        point, limit = plan.nearest
        console.print(
            f"Nearest: {point.setup.describe(point.replicas)}, {point.cost_per_hour:.2f} $/h: "
            f"{point.measured.attainment:.2%} meet them; {limit.words} ({limit.cause})"
        )
    for out in plan.ruled_out[:_SHOWN_REASONS]:
        console.print(f"{out.gpu} {out.split}: {out.reason}")
    if len(plan.ruled_out) > _SHOWN_REASONS:
        console.print(f"and {len(plan.ruled_out) - _SHOWN_REASONS} more kinds of set-up")


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g} s"
