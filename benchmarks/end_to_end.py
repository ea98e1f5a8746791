"""Latencies that the simulator predicts for a real engine, calibrated on a separate run, beside the measured ones.

SmolLM2 on one replica, over HTTP. A calibration workload gives the step-time model; then three others run, of which the
simulator is told prompts, lengths and arrivals and nothing else: requests that share nothing, bursts, and prompts that
begin with shared texts. Every run has a fresh server. They run one after the other, so a machine that grows slower or
faster in between shows as an error, in the column "steps" as well; `--repetitions` repeats everything, calibration
included.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.report import Row, add_json_option, publish
from expediter.assembly.replay import Replay, ReplayConfig, ReplayReport
from expediter.assembly.server_process import running_server
from expediter.assembly.trace_generation import GenerationConfig, generate
from expediter.assembly.traces import load_trace
from expediter.core.slo import Slo
from expediter.perfmodel.fitted import FittedModel
from expediter.runtime.load_client import LoadClient
from expediter.sim.trace import Trace
from expediter.sim.trace_generators import PrefixTree
from expediter.sim.trace_writer import write_rows

SLO = Slo(ttft_s=2.0, tpot_s=0.2)
CALIBRATION = GenerationConfig(cv=2.0, input_mean=160, input_cv=1.2, output_mean=40, output_cv=0.8, seed=11)
WORKLOADS = {
    "independent": GenerationConfig(input_mean=128, output_mean=32, seed=1),
    "bursts": GenerationConfig(on_s=4.0, off_s=8.0, input_mean=96, output_mean=24, seed=2),
    "shared texts": GenerationConfig(
        shape=PrefixTree(depth=3, branches=3, node_tokens=64), input_mean=48, output_mean=32, seed=3
    ),
}
LATENCIES = ("ttft_s", "tpot_s", "e2e_s")
PERCENTILES = ("p50", "p90")
LATENCY_TARGET, THROUGHPUT_TARGET = 0.10, 0.05


def trace_of(config: GenerationConfig, num_requests: int, folder: Path) -> Trace:
    path = folder / f"{config.seed}.jsonl"
    write_rows(path, generate(replace(config, num_requests=num_requests)))
    return load_trace(str(path))


def replay(trace: Trace, load: float, step_time: FittedModel | None) -> ReplayReport:
    config = ReplayConfig(trace=trace, slos=(SLO,), load=load, step_time=step_time)
    with running_server([]) as url:
        return asyncio.run(Replay(config, LoadClient(url)).run())


def errors(name: str, report: ReplayReport) -> Row:
    """Return predicted / measured - 1 for each latency, for the time of all steps and for throughput."""
    live, simulated = report.live, report.simulated
    assert simulated is not None
    assert simulated.output_tokens_per_s is not None
    row: Row = {"workload": name, "requests": live.num_requests, "failed": live.num_failed}
    for latency in LATENCIES:
        for percentile in PERCENTILES:
            measured = getattr(getattr(live, latency), percentile)
            predicted = getattr(getattr(simulated, latency), percentile)
            row[f"{latency[:-2].upper()} {percentile}"] = predicted / measured - 1
    row["steps"] = report.step_bias
    row["throughput"] = simulated.output_tokens_per_s / live.output_tokens_per_s - 1
    return row


def run_once(num_requests: int, load: float) -> list[Row]:
    """Calibrate, then run the workloads, each on a fresh server with an empty cache."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = replay(trace_of(CALIBRATION, num_requests, folder), load, None).model
        for workload, config in WORKLOADS.items():
            rows.append(errors(workload, replay(trace_of(config, num_requests, folder), load, model)))
            print({k: f"{v:+.1%}" if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
    return rows


def summary(runs: list[list[Row]]) -> list[Row]:
    """Return the median error of every figure over the repetitions, and the largest in brackets."""
    rows: list[Row] = []
    for same in zip(*runs, strict=True):
        row = dict(same[0]) | {"failed": sum(r["failed"] for r in same)}
        for key in [key for key, value in row.items() if isinstance(value, float)]:
            values = [r[key] for r in same]
            row[key] = f"{statistics.median(values):+.1%} ({max(values, key=abs):+.1%})"
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--requests", type=int, default=60, help="of each workload (default: %(default)s)")
    parser.add_argument(
        "--load", type=float, default=0.6, help="share of what the machine takes (default: %(default)s)"
    )
    add_json_option(parser)
    args = parser.parse_args()
    runs = [run_once(args.requests, args.load) for _ in range(args.repetitions)]
    title = (
        f"predicted / measured - 1, median (largest) of {args.repetitions} runs; targets: latencies "
        f"{LATENCY_TARGET:.0%}, throughput {THROUGHPUT_TARGET:.0%}"
    )
    publish(title, summary(runs), args.json)


if __name__ == "__main__":
    main()
