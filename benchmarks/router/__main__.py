"""What a router costs, ours and others in turn, before four mock backends.

CPU-seconds of the router's processes per 1000 requests (user and system, from /proc), for whole answers and for streams
of 64 chunks 5 ms apart, and what it adds to the median latency of a single client. The first run makes the peers'
environments. "floor" forwards and does nothing else, on the HTTP parts that ours is built on.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from benchmarks.peers.environments import DEFAULT_CACHE
from benchmarks.report import Row, add_json_option, publish
from benchmarks.router.processes import (
    Backends,
    Command,
    Load,
    Router,
    compile_c,
    expediter,
    floor,
    scratch,
    sglang_router,
    smg,
)
from expediter.assembly.server_process import left_at_sigterm

NUM_BACKENDS: Final = 4
NUM_CHUNKS: Final = 64
GAP_US: Final = 5000
LOADS: Final = {
    "whole, c=32": Load(32, 8000, is_stream=False),
    "whole, c=256": Load(256, 8000, is_stream=False),
    "stream, c=32": Load(32, 320, is_stream=True),
    "stream, c=256": Load(256, 1536, is_stream=True),
}
SINGLE: Final = Load(1, 500, is_stream=False)
MANY_STREAMS: Final = Load(640, 6400, is_stream=True)
"""For two processes of ours: 640 streams of 64 chunks 5 ms apart are 2000 requests/s if nothing takes time."""


def participants(names: Sequence[str], cache: Path, folder: Path) -> dict[str, Command]:
    """Return the routers to compare, by name."""
    every: dict[str, Callable[[], Command]] = {
        "floor": floor,
        "expediter predicted_ttft": lambda: expediter(folder, "--routing", "predicted_ttft"),
        "expediter cache_aware": lambda: expediter(folder, "--routing", "cache_aware"),
        "smg round_robin": lambda: smg("round_robin", cache),
        "smg cache_aware": lambda: smg("cache_aware", cache),
        "sglang-router round_robin": lambda: sglang_router("round_robin", cache),
        "sglang-router cache_aware": lambda: sglang_router("cache_aware", cache),
    }
    return {name: make() for name, make in every.items() if any(part in name for part in names)}


def one_round(
    routers: Sequence[Router], backends: Backends, generator: Path, samples: dict[tuple[str, str], list[float]]
) -> None:
    """Give each router its turn at each load; append CPU-seconds per 1000 requests and latencies to the samples."""
    direct = SINGLE.run(generator, backends.ports[0])["p50_ms"]
    for router in routers:
        single = SINGLE.run(generator, router.port)
        samples.setdefault((router.name, "added p50"), []).append(single["p50_ms"] - direct)
    for name, load in LOADS.items():
        for router in routers:
            before_s = router.cpu_s()
            figures = load.run(generator, router.port)
            cpu_s = (router.cpu_s() - before_s) / load.num_requests * 1000
            samples.setdefault((router.name, name), []).append(cpu_s)
            ttft = samples.setdefault((router.name, name + " ttft"), [])
            ttft.append(figures["ttft_p50_ms"])


def table(routers: Mapping[str, Command], samples: Mapping[tuple[str, str], Sequence[float]]) -> list[Row]:
    """Return a row per router and load: median and minimum over the rounds."""
    rows: list[Row] = []
    for router in routers:
        row: Row = {"router": router}
        for load in LOADS:
            costs = samples[router, load]
            row[f"{load}: CPU s / 1000"] = f"{statistics.median(costs):.3f} ({min(costs):.3f})"
        added = samples[router, "added p50"]
        row["added p50 ms, c=1"] = f"{statistics.median(added):.3f} ({min(added):.3f})"
        rows.append(row)
    return rows


def against_smg(samples: Mapping[tuple[str, str], Sequence[float]]) -> list[Row]:
    """Return ours by smg's cache_aware, round by round: the median ratio and its range."""
    rows: list[Row] = []
    for ours in dict.fromkeys(router for router, _ in samples if router.startswith("expediter")):
        for case in (*LOADS, "added p50"):
            theirs = samples.get(("smg cache_aware", case))
            if theirs is None:
                continue
            ratios = [a / b for a, b in zip(samples[ours, case], theirs, strict=True) if b > 0]
            ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "-"
            rows.append({"router": ours, "case": case, "by smg cache_aware": ratio})
    return rows


def two_processes(backends: Backends, generator: Path, folder: Path) -> Row:
    """Return what two processes of ours reach together with streams, and what share of the machine they take."""
    router = Router("expediter x 2", expediter(folder, "--gateway-processes", "2"), backends.ports, folder)
    try:
        MANY_STREAMS.run(generator, router.port)  # connections are made, code is warm
        before_s, backends_before_s, started_s = router.cpu_s(), backends.cpu_s(), time.monotonic()
        figures = MANY_STREAMS.run(generator, router.port)
        wall_s = time.monotonic() - started_s
        cores = len(os.sched_getaffinity(0))
        used_s = router.cpu_s() - before_s
        return {
            "router": "expediter, 2 processes",
            "streams at once": MANY_STREAMS.concurrency,
            "requests/s": round(figures["good"] / figures["seconds"]),
            "chunks/s": round(figures["chunks"] / figures["seconds"]),
            "router CPU s / 1000": round(used_s / MANY_STREAMS.num_requests * 1000, 3),
            "router, share of all cores": f"{used_s / wall_s / cores:.0%}",
            "backends, share of all cores": f"{(backends.cpu_s() - backends_before_s) / wall_s / cores:.0%}",
            "TTFT p50 ms": round(figures["ttft_p50_ms"], 1),
            "TTFT p99 ms": round(figures["ttft_p99_ms"], 1),
        }
    finally:
        router.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="folder of the peers' environments")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each router at each load (default: 7)")
    parser.add_argument("--routers", nargs="+", default=[""], metavar="TEXT", help="only those whose name contains one")
    parser.add_argument("--without-throughput", action="store_true", help="leave out the run with two processes")
    add_json_option(parser)
    args = parser.parse_args()
    samples: dict[tuple[str, str], list[float]] = {}
    with left_at_sigterm(), ExitStack() as stack:
        folder = Path(stack.enter_context(scratch()))
        generator = compile_c("load_generator", folder)
        backends = Backends(compile_c("mock_backend", folder), NUM_BACKENDS, NUM_CHUNKS, GAP_US)
        stack.callback(backends.close)
        commands = participants(args.routers, args.cache, folder)
        routers = []
        for name, command in commands.items():
            routers.append(Router(name, command, backends.ports, folder))
            stack.callback(routers[-1].close)
        for number in range(args.rounds):
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
            # Nobody always comes after the same one.
            turn = number % len(routers)
            one_round(routers[turn:] + routers[:turn], backends, generator, samples)
        for router in routers:
            router.close()
        throughput = [] if args.without_throughput else [two_processes(backends, generator, folder)]
    title = f"{NUM_BACKENDS} backends, streams of {NUM_CHUNKS} chunks: median (minimum) of {args.rounds} rounds"
    publish(title, table(commands, samples), args.json)
    for name, rows in (("by-smg", against_smg(samples)), ("throughput", throughput)):
        if rows:
            publish(name, rows, args.json and args.json.with_stem(f"{args.json.stem}-{name}"))


if __name__ == "__main__":
    main()
