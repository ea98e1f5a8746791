"""`expediter compare`: presets side by side on one trace, over load."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from expediter.cli.again import command_again
from expediter.cli.progress import progress_bar
from expediter.cli.simulate import output_file
from expediter.cli.simulation_flags import add_hardware_flags, add_limit_flags, add_trace_flags, shared_config

if TYPE_CHECKING:
    from rich.table import Table

    from expediter.studies.comparison import Comparison, ComparisonSpec

_DEFAULT_PRESETS = ("vllm", "sarathi", "expediter")
_DEFAULT_LOADS = "0.5,0.75,1,1.25,1.5"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command; imports nothing heavy."""
    parser = subparsers.add_parser(
        "compare",
        help="put presets side by side over load",
        description="Simulate presets side by side on one trace over a range of loads, and say what follows.",
    )
    parser.set_defaults(run=run)
    what = parser.add_argument_group("what is compared")
    what.add_argument(
        "--preset",
        action="append",
        metavar="[NAME=]PRESET[:SETTING=VALUE,...]",
        help="a preset, perhaps with settings of its own (simulate's flags without dashes) and a name; may be "
        f"repeated, the first is the measure of load (default: {', '.join(_DEFAULT_PRESETS)})",
    )
    loads = what.add_mutually_exclusive_group()
    loads.add_argument(
        "--load",
        default=_DEFAULT_LOADS,
        metavar="X,X,...",
        help="multiples of the rate at which the first preset finishes the requests when all are there from the start "
        "(default: %(default)s)",
    )
    loads.add_argument("--rate-scale", metavar="X,X,...", help="or multiples of the trace's own rate")
    what.add_argument(
        "--seeds",
        type=int,
        default=1,
        metavar="N",
        help="draws of the traffic, from --seed on; one takes arrivals as recorded (default: 1)",
    )
    add_trace_flags(parser.add_argument_group("what is asked for"))
    add_hardware_flags(parser.add_argument_group("what serves it (default for all; a preset may have its own)"))
    add_limit_flags(parser.add_argument_group("limits of each replica (default: the preset's)"))
    out = parser.add_argument_group("output")
    out.add_argument("--html", metavar="FILE", help="write a page with plots that needs nothing beside it")
    out.add_argument("--json", metavar="FILE", help="write everything as JSON; - for standard output, without tables")
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: one per CPU)")


def run(args: argparse.Namespace) -> int:
    """Compare, print, and write what was asked for.

    Raises:
        ConfigurationError: the trace, a preset or a flag cannot be used.
    """
    from expediter.studies.comparison import compare, num_runs
    from expediter.studies.comparison_page import comparison_page
    from expediter.studies.workers import Workers

    spec = _spec(args)
    with (
        output_file(None if args.json == "-" else args.json) as json_file,
        output_file(args.html) as html_file,
    ):
        with Workers(args.workers) as workers, progress_bar("comparing", "simulations", num_runs(spec)) as progress:
            comparison = compare(spec, workers, progress)
        if json_file is not None:
            json_file.write(comparison.to_json())
        if html_file is not None:
            html_file.write(comparison_page(comparison, command_again(args.words, "comparison.html")).encode())
    if args.json == "-":
        sys.stdout.write(comparison.to_json().decode())
    else:
        _print(comparison)
    return 0


def _spec(args: argparse.Namespace) -> ComparisonSpec:
    from expediter.core.errors import ConfigurationError
    from expediter.studies.comparison import ComparisonSpec, LoadUnit
    from expediter.studies.entries import parse_entries
    from expediter.studies.runs import TraceSpec

    if args.seeds < 1:
        raise ConfigurationError(f"seeds must be at least 1, not {args.seeds}")
    return ComparisonSpec(
        entries=parse_entries(args.preset or _DEFAULT_PRESETS, shared_config(args)),
        trace=TraceSpec(
            name=args.trace, limit=args.limit, spread_ticks=not args.no_spread_ticks, strict=args.strict, seed=args.seed
        ),
        loads=_numbers("load" if args.rate_scale is None else "rate scale", args.rate_scale or args.load),
        unit=LoadUnit.CAPACITY if args.rate_scale is None else LoadUnit.TRACE,
        seeds=tuple(range(args.seed, args.seed + args.seeds)),
    )


def _numbers(what: str, text: str) -> tuple[float, ...]:
    from expediter.core.errors import ConfigurationError

    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigurationError(f"{what} must be numbers with commas between them, not {text!r}") from error


def _print(comparison: Comparison) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    for table in (_goodput_table(comparison), _latency_table(comparison)):
        console.print(table)
    found = comparison.findings
    console.print(found.headline, markup=False)
    limits = f"at load {comparison.loads[-1].load:g}"
    for title, texts in (
        ("how far", found.reach),
        (limits, found.limits),
        ("how sure", found.certainty),
        ("with care", found.caveats),
    ):
        if texts:
            told = Table.grid(padding=(0, 1))
            for text in texts:
                told.add_row("-", Text(text))
            console.print(f"\n{title}", style="bold")
            console.print(told)


def _goodput_table(comparison: Comparison) -> Table:
    from statistics import fmean

    from rich import box
    from rich.table import Table
    from rich.text import Text

    from expediter.studies.comparison import LoadUnit
    from expediter.studies.words import number, percent

    if comparison.unit is LoadUnit.TRACE:
        unit = f"load 1 = the trace's own rate, {number(comparison.trace.mean_rate_rps or 0.0)} requests/s"
    else:
        unit = f"load 1 = {number(comparison.capacity_rps or 0.0)} requests/s, {comparison.names[0]}'s capacity"
    table = Table(
        title=f"goodput, requests/s and share in time ({unit})",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
    )
    table.add_column("preset", overflow="fold", min_width=_name_width(comparison))
    for point in comparison.loads:
        table.add_column(f"load {point.load:g}", justify="right", no_wrap=True)
    for name in comparison.names:
        row = [Text(name)]
        for cell, verdict in zip(comparison.cells_of(name), comparison.findings.verdicts, strict=True):
            leads = verdict.runner_up is not None and name in verdict.leaders
            share = percent(fmean(cell.attainment)).replace("over ", ">").replace("under ", "<").replace(" ", "")
            text = f"{number(fmean(cell.goodput_rps))}  {share}"
            row.append(Text(text, style="bold" if leads else ""))
        table.add_row(*row)
    return table


def _name_width(comparison: Comparison) -> int:
    """Return the width below which names are not broken: a usual one's; settings may take several lines."""
    return min(10, max(map(len, comparison.names)))


def _latency_table(comparison: Comparison) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from expediter.studies.words import percent, seconds

    last = comparison.loads[-1].load
    table = Table(title=f"at load {last:g}", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    for column in ("preset", "TTFT p50", "p99", "TPOT p50", "p99", "prefix hits", "KV used"):
        if column == "preset":
            table.add_column(column, overflow="fold", min_width=_name_width(comparison))
        else:
            table.add_column(column, justify="right", no_wrap=True)
    for cell in comparison.cells_at(last):
        latencies = (cell.ttft_s.p50, cell.ttft_s.p99, cell.tpot_s.p50, cell.tpot_s.p99)
        hits = "-" if cell.prefix_hit_rate is None else percent(cell.prefix_hit_rate)
        table.add_row(Text(cell.entry), *map(seconds, latencies), hits, percent(cell.kv_used_share))
    return table
