"""`expediter replay`: a trace over HTTP, live figures beside simulated ones."""

from __future__ import annotations

import argparse
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from expediter.core.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.console import Console

    from expediter.assembly.replay import ReplayReport

_DEFAULT_SLO = "ttft=2,tpot=0.2"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "replay",
        help="send a trace to a server and compare it with its simulation",
        description="Send a trace's requests, as text with the trace's shared prefixes, to an OpenAI-compatible server "
        "at their arrival times. An Expediter server is then simulated for the same requests, with a step-time model "
        "fitted to the steps that it ran.",
    )
    parser.add_argument("--trace", required=True, metavar="NAME|FILE", help="a trace file, or: demo")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="of a running server, such as http://127.0.0.1:8000")
    where.add_argument("--start", action="store_true", help="start a server for the run, on a free port")
    parser.add_argument("--model", help="with --start: model folder or name; default SmolLM2-135M-Instruct")
    parser.add_argument("--replicas", type=int, help="with --start: number of replicas; default 1")
    parser.add_argument("--preset", help="with --start: preset of the server; default sarathi")
    parser.add_argument("--api-key", help="sent as a bearer token")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N requests")
    parser.add_argument(
        "--rate-scale", type=float, metavar="X", help="arrival rate times X; default: as --load says for this machine"
    )
    parser.add_argument("--prompt-scale", type=float, metavar="X", help="prompt lengths times X; demo: 1/32, else 1")
    parser.add_argument("--output-scale", type=float, metavar="X", help="output lengths times X; demo: 1/16, else 1")
    parser.add_argument(
        "--load", type=float, default=0.6, metavar="X", help="share of what the machine can take; default %(default)s"
    )
    parser.add_argument(
        "--slo",
        action="append",
        metavar="ttft=S,tpot=S",
        help=f"targets, sent along and judged by; several times: for requests in turn; default {_DEFAULT_SLO}",
    )
    parser.add_argument("--seed", type=int, default=0, help="spread of arrivals in coarse ticks; default %(default)s")
    parser.add_argument("--strict", action="store_true", help="stop at the trace's first defect; else it is left out")
    parser.add_argument("--ask", metavar="QUESTION", help="ask the model this afterwards and print its answer")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write both reports there")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; exit code 1 if a request failed."""
    import asyncio

    import msgspec
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from expediter.assembly.replay import Replay, ReplayConfig
    from expediter.assembly.traces import load_trace
    from expediter.core.slo import parse_slo
    from expediter.runtime.load_client import LoadClient

    trace = load_trace(args.trace, seed=args.seed, strict=args.strict)
    for line in trace.defects:
        print(f"expediter: {line}", file=sys.stderr)
    is_demo = args.trace == "demo"
    config = ReplayConfig(
        trace=trace if args.limit is None else trace.take(args.limit),
        slos=tuple(parse_slo(text) for text in args.slo or [_DEFAULT_SLO]),
        load=args.load,
        rate_scale=args.rate_scale,
        prompt_scale=args.prompt_scale or (1 / 32 if is_demo else 1.0),
        output_scale=args.output_scale or (1 / 16 if is_demo else 1.0),
    )
    console = Console()
    with _server(args) as url:
        client = LoadClient(url, api_key=args.api_key)
        columns = (TextColumn("replaying"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("replay", total=None)
            replay = Replay(config, client, lambda done, total: bar.update(task, completed=done, total=total))
            report = asyncio.run(replay.run())
        _print(console, report, args.slo or [_DEFAULT_SLO])
        if args.json is not None:
            args.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
        if args.ask:
            answer = asyncio.run(replay.ask(args.ask))
            console.print(f"\n[bold]{args.ask}[/bold]\n{answer}", highlight=False)
    return 1 if report.live.num_failed else 0


def _server(args: argparse.Namespace) -> AbstractContextManager[str]:
    from expediter.assembly.server_process import running_server

    options = {"--replicas": args.replicas, "--preset": args.preset, "--api-key": args.api_key}
    if args.url:
        unused = [name for name in ("model", "replicas", "preset") if getattr(args, name) is not None]
        if unused:
            raise ConfigurationError(f"--{unused[0]} goes with --start, not with --url")
        return nullcontext(args.url)
    arguments = [args.model] if args.model else []
    arguments += [word for name, value in options.items() if value is not None for word in (name, str(value))]
    return running_server(arguments)


def _print(console: Console, report: ReplayReport, slos: list[str]) -> None:
    from rich.table import Table

    live, simulated = report.live, report.simulated
    title = f"{live.num_requests} requests in {live.span_s:.1f} s, rate {report.rate_scale:.3g} x the trace's"
    table = Table(title=title, title_justify="left")
    for column in ("", "live", "simulated", "difference"):
        table.add_column(column, justify="left" if not column else "right")

    def add(name: str, measured: float | None, modelled: float | None, form: str, *, relative: bool = True) -> None:
        difference = ""
        if measured and modelled is not None:
            difference = f"{modelled / measured - 1:+.0%}" if relative else f"{100 * (modelled - measured):+.1f} points"
        cells = ["-" if value is None else format(value, form) for value in (measured, modelled)]
        table.add_row(name, *cells, difference)

    for name, field in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("E2E", "e2e_s")):
        for statistic in ("mean", "p50", "p90", "p99"):
            modelled = getattr(getattr(simulated, field), statistic) if simulated else None
            add(f"{name} {statistic}, ms", _ms(getattr(getattr(live, field), statistic)), _ms(modelled), ".1f")
    for name, field, form, relative in (
        ("prefix hit rate", "prefix_hit_rate", ".1%", False),
        (f"SLO attainment ({' or '.join(slos)})", "slo_attainment", ".1%", False),
        ("goodput, requests/s", "goodput_rps", ".3f", True),
        ("output, tokens/s", "output_tokens_per_s", ".1f", True),
    ):
        add(name, getattr(live, field), getattr(simulated, field, None), form, relative=relative)
    console.print(table)
    if report.fit_error is not None:
        console.print(f"The step-time model misses single steps of this run by {report.fit_error:.0%} on average.")
    if live.num_failed:
        console.print(f"[red]{live.num_failed} requests failed[/red]; the first: {live.first_error}", highlight=False)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds
