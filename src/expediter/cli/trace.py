"""`expediter trace`: describe, convert, cut and make request traces."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from expediter.cli import trace_generate

if TYPE_CHECKING:
    from expediter.sim.trace_description import Lengths, TraceDescription
    from expediter.sim.trace_rows import TraceRow


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command; imports nothing heavy."""
    parser = subparsers.add_parser(
        "trace",
        help="describe, convert, cut and make request traces",
        description="Work on request traces of any size, row by row. Any known format is read: Mooncake jsonl, Azure "
        "csv or parquet, vLLM's and SGLang's request logs as csv, Expediter's jsonl; demo is a trace that comes along.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    describe = actions.add_parser("describe", help="rate, burstiness, lengths, prefix reuse, classes and tenants")
    _add_input(describe)
    describe.add_argument("--json", metavar="FILE", help="write JSON; - for standard output, without the tables")
    describe.set_defaults(run=run_describe)
    convert = actions.add_parser("convert", help="write a trace as Expediter's jsonl, sorted by arrival")
    _add_input(convert)
    _add_output(convert)
    convert.set_defaults(run=run_convert)
    cut = actions.add_parser("slice", help="write a part of a trace; several conditions apply in the order below")
    _add_input(cut)
    _add_output(cut)
    cut.add_argument(
        "--start", type=float, default=0.0, metavar="S", help="arrivals from here; times then count from S"
    )
    cut.add_argument("--end", type=float, metavar="S", help="arrivals before this time")
    cut.add_argument("--conversations", type=int, default=1, metavar="K", help="one conversation in K, each whole")
    cut.add_argument(
        "--conversation-blocks",
        type=int,
        default=2,
        metavar="N",
        help="requests whose first N prefix blocks are equal are one conversation (default: 2)",
    )
    cut.add_argument("--every", type=int, default=1, metavar="K", help="each K-th request")
    cut.add_argument("--first", type=int, metavar="N", help="at most N requests")
    cut.set_defaults(run=run_slice)
    trace_generate.add_parser(actions)


def _add_input(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="NAME|FILE", help="a trace file, or: demo")
    parser.add_argument("--strict", action="store_true", help="stop at the first defect instead of leaving its row out")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the spread of arrivals within coarse ticks (default: 0)"
    )
    parser.add_argument("--no-spread-ticks", action="store_true", help="keep arrivals on a trace's coarse ticks")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", required=True, type=Path, metavar="FILE", help="gzip if it ends in .gz; - for standard output"
    )


@contextmanager
def _rows(args: argparse.Namespace) -> Iterator[Iterator[TraceRow]]:
    """Give the rows of the trace that was named; say afterwards, on standard error, what was left out."""
    from expediter.assembly.traces import open_trace

    rows, defects = open_trace(args.trace, seed=args.seed, spread_ticks=not args.no_spread_ticks, strict=args.strict)
    args.defects = defects
    yield rows
    for line in defects.report():
        print(f"expediter: {line}", file=sys.stderr)


def _write(args: argparse.Namespace, rows: Iterator[TraceRow]) -> None:
    from expediter.core.errors import ConfigurationError
    from expediter.sim.trace_writer import write_rows

    if args.output.is_file() and Path(args.trace).is_file() and args.output.samefile(args.trace):
        raise ConfigurationError(f"{str(args.output)!r} is the trace that is read; write to another file")
    num_rows = write_rows(args.output, rows)
    print(f"{num_rows} requests written to {args.output}", file=sys.stderr)


def run_convert(args: argparse.Namespace) -> int:
    """Write the trace as Expediter's jsonl."""
    with _rows(args) as rows:
        _write(args, rows)
    return 0


def run_slice(args: argparse.Namespace) -> int:
    """Write a part of the trace."""
    from expediter.sim.trace_slices import TraceSlice

    part = TraceSlice(
        start_s=args.start,
        end_s=args.end,
        conversations=args.conversations,
        conversation_blocks=args.conversation_blocks,
        every=args.every,
        first=args.first,
    )
    with _rows(args) as rows:
        _write(args, part.of(rows))
    return 0


def run_describe(args: argparse.Namespace) -> int:
    """Print what the trace asks for."""
    from dataclasses import replace

    import msgspec

    from expediter.core.errors import ConfigurationError
    from expediter.sim.trace_description import describe

    with _rows(args) as rows:
        description = describe(Path(args.trace).name, rows)
    description = replace(description, num_defects=args.defects.count)
    if args.json is not None:
        text = msgspec.json.format(msgspec.json.encode(description), indent=2).decode() + "\n"
        if args.json == "-":
            sys.stdout.write(text)
            return 0
        try:
            Path(args.json).write_text(text)
        except OSError as error:
            raise ConfigurationError(f"cannot write {args.json!r}: {error.strerror}") from error
    _print_description(description)
    return 0


def _print_description(trace: TraceDescription) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"[bold]{trace.name}[/] {trace.num_requests} requests", highlight=False)
    facts = Table.grid(padding=(0, 2))
    for name, text in _facts(trace):
        facts.add_row(name, text)
    console.print(facts)
    lengths = Table("tokens", "mean", "p50", "p90", "p99", "max")
    for column in lengths.columns[1:]:
        column.justify = "right"
    lengths.add_row("input", *_cells(trace.input_tokens))
    lengths.add_row("output", *_cells(trace.output_tokens))
    console.print(lengths)
    for name, counts in (("class", trace.slo_classes), ("tenant", trace.tenants)):
        if counts:
            table = Table(name, "requests")
            table.columns[1].justify = "right"
            for key, count in counts.items():
                table.add_row(key or "-", str(count))
            console.print(table)


def _facts(trace: TraceDescription) -> Iterator[tuple[str, str]]:
    yield "span", f"{trace.span_s:.1f} s from {trace.start_s:.1f} s on"
    yield "rate", "all at once" if trace.mean_rate_rps is None else f"{trace.mean_rate_rps:.2f} requests/s"
    if trace.peak_minute_rps is not None:
        yield "busiest minute", f"{trace.peak_minute_rps:.2f} requests/s"
    if trace.gap_cv is not None:
        yield "CV of the gaps", f"{trace.gap_cv:.2f} (Poisson arrivals: 1)"
    if trace.num_sequences != trace.num_requests:
        yield "sequences", str(trace.num_sequences)
    if trace.prefix_reuse is None:
        yield "prefix reuse", "not recorded"
    else:
        yield (
            "prefix reuse",
            f"{trace.prefix_reuse:.1%} of the prompt tokens with an unlimited cache, blocks of "
            f"{trace.prefix_block_tokens} tokens",
        )
    if trace.num_defects:
        yield "left out", f"{trace.num_defects} rows with defects"


def _cells(lengths: Lengths) -> list[str]:
    return [f"{lengths.mean:.0f}", *(f"{v:.0f}" for v in (lengths.p50, lengths.p90, lengths.p99)), str(lengths.max)]
