"""The simulator on one core: CPU time per request, steps per second, peak memory.

Two public traces, as far as they are there, and growth: in replicas with as many requests each, and in requests with as
many replicas. Requests for growth are made as they are needed. Every run is a process of its own, so that its peak
memory is its own, and every run's report must account for all requests.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import resource
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.report import Row, add_json_option, publish
from expediter.assembly.simulation import SimulationConfig, build_simulation, prepare_trace
from expediter.core.request import Request
from expediter.sim.synthetic_tokens import prompt_tokens
from expediter.sim.trace import Trace

TRACES = Path(__file__).parents[2] / "shared" / "data" / "traces"
_LARGE = SimulationConfig(model="llama-3.1-70b", gpu="a100-80g", tensor_parallel=8)
PUBLIC = {
    "Azure 2023 conversation": ("azure2023_conv.parquet", replace(_LARGE, replicas=2)),
    "Mooncake conversation": ("mooncake_fast25_conversation_trace.jsonl.gz", replace(_LARGE, replicas=8)),
}
PER_REPLICA = {"quick": 20, "usual": 40, "large": 200}
REQUESTS = {"quick": (1000, 4000), "usual": (5000, 20_000, 80_000), "large": (10_000, 100_000, 1_000_000)}
# Small replicas, so that their caches are full soon and memory has its final size.
_NUM_BLOCKS = 1024
_REQUESTS_PER_S = 4.0  # and replica: about a dozen run at a time
_DRAWN_AT_ONCE = 4096
_NO_IDS = np.empty(0, np.int64)


def requests(num_requests: int, num_replicas: int) -> Iterator[Request]:
    """Yield requests of 200 prompt and 60 output tokens in the mean, geometric both, that arrive at random."""
    rng = np.random.default_rng(0)
    now_s = 0.0
    for first in range(0, num_requests, _DRAWN_AT_ONCE):
        count = min(_DRAWN_AT_ONCE, num_requests - first)
        gaps_s = rng.exponential(1 / (_REQUESTS_PER_S * num_replicas), count).tolist()
        inputs, outputs = rng.geometric(1 / 200, count).tolist(), rng.geometric(1 / 60, count).tolist()
        for number, gap_s, num_input, num_output in zip(
            range(first, first + count), gaps_s, inputs, outputs, strict=True
        ):
            now_s += gap_s
            yield Request(
                request_id=f"r{number:08d}",
                prompt=prompt_tokens(number, num_input, _NO_IDS, 1),
                max_tokens=num_output,
                arrival_s=now_s,
            )


def measure(case: str, config: SimulationConfig, work: Path | int, limit: int | None) -> Row:
    """Run one simulation in this process.

    Args:
        work: a trace's file, or a number of generated requests.
        limit: most requests of a trace.
    """
    source: Trace | Iterator[Request]
    source = requests(work, config.replicas) if isinstance(work, int) else prepare_trace(work, limit=limit)
    simulation = build_simulation(config)
    gc.collect()
    started = time.thread_time()
    report = simulation.run(source)
    cpu_s = time.thread_time() - started
    counts = report.requests
    if counts.arrived != counts.finished:
        raise SystemExit(f"{case}: {counts}")
    return {
        "case": case,
        "replicas": config.replicas,
        "requests": counts.arrived,
        "steps": report.num_steps,
        "cpu_s": round(cpu_s, 2),
        "ms_per_request": round(cpu_s / counts.arrived * 1e3, 3),
        "steps_per_s": round(report.num_steps / cpu_s),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def growing(num_replicas: int) -> SimulationConfig:
    return SimulationConfig(model="llama-3.1-8b", replicas=num_replicas, num_blocks=_NUM_BLOCKS, max_model_len=16_384)


def cases(sizes: str, limit: int | None) -> Iterator[tuple[str, SimulationConfig, Path | int, int | None]]:
    """Yield what to run, as `measure` takes it.

    Args:
        sizes: one of `REQUESTS`.
    """
    for name, (file, config) in PUBLIC.items():
        if (TRACES / file).exists():
            yield name, config, TRACES / file, limit
    for num_replicas in (1, 10, 100, 1000):
        yield "growth in replicas", growing(num_replicas), num_replicas * PER_REPLICA[sizes], None
    for num_requests in REQUESTS[sizes]:
        yield "growth in requests", growing(10), num_requests, None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes",
        choices=("quick", "usual", "large"),
        default="usual",
        help="of the growing runs (default: %(default)s)",
    )
    parser.add_argument("--limit", type=int, help="most requests of a public trace")
    parser.add_argument("--only", default="", help="only cases whose name holds this text")
    add_json_option(parser)
    args = parser.parse_args()
    chosen = [case for case in cases(args.sizes, args.limit) if args.only in case[0]]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        rows = [pool.submit(measure, *case).result() for case in chosen]
    publish("the simulator on one core", rows, args.json)


if __name__ == "__main__":
    main()
