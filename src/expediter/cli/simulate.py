"""`expediter simulate`: replay a trace on modelled GPUs."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TextIO

from expediter.cli.progress import progress_bar
from expediter.cli.simulation_flags import add_hardware_flags, add_limit_flags, add_trace_flags, shared_config
from expediter.cli.simulation_tables import print_report

if TYPE_CHECKING:
    from expediter.core.explanation import Span


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command; imports nothing heavy."""
    parser = subparsers.add_parser(
        "simulate",
        help="replay a trace on modelled GPUs",
        description="Replay a request trace on replicas that run the real scheduler and modelled GPUs.",
    )
    parser.set_defaults(run=run)
    what = parser.add_argument_group("what is asked for")
    add_trace_flags(what)
    what.add_argument(
        "--rate-scale",
        type=float,
        default=1.0,
        metavar="X",
        help="arrival rate as a multiple of the trace's: 2 is twice as fast (default: 1)",
    )
    system = parser.add_argument_group("what serves it")
    system.add_argument(
        "--preset", default="sarathi", metavar="NAME", help="composition of scheduling parts (default: %(default)s)"
    )
    add_hardware_flags(system)
    system.add_argument("--routing", metavar="NAME", help="routing policy instead of the preset's")
    add_limit_flags(parser.add_argument_group("limits of each replica (default: the preset's)"))
    _add_policy_flags(parser.add_argument_group("parts of the policy (default: the preset's; a wrong name lists them)"))
    out = parser.add_argument_group("output")
    out.add_argument(
        "--json", metavar="FILE", help="write the report as JSON; - for standard output, without the table"
    )
    out.add_argument(
        "--timeline", action="store_true", help="add to the JSON how the run went over time, and whole distributions"
    )
    out.add_argument(
        "--explain", action="append", default=[], metavar="ID", help="say what held this request; may be repeated"
    )
    out.add_argument("--events", metavar="FILE", help="write what happened to each request as JSON lines")


def _add_policy_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--ordering", "--scheduling-policy", metavar="NAME", help="who starts next (the second name is vLLM's)"
    )
    group.add_argument("--batching", metavar="NAME", help="what goes into a step together")
    group.add_argument("--memory", metavar="NAME", help="how many KV blocks a request must find to start")
    group.add_argument("--budget", metavar="NAME", help="how many tokens a step computes")
    group.add_argument("--victims", metavar="NAME", help="who gives way when blocks run out")
    group.add_argument("--preemption-mode", metavar="NAME", help="recompute, swap, or the cheaper of them")


def run(args: argparse.Namespace) -> int:
    """Simulate, print, and write what was asked for.

    Raises:
        ConfigurationError: the trace or a flag cannot be used.
    """
    from expediter.assembly.simulation import build_simulation, prepare_trace

    config = replace(
        shared_config(args),
        preset=args.preset,
        routing=args.routing,
        ordering=args.ordering,
        batching=args.batching,
        memory=args.memory,
        budget=args.budget,
        victims=args.victims,
        preemption_mode=args.preemption_mode,
        timeline=args.timeline,
    )
    trace = prepare_trace(
        args.trace,
        rate_scale=args.rate_scale,
        limit=args.limit,
        seed=args.seed,
        spread_ticks=not args.no_spread_ticks,
        strict=args.strict,
    )
    for line in trace.defects:
        print(f"expediter: {line}", file=sys.stderr)
    simulation = build_simulation(config)
    with output_file(args.events) as events, output_file(None if args.json == "-" else args.json) as json_file:
        with progress_bar("simulating", "requests", len(trace)) as progress:
            report = simulation.run(trace, events=events, progress=progress, explain=args.explain)
        if json_file is not None:
            json_file.write(report.to_json())
    if args.json == "-":
        sys.stdout.write(report.to_json().decode())
    else:
        print_report(report)
    for request_id in args.explain:
        # Standard output belongs to the JSON if that was asked for.
        _print_explanation(request_id, simulation.explanations, sys.stderr if args.json == "-" else sys.stdout)
    return 0


def _print_explanation(request_id: str, explanations: Mapping[str, tuple[Span, ...]], file: TextIO) -> None:
    from expediter.core.errors import ConfigurationError
    from expediter.core.explanation import timeline

    spans = explanations.get(request_id)
    if spans is None:
        raise ConfigurationError(f"no request {request_id!r}; the trace's are r0000000, r0000001 and so on")
    print(f"{request_id} arrived at {spans[0].from_s:.3f} s", file=file)
    print(*timeline(spans), sep="\n", file=file)


@contextlib.contextmanager
def output_file(name: str | None) -> Iterator[BinaryIO | None]:
    """Open an output file before the work is done, so that a bad path costs no simulation."""
    from expediter.core.errors import ConfigurationError

    if name is None:
        yield None
        return
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(Path(name).open("wb"))
        except OSError as error:
            raise ConfigurationError(f"cannot write {name!r}: {error.strerror}") from error
        yield file
