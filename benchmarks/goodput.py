"""Goodput of every ordering under three budgets, over load, on public traces.

One replica of Llama-3.1-70B on 4 x H100 (modelled). Requests carry the targets of three classes in thirds: interactive
(TTFT 0.5 s, TPOT 50 ms), standard (2 s, 100 ms), batch (60 s and 50 ms per output token, end to end). Load 1 is the
rate at which the replica would just finish the trace's requests if they all came at once. Goodput is requests that met
their targets per second of arrivals. Budgets: 2048 tokens, the best fixed one for trace and ordering at load 1, and
the slack budget; and some presets as they are. With `--one-class`, everybody wants TTFT 1 s and TPOT 50 ms.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.report import Row, add_json_option, machine
from expediter.assembly.simulation import SimulationConfig, build_simulation
from expediter.core.request import Request
from expediter.core.slo import Slo
from expediter.scheduling.build import ORDERINGS, PolicyConfig
from expediter.sim.metrics import RequestRecord
from expediter.sim.trace_readers import read_trace
from expediter.studies.workers import Task, Workers

CLASSES = ("interactive", "standard", "batch")
TRACES = {
    "azure conversation": ("azure2023_conv.parquet", 2500),
    "azure code": ("azure2023_code.parquet", 2500),
    "mooncake conversation": ("mooncake_fast25_conversation_trace.jsonl.gz", 600),
}
LOADS = (0.5, 0.7, 0.85, 1.0, 1.25, 1.5, 2.0)
FIXED_BUDGETS = (512, 1024, 2048)
DEFAULT_BUDGET = 2048
MAX_SLACK_BUDGET = 8192
NUM_TENANTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One simulation."""

    trace: str
    file: str
    num_requests: int
    rate_rps: float | None
    ordering: str
    budget: int | None
    preset: str | None = None
    one_class: bool
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came out: requests per second of the arrivals' span, and shares of requests."""

    case: Case
    offered_rps: float
    goodput_rps: float
    attainment: float
    by_class: dict[str, float]
    by_tenant: dict[str, float]
    makespan_s: float


def targets(number: int, num_output: int) -> Slo:
    """Return the targets of a class."""
    return (Slo(ttft_s=0.5, tpot_s=0.05), Slo(ttft_s=2.0, tpot_s=0.1), Slo(e2e_s=60 + 0.05 * num_output))[number]


def requests_of(case: Case) -> Iterator[tuple[int, Request]]:
    """Yield class number and request; all at once if the case has no rate."""
    trace = read_trace(case.file).take(case.num_requests)
    span = float(trace.arrival_s[-1] - trace.arrival_s[0])
    if case.rate_rps is not None:
        trace = trace.at_rate(case.rate_rps * span / len(trace))
    draw = random.Random(case.seed)
    for request in trace.requests():
        number = draw.randrange(3)
        slo = Slo(ttft_s=1.0, tpot_s=0.05) if case.one_class else targets(number, request.max_tokens)
        arrival_s = 0.0 if case.rate_rps is None else request.arrival_s
        tenant = f"tenant {draw.randrange(NUM_TENANTS)}"
        yield number, replace(request, slo=slo, tenant=tenant, priority=number, arrival_s=arrival_s)


def run(case: Case) -> Outcome:
    """Simulate a case."""
    hardware = SimulationConfig(model="llama-3.1-70b", gpu="h100", tensor_parallel=4)
    if case.preset is not None:
        config = replace(hardware, preset=case.preset)
    else:
        policy = PolicyConfig(
            ordering=case.ordering,
            budget="slack" if case.budget is None else "fixed",
            victims="least_value" if case.ordering == "slo" else "lowest_priority",
        )
        config = replace(hardware, policy=policy, max_num_batched_tokens=case.budget or MAX_SLACK_BUDGET)
    simulation = build_simulation(config)
    numbered = list(requests_of(case))
    ended: list[RequestRecord] = []
    simulation.metrics.on_end.append(ended.append)
    report = simulation.run(request for _, request in numbered)
    by_id = {record.request_id: record for record in ended}
    records = [by_id[request.request_id] for _, request in numbered]
    span_s = max(records[-1].arrival_s - records[0].arrival_s, 1e-9)
    met = [record.is_met for record in records]
    classes = [CLASSES[number] for number, _ in numbered]
    tenants = [record.tenant for record in records]
    return Outcome(
        case=case,
        offered_rps=len(met) / span_s,
        goodput_rps=sum(met) / span_s,
        attainment=sum(met) / len(met),
        by_class=_shares(classes, met),
        by_tenant=_shares(tenants, met),
        makespan_s=report.simulated_s,
    )


def run_all(cases: Sequence[Case], workers: Workers, what: str) -> Iterable[Outcome]:
    """Simulate cases, with a bar of how far it is."""
    tasks = [Task(label=f"{case.trace}, {case.preset or case.ordering}", call=partial(run, case)) for case in cases]
    return track(workers.run(tasks), what, total=len(tasks), transient=True)


def _shares(groups: Sequence[str], met: Sequence[bool]) -> dict[str, float]:
    return {
        name: round(sum(m for g, m in zip(groups, met, strict=True) if g == name) / groups.count(name), 4)
        for name in sorted(set(groups))
    }


def capacity_at(attainment: float, outcomes: Sequence[Outcome]) -> float:
    """Return the offered rate up to which at least that share meets its targets, interpolated between loads."""
    rate, previous = 0.0, 1.0
    for outcome in sorted(outcomes, key=lambda outcome: outcome.offered_rps):
        if outcome.attainment < attainment:
            share = (previous - attainment) / max(previous - outcome.attainment, 1e-9)
            return rate + share * (outcome.offered_rps - rate)
        rate, previous = outcome.offered_rps, outcome.attainment
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/traces"), help="folder of the public traces")
    parser.add_argument("--traces", default=",".join(TRACES))
    parser.add_argument("--orderings", default=",".join(ORDERINGS))
    parser.add_argument("--presets", default="vllm,expediter", help="also run these as they are")
    parser.add_argument("--loads", default=",".join(map(str, LOADS)))
    parser.add_argument("--requests", type=float, default=1.0, help="share of each trace's usual number of requests")
    parser.add_argument("--one-class", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    add_json_option(parser)
    args = parser.parse_args()
    loads = [float(load) for load in args.loads.split(",")]
    tables: dict[str, list[Row]] = {}
    with Workers(args.workers) as workers:
        for name in args.traces.split(","):
            file, usual = TRACES[name]
            base = Case(
                trace=name,
                file=str(args.data / file),
                num_requests=int(usual * args.requests),
                rate_rps=None,
                ordering="fcfs",
                budget=DEFAULT_BUDGET,
                one_class=args.one_class,
                seed=args.seed,
            )
            tables[name] = measure(base, args.orderings.split(","), args.presets.split(","), loads, workers)
            show(name, tables[name], loads)
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": machine(), "loads": loads, "traces": tables}, indent=2) + "\n")


def measure(
    base: Case, orderings: Sequence[str], presets: Sequence[str], loads: Sequence[float], workers: Workers
) -> list[Row]:
    """Return a row per ordering and budget, and per preset, for one trace."""
    capacity = base.num_requests / run(base).makespan_s
    trials = [
        replace(base, rate_rps=capacity, ordering=ordering, budget=budget)
        for ordering, budget in itertools.product(orderings, FIXED_BUDGETS)
    ]
    tried = list(run_all(trials, workers, f"{base.trace}: budgets"))
    rows: list[tuple[str, str, Case]] = []
    for ordering in orderings:
        own = [outcome for outcome in tried if outcome.case.ordering == ordering]
        best = max(own, key=lambda outcome: outcome.goodput_rps).case.budget
        kinds = ((str(DEFAULT_BUDGET), DEFAULT_BUDGET), (f"tuned: {best}", best), ("slack", None))
        rows += [(ordering, kind, replace(base, ordering=ordering, budget=budget)) for kind, budget in kinds]
    rows += [(f"preset {preset}", "its own", replace(base, preset=preset)) for preset in presets if preset]
    cases = [replace(case, rate_rps=capacity * load) for (_, _, case), load in itertools.product(rows, loads)]
    outcomes = list(run_all(cases, workers, f"{base.trace}: loads"))
    table: list[Row] = []
    for index, (ordering, kind, _) in enumerate(rows):
        own = outcomes[index * len(loads) : (index + 1) * len(loads)]
        table.append(
            {
                "ordering": ordering,
                "budget": kind,
                "capacity_rps": round(capacity, 3),
                "goodput_rps": [round(o.goodput_rps, 3) for o in own],
                "rate_at_99": round(capacity_at(0.99, own), 3),
                "rate_at_90": round(capacity_at(0.90, own), 3),
                "worst_class": [min(o.by_class.values()) for o in own],
                "worst_tenant": [min(o.by_tenant.values()) for o in own],
                "by_class": [o.by_class for o in own],
                "outcomes": [asdict(o) for o in own],
            }
        )
    return table


def show(name: str, rows: Sequence[Row], loads: Sequence[float]) -> None:
    """Print a trace's table, best at the highest load first."""
    table = Table(title=f"{name}: goodput, requests/s; load 1 = {rows[0]['capacity_rps']} requests/s")
    for column in ("ordering", "budget", *(f"x {load:g}" for load in loads), "99 %", "90 %", "worst class", "tenant"):
        table.add_column(column, justify="left" if column in ("ordering", "budget") else "right")
    for row in sorted(rows, key=lambda row: -row["goodput_rps"][-1]):
        rates = [f"{rate:.2f}" for rate in (*row["goodput_rps"], row["rate_at_99"], row["rate_at_90"])]
        worst = [f"{row[key][-1]:.0%}" for key in ("worst_class", "worst_tenant")]
        table.add_row(row["ordering"], row["budget"], *rates, *worst)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
