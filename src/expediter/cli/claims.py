"""`expediter claims`: published results, run again in simulation."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from expediter.cli.progress import progress_bar

if TYPE_CHECKING:
    from expediter.studies.claims.registry import ClaimResult


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command; imports nothing heavy."""
    parser = subparsers.add_parser(
        "claims",
        help="run published results again",
        description="Run published results of serving systems in simulation: published, ours, and whether they agree.",
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME",
        help="this claim; may be repeated (a wrong name lists them)",
    )
    parser.add_argument("--quick", action="store_true", help="a small version of everything; the figures are rough")
    parser.add_argument(
        "--data",
        type=Path,
        default=Path("../shared/data/traces"),
        metavar="DIR",
        help="folder of the public traces that some claims need; they are left out without (default: %(default)s)",
    )
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: one per CPU)")
    parser.add_argument("--json", metavar="FILE", help="write figures and measurements as JSON; - for standard output")
    parser.add_argument("--page", metavar="FILE", help="write the page of documentation; of a full run of all claims")


def run(args: argparse.Namespace) -> int:
    """Run the claims, print, and write what was asked for.

    Raises:
        ConfigurationError: a flag cannot be used.
    """
    from expediter.core.errors import ConfigurationError
    from expediter.studies.claims.frame import Effort
    from expediter.studies.claims.page import render
    from expediter.studies.claims.registry import claims_named, missing_files, run_claims, to_json
    from expediter.studies.workers import Workers

    if args.page is not None and (args.quick or args.only):
        raise ConfigurationError("--page needs a full run of all claims, so it goes with neither --quick nor --only")
    effort = Effort(quick=args.quick, data=args.data)
    claims = []
    for claim in claims_named(args.only):
        missing = missing_files(claim, effort)
        if not missing:
            claims.append(claim)
        elif args.page is not None or args.only:
            raise ConfigurationError(f"claim {claim.name} needs {', '.join(missing)} in {args.data} (--data)")
        else:
            print(f"expediter: {claim.name} is left out: no {', '.join(missing)} in {args.data}", file=sys.stderr)
    results: list[ClaimResult] = []
    with Workers(args.workers) as workers, progress_bar("running", "simulations") as bar:
        told = None if bar is None else lambda done, of, label: bar(done, f"last: {label}", of)
        for result in run_claims(claims, effort, workers, told):
            results.append(result)
            if args.json != "-":
                _print_result(result)
    content = to_json(results, effort)
    if args.json == "-":
        sys.stdout.write(content.decode())
    elif args.json is not None:
        _write(args.json, content)
    if args.page is not None:
        _write(args.page, render(results).encode())
    return 0


def _write(name: str, content: bytes) -> None:
    from expediter.core.errors import ConfigurationError

    try:
        Path(name).write_bytes(content)
    except OSError as error:
        raise ConfigurationError(f"cannot write {name!r}: {error.strerror}") from error


def _print_result(result: ClaimResult) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    claim, conclusion = result.claim, result.conclusion
    console.print(f"\n[bold]{claim.title}[/] ({claim.name})", highlight=False)
    table = Table("figure", "published", "ours", "")
    for figure in conclusion.figures:
        table.add_row(figure.what, figure.published, figure.measured, figure.verdict.value)
    console.print(table)
    for each in conclusion.tables:
        details = Table(*each.columns, title=each.title, title_justify="left", title_style="")
        for row in each.rows:
            details.add_row(*row)
        console.print(details)
    if conclusion.why:
        console.print(f"Why: {conclusion.why}", highlight=False)
