"""`expediter trace generate`: made-up traces."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from expediter.sim.trace_generators import Shape


def add_parser(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the action and its shapes; imports nothing heavy."""
    parser = actions.add_parser("generate", help="make a trace up: arrivals, lengths, shared prefixes, sessions")
    shapes = parser.add_subparsers(dest="shape", required=True, metavar="SHAPE")
    independent = shapes.add_parser("independent", help="requests that share nothing")
    _add_common(independent, "requests", input_mean=1024, output_mean=256)
    tree = shapes.add_parser("tree", help="prompts that begin with a path through a tree of shared texts")
    _add_common(tree, "requests", input_mean=256, output_mean=256)
    tree.add_argument("--depth", type=int, default=3, help="texts on a path, the common root included (default: 3)")
    tree.add_argument("--branches", type=int, default=4, help="texts to go on with, 1 / rank likely each (default: 4)")
    tree.add_argument("--node-tokens", type=int, default=512, help="length of a text (default: 512)")
    for name, words, turns, pause_s, system, input_mean, output_mean in (
        ("chat", "people who read and think between turns", 5, 60, 64, 128, 256),
        ("agents", "agents that call tools between turns", 12, 2, 4096, 1024, 128),
    ):
        sessions = shapes.add_parser(name, help=f"sessions of {words}; arrivals are the sessions' starts")
        _add_common(sessions, "sessions", input_mean=input_mean, output_mean=output_mean)
        sessions.add_argument("--turns", type=float, default=turns, help="mean per session (default: %(default)s)")
        sessions.add_argument(
            "--pause", type=float, default=pause_s, metavar="S", help="mean before the next turn (default: %(default)s)"
        )
        sessions.add_argument(
            "--system-tokens", type=int, default=system, help="prompt that all sessions share (default: %(default)s)"
        )
        sessions.add_argument(
            "--max-context", type=int, default=32_768, help="a session ends before it (default: %(default)s)"
        )
        sessions.add_argument(
            "--answer-speed", type=float, default=50, metavar="X", help="tokens/s assumed (default: %(default)s)"
        )


def _add_common(parser: argparse.ArgumentParser, what: str, *, input_mean: int, output_mean: int) -> None:
    parser.set_defaults(run=run)
    parser.add_argument(
        "-o", "--output", required=True, type=Path, metavar="FILE", help="gzip if it ends in .gz; - for standard output"
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same file (default: 0)")
    parser.add_argument("--requests", type=int, metavar="N", help="stop after N requests")
    parser.add_argument("--duration", type=float, metavar="S", help="stop after S seconds of the trace")
    times = parser.add_argument_group("arrivals")
    times.add_argument("--rate", type=float, metavar="X", help=f"mean {what}/s (default: the curve's, else 1)")
    times.add_argument("--cv", type=float, default=1.0, help="of the gaps; 1 is Poisson, more is bursty (default: 1)")
    times.add_argument("--on", type=float, metavar="S", help="mean length of bursts, with --off")
    times.add_argument("--off", type=float, metavar="S", help="mean length of the silences between bursts")
    times.add_argument("--rate-curve", metavar="FILE", help="parquet of rates by window, such as ServeGen's")
    times.add_argument("--curve-model", metavar="NAME", help="whose rates, if the curve has several models")
    lengths = parser.add_argument_group("lengths in tokens (of what a request adds to shared texts)")
    lengths.add_argument("--input-mean", type=float, default=input_mean, metavar="N", help="default: %(default)s")
    lengths.add_argument("--input-cv", type=float, default=1.0, help="lognormal (default: 1)")
    lengths.add_argument("--output-mean", type=float, default=output_mean, metavar="N", help="default: %(default)s")
    lengths.add_argument("--output-cv", type=float, default=1.0, help="lognormal (default: 1)")
    lengths.add_argument("--lengths-from", metavar="NAME|FILE", help="draw recorded pairs of lengths from this trace")


def run(args: argparse.Namespace) -> int:
    """Generate and write.

    Raises:
        ConfigurationError: a flag or file cannot be used.
    """
    from expediter.assembly.trace_generation import GenerationConfig, generate
    from expediter.sim.trace_writer import write_rows

    config = GenerationConfig(
        shape=_shape(args),
        num_requests=args.requests,
        duration_s=args.duration,
        rate_rps=args.rate,
        cv=args.cv,
        on_s=args.on,
        off_s=args.off,
        rate_curve=args.rate_curve,
        curve_model=args.curve_model,
        input_mean=args.input_mean,
        input_cv=args.input_cv,
        output_mean=args.output_mean,
        output_cv=args.output_cv,
        lengths_from=args.lengths_from,
        seed=args.seed,
    )
    num_rows = write_rows(args.output, generate(config))
    print(f"{num_rows} requests written to {args.output}", file=sys.stderr)
    return 0


def _shape(args: argparse.Namespace) -> Shape:
    from expediter.sim.trace_generators import Independent, PrefixTree, Sessions

    if args.shape == "independent":
        return Independent()
    if args.shape == "tree":
        return PrefixTree(depth=args.depth, branches=args.branches, node_tokens=args.node_tokens)
    return Sessions(
        turns_mean=args.turns,
        pause_mean_s=args.pause,
        system_tokens=args.system_tokens,
        max_context=args.max_context,
        answer_tokens_per_s=args.answer_speed,
    )
