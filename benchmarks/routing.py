"""Routing: what a decision costs, and with --trace what it does.

A decision is a `route`, its `dispatched` and the refresh of what has changed: between two decisions, four replicas
change their load. Prompts have 4,096 tokens, 2,048 of them one of 200 shared beginnings; 5,000 decisions have been made
before. Microseconds of the thread's CPU time, medians. A second table (PATH-index.json) has the prefix index alone:
numbering a prompt of 32 blocks, matching it, and noting it again, when 2,000 prompts that share 16 blocks are there.

With --trace, every policy serves a trace on --replicas replicas: prefix hit rate, TTFT, and how uneven the requests and
the prompt tokens to compute are spread (the busiest replica's as a multiple of the mean).
"""

from __future__ import annotations

import argparse
import gc
from functools import partial

import numpy as np

from benchmarks.report import Row, add_json_option, cpu_us, publish, spread
from expediter.assembly.simulation import SimulationConfig, build_simulation, prepare_trace
from expediter.control.fleet import Fleet, KvLink, ReplicaProfile, ReplicaSnapshot
from expediter.control.prefix_index import PrefixIndex
from expediter.control.routing.base import Placement, RouteQuery
from expediter.control.routing.build import ROUTINGS, RoutingConfig, make_router
from expediter.control.speed import Speed
from expediter.core.request import Request
from expediter.core.slo import Slo
from expediter.sim.metrics import RequestRecord

_SIZES = (4, 64, 1000)
_NUM_TOKENS = 4096
_SPEED = Speed(step_s=0.01, token_s=1e-4, attention_s=1e-9, decode_s=1e-5, context_s=1e-8, is_known=True)


class _Replica:
    def __init__(self, replica_id: int) -> None:
        self.replica_id = replica_id
        self.num_requests = self.num_pending_tokens = 0

    def snapshot(self) -> ReplicaSnapshot:
        return ReplicaSnapshot(
            replica_id=self.replica_id,
            num_requests=self.num_requests,
            num_pending_tokens=self.num_pending_tokens,
            num_context_tokens=self.num_requests * _NUM_TOKENS,
            num_running=self.num_requests,
        )


class Bench:
    """A policy before a fleet whose replicas work off what they are sent."""

    def __init__(self, routing: str, num_replicas: int) -> None:
        self.rng = np.random.default_rng(0)
        self.router = make_router(RoutingConfig(name=routing))
        self.replicas = [_Replica(number) for number in range(num_replicas)]
        self.fleet = Fleet(KvLink(latency_s=1e-4, token_s=1e-6))
        profile = ReplicaProfile(speed=_SPEED, max_kv_tokens=400_000)
        for replica in self.replicas:
            self.fleet.join(replica.replica_id, replica.snapshot, profile)
        self.shared = self.rng.integers(0, 1000, (200, _NUM_TOKENS // 2), np.int32)
        self.number = 0

    def decide(self) -> float:
        """Make one decision; return its cost in microseconds."""
        self.number += 1
        own = self.rng.integers(0, 1000, _NUM_TOKENS // 2, np.int32)
        request = Request(
            request_id=f"r{self.number}",
            prompt=np.concatenate((self.shared[self.number % 200], own)),
            max_tokens=8,
            session=f"s{self.number % 500}",
            slo=Slo(ttft_s=1e6, tpot_s=1e6),
        )
        for place in self.rng.integers(0, len(self.replicas), 4).tolist():
            replica = self.replicas[place]
            replica.num_requests = max(0, replica.num_requests - 1)
            replica.num_pending_tokens = 0
            self.fleet.mark(place)

        def route() -> None:
            decision = self.router.route(RouteQuery(request, self.number * 0.01), self.fleet)
            assert isinstance(decision, Placement)
            chosen = self.replicas[decision.replica_id]
            chosen.num_requests += 1
            chosen.num_pending_tokens += _NUM_TOKENS
            self.fleet.dispatched(decision.replica_id)

        return cpu_us(route)


def measure_costs(names: list[str], rounds: int, warm_up: int) -> list[Row]:
    rows: list[Row] = []
    for name in names:
        row: Row = {"policy": name}
        for size in _SIZES:
            bench = Bench(name, size)
            for _ in range(warm_up):
                bench.decide()
            gc.collect()
            row[f"{size} replicas"] = spread([bench.decide() for _ in range(rounds)])["median_us"]
        rows.append(row)
    return rows


def measure_index(rounds: int) -> list[Row]:
    rows: list[Row] = []
    for size in _SIZES:
        rng = np.random.default_rng(0)
        index = PrefixIndex()
        half = 16 * index.block_tokens
        shared = rng.integers(0, 1000, half, np.int32)
        prompts = [np.concatenate((shared, rng.integers(0, 1000, half, np.int32))) for _ in range(2000)]
        for number, prompt in enumerate(prompts):
            index.record(number % size, index.keys(prompt))
        num_bytes = index.num_bytes / index.num_nodes
        chosen = [prompts[place] for place in rng.integers(0, 2000, rounds).tolist()]
        keys = [index.keys(prompt) for prompt in chosen]
        rows.append(
            {
                "replicas": size,
                "number": spread([cpu_us(partial(index.keys, each)) for each in chosen])["median_us"],
                "match": spread([cpu_us(partial(index.match, each)) for each in keys])["median_us"],
                "note again": spread([cpu_us(partial(index.record, 0, each)) for each in keys])["median_us"],
                "bytes per node": round(num_bytes),
            }
        )
    return rows


def measure_effect(name: str, args: argparse.Namespace) -> Row:
    config = SimulationConfig(
        preset=args.preset,
        model=args.model,
        gpu=args.gpu,
        tensor_parallel=args.tp,
        replicas=args.replicas,
        routing=RoutingConfig(name=name, prefix_knowledge="exact" if args.exact else "dispatched"),
        slo=Slo(ttft_s=2.0, tpot_s=0.1),
    )
    simulation = build_simulation(config)
    records: list[RequestRecord] = []
    simulation.metrics.on_end.append(records.append)
    report = simulation.run(prepare_trace(args.trace, rate_scale=args.rate_scale, limit=args.limit))
    requests, computed = np.zeros(args.replicas), np.zeros(args.replicas)
    for record in records:
        if record.replica_id is not None:
            requests[record.replica_id] += 1
            computed[record.replica_id] += record.num_prompt_tokens - record.num_cached_tokens
    return {
        "policy": name,
        "hit rate": f"{report.prefix_hit_rate or 0.0:.1%}",
        "TTFT p50 s": f"{report.ttft_s.p50 or 0.0:.3f}",
        "TTFT p99 s": f"{report.ttft_s.p99 or 0.0:.2f}",
        "TPOT p99 s": f"{report.tpot_s.p99 or 0.0:.4f}",
        "requests max/mean": f"{requests.max() / requests.mean():.2f}",
        "computed max/mean": f"{computed.max() / computed.mean():.2f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=list(ROUTINGS), metavar="NAME", help="default: all")
    parser.add_argument("--rounds", type=int, default=1000, metavar="N", help="decisions measured (default: 1000)")
    parser.add_argument("--warm-up", type=int, default=5000, metavar="N", help="decisions before them (default: 5000)")
    parser.add_argument("--trace", metavar="NAME|FILE", help="serve it, instead of measuring decisions")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--rate-scale", type=float, default=1.0)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--preset", default="sarathi")
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--exact", action="store_true", help="routers ask the caches instead of their own index")
    add_json_option(parser)
    args = parser.parse_args()
    if args.trace is None:
        title = "µs per decision by number of replicas"
        publish(title, measure_costs(args.policies, args.rounds, args.warm_up), args.json)
        path = args.json and args.json.with_name(f"{args.json.stem}-index.json")
        publish("prefix index, µs for a prompt of 32 blocks", measure_index(args.rounds), path)
        return
    rows = [measure_effect(name, args) for name in args.policies]
    title = f"{args.trace} x {args.rate_scale:g} on {args.replicas} x {args.tp} {args.gpu}, {args.model}, {args.preset}"
    publish(title, rows, args.json)


if __name__ == "__main__":
    main()
