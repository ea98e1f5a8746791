"""The `expediter` command: parse, call, print. Every command lives in a module of its own with `add_parser`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from expediter import __version__
from expediter.cli import claims, compare, key, plan, replay, serve, simulate, trace
from expediter.core.errors import ExpediterError

COMMANDS = (serve, key, simulate, compare, plan, replay, trace, claims)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; building it imports no command's heavy parts."""
    parser = argparse.ArgumentParser(
        prog="expediter", description="One scheduler for LLM inference: serve with it, or plan capacity with it."
    )
    parser.add_argument("--version", action="version", version=f"expediter {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; errors of the user's making are one line on stderr and exit code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = build_parser().parse_args(words)
    args.words = words  # a report says how to get it again
    try:
        code: int = args.run(args)
    except ExpediterError as error:
        print(f"expediter: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("expediter: interrupted", file=sys.stderr)
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
