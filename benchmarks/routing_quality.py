"""What routing policies do where caches are too small for everything: hit rate and time to first token.

    python -m benchmarks.routing_quality [--policies NAME ...] [--loads NAME ...] [--seeds N]

Every policy serves the same requests on simulated replicas, under several loads:

    pair        2 slow CPU replicas; 16 applications of 512 tokens; either holds 10 of them; from cold (`vllm_pair`)
    two         2 GPUs, 16 applications of 2,048 tokens, a cache holds half of them
    four        4 GPUs, 40 applications; a cache holds a quarter of them
    busy        the same at a rate that leaves no replica idle
    roomy       the same; every cache holds everything
    slow        as "four", and one of the replicas is a GPU of half the speed
    hot         4 GPUs; one prefix has three quarters of the requests, 40 others the rest
    agents      4 GPUs; sessions of 8 turns behind one system prompt

Applications' prompts are chosen with probability in proportion to 1 / rank. Figures are means over the seeds; an
arrival's times and prompts depend on the load and the seed only.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from benchmarks.report import Row, add_json_option, publish
from expediter.assembly.pools import PoolConfig
from expediter.assembly.simulation import SimulationConfig, build_simulation
from expediter.control.routing.build import ROUTINGS, RoutingConfig
from expediter.core.request import Request
from expediter.core.slo import Slo
from expediter.perfmodel.fitted import FittedModel
from expediter.sim.metrics import RequestRecord

_CPU: Final = FittedModel(
    fixed_s=0.02, per_prefill_token_s=1e-3, per_decode_s=2e-3, per_context_token_s=1e-6, per_attention_s=1e-7
)
"""SmolLM2-135M on one core, roughly."""


@dataclass(frozen=True, kw_only=True)
class Applications:
    """Requests of applications that each put a long prompt of their own before every question.

    Attributes:
        rate: requests per second.
        hot_share: of the requests that are the first application's; None for 1 / rank as for the others.
    """

    num_requests: int
    rate: float
    num_applications: int
    num_prefix_tokens: int
    num_own_tokens: int = 128
    num_output_tokens: int = 64
    hot_share: float | None = None

    def requests(self, seed: int) -> list[Request]:
        rng = np.random.default_rng(seed)
        weights = 1 / np.arange(1, self.num_applications + 1)
        if self.hot_share is not None:
            weights[0] = weights[1:].sum() * self.hot_share / (1 - self.hot_share)
        chosen = rng.choice(self.num_applications, self.num_requests, p=weights / weights.sum())
        arrivals = np.cumsum(rng.exponential(1 / self.rate, self.num_requests))
        prefixes = rng.integers(0, 32_000, (self.num_applications, self.num_prefix_tokens), np.int32)
        return [
            _request(number, float(arrival), prefixes[application], self.num_own_tokens, self.num_output_tokens, rng)
            for number, (application, arrival) in enumerate(zip(chosen, arrivals, strict=True))
        ]


@dataclass(frozen=True, kw_only=True)
class Agents:
    """Sessions of several turns behind one system prompt; a turn follows a pause after the one before."""

    num_sessions: int
    rate: float
    num_system_tokens: int = 2048
    num_turn_tokens: int = 768
    num_output_tokens: int = 96
    num_turns: float = 8.0
    pause_s: float = 4.0

    def requests(self, seed: int) -> list[Request]:
        rng = np.random.default_rng(seed)
        system = rng.integers(0, 32_000, self.num_system_tokens, np.int32)
        turns: list[Request] = []
        start_s = 0.0
        for _ in range(self.num_sessions):
            start_s += rng.exponential(1 / self.rate)
            prompt, at_s = system, start_s
            for _ in range(int(rng.geometric(1 / self.num_turns))):
                num_new = 1 + int(rng.exponential(self.num_turn_tokens))
                turns.append(_request(len(turns), at_s, prompt, num_new, self.num_output_tokens, rng))
                prompt = turns[-1].prompt
                at_s += 2.0 + rng.exponential(self.pause_s)
        return sorted(turns, key=lambda request: request.arrival_s)


def _request(
    number: int, at_s: float, head: np.ndarray[Any, Any], num_own: int, num_output: int, rng: np.random.Generator
) -> Request:
    prompt = np.concatenate((head, rng.integers(0, 32_000, num_own, np.int32)))
    return Request(request_id=f"r{number}", prompt=prompt, max_tokens=num_output, arrival_s=at_s)


@dataclass(frozen=True)
class Load:
    """What arrives, and where.

    Attributes:
        requests: by seed, in order of arrival.
        cluster: fields of `SimulationConfig`.
        warm_up: share of the requests that come first, and are not counted.
    """

    requests: Callable[[int], Sequence[Request]]
    cluster: dict[str, Any]
    warm_up: float = 0.2

    def serve(self, routing: RoutingConfig | type, seed: int) -> Row:
        """Serve it once; return its figures."""
        simulation = build_simulation(
            SimulationConfig(routing=routing, slo=Slo(ttft_s=2.0, tpot_s=0.1), **self.cluster)
        )
        requests = self.requests(seed)
        counted_s = requests[int(len(requests) * self.warm_up)].arrival_s
        records: list[RequestRecord] = []
        simulation.metrics.on_end.append(records.append)
        simulation.run(requests)
        counted = [record for record in records if record.arrival_s >= counted_s]
        ttfts_ms = [1e3 * record.ttft_s for record in counted if record.ttft_s is not None]
        sent = np.bincount([record.replica_id for record in counted if record.replica_id is not None])
        num_cached = sum(record.num_cached_tokens for record in counted)
        return {
            "hit rate": num_cached / sum(record.num_prompt_tokens for record in counted),
            "TTFT mean ms": float(np.mean(ttfts_ms)),
            "TTFT p50 ms": float(np.percentile(ttfts_ms, 50)),
            "TTFT p99 ms": float(np.percentile(ttfts_ms, 99)),
            "requests max/mean": float(sent.max() * len(sent) / sent.sum()),
        }


def _gpus(num_replicas: int, num_cache_tokens: int, **more: Any) -> dict[str, Any]:
    return {"replicas": num_replicas, "gpu": "h100", "num_blocks": num_cache_tokens // 16, **more}


_FOUR = partial(Applications, num_requests=1500, num_applications=40, num_prefix_tokens=2048)
_CACHE: Final = 26_000
LOADS: Final = {
    "pair": Load(
        Applications(
            num_requests=96,
            rate=3.0,
            num_applications=16,
            num_prefix_tokens=512,
            num_own_tokens=24,
            num_output_tokens=16,
        ).requests,
        {"replicas": 2, "step_time": _CPU, "num_blocks": 320},
        warm_up=0.0,
    ),
    "two": Load(
        Applications(num_requests=1500, rate=50.0, num_applications=16, num_prefix_tokens=2048).requests,
        _gpus(2, 20_000),
    ),
    "four": Load(_FOUR(rate=100.0).requests, _gpus(4, _CACHE)),
    "busy": Load(_FOUR(rate=150.0).requests, _gpus(4, _CACHE + 8000)),
    "roomy": Load(_FOUR(rate=150.0).requests, _gpus(4, 200_000)),
    "slow": Load(
        _FOUR(rate=70.0).requests,
        _gpus(4, _CACHE, pools=(PoolConfig(replicas=3), PoolConfig(replicas=1, gpu="a100-80g"))),
    ),
    "hot": Load(_FOUR(rate=120.0, hot_share=0.75).requests, _gpus(4, _CACHE)),
    "agents": Load(Agents(num_sessions=150, rate=2.0).requests, _gpus(4, 300_000, gpu="a100-80g")),
}


def measure(load: Load, label: str, name: str, routing: RoutingConfig | type, num_seeds: int) -> Row:
    """Return a policy's figures under a load: means over the seeds."""
    rows = [load.serve(routing, seed) for seed in range(num_seeds)]
    means = {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}
    shown = {key: f"{value:.1f}" for key, value in means.items()}
    shown |= {"hit rate": f"{means['hit rate']:.1%}", "requests max/mean": f"{means['requests max/mean']:.2f}"}
    return {"load": label, "policy": name, **shown}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    policies = ["round_robin", "cache_aware", "predicted_ttft", "preble"]
    parser.add_argument("--policies", nargs="+", choices=ROUTINGS, default=policies, metavar="NAME")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="of each load (default: 5)")
    add_json_option(parser)
    args = parser.parse_args()
    rows = [
        measure(LOADS[load], load, name, RoutingConfig(name=name), args.seeds)
        for load in args.loads
        for name in args.policies
    ]
    publish(f"Means over {args.seeds} seeds", rows, args.json)


if __name__ == "__main__":
    main()
