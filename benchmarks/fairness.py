"""Two clients, one twice as greedy as the other, on a replica that cannot serve both: who gets how much.

VTC's experiment (arXiv 2401.00588): 90 and 180 requests per minute of 256 prompt and 256 output tokens, Llama-2-7B on
an A10 (modelled), room for 10,000 KV tokens. Service is weighted tokens: 1 per prompt token, 2 per output token. Under
first come, first served the gap between the clients grows as long as both wait; a fair order keeps it within its bound.
"""

from __future__ import annotations

import argparse

from benchmarks.report import Row, add_json_option, publish
from expediter.studies.claims.vtc import PAPER, Workload, gap_at, gaps

__all__ = ["PAPER", "Workload", "gaps"]
_MARKS_S = (100, 200, 300, 400, 500)


def measure(ordering: str) -> Row:
    history = gaps(PAPER, ordering)
    at = {f"gap at {mark} s": round(gap_at(history, mark)) for mark in _MARKS_S}
    bound = {"fair_share": PAPER.fair_bound, "deficit_prefix": PAPER.deficit_bound}.get(ordering)
    return {
        "ordering": ordering,
        **at,
        "largest gap": round(max(gap for _, gap in history)),
        "bound": "none" if bound is None else round(bound),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--orderings", default="fcfs,lifo,fair_share,deficit_prefix", help="comma-separated")
    add_json_option(parser)
    args = parser.parse_args()
    rows = [measure(ordering) for ordering in args.orderings.split(",")]
    publish("difference of weighted service between two clients", rows, args.json)


if __name__ == "__main__":
    main()
