"""Two clients, one twice as greedy as the other, on a replica that cannot serve both: who gets how much.

VTC's experiment (arXiv 2401.00588): 90 and 180 requests per minute of 256 prompt and 256 output tokens, Llama-2-7B on
an A10 (modelled), room for 10,000 KV tokens. Service is weighted tokens: 1 per prompt token, 2 per output token. Under
first come, first served the gap between the clients grows as long as both wait; a fair order keeps it within its bound.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import merge

import numpy as np

from benchmarks.report import Row, add_json_option, publish
from expediter.core.events import Admitted, Event, Tokens
from expediter.core.request import Request
from expediter.perfmodel.hardware import gpu_named
from expediter.perfmodel.roofline import RooflineModel
from expediter.perfmodel.shapes import shape_named
from expediter.scheduling.build import CacheConfig, PolicyConfig, build_scheduler
from expediter.scheduling.config import SchedulerConfig
from expediter.scheduling.ordering.fair import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST
from expediter.sim.executor import SimulatedExecutor

_BLOCK_SIZE = 16
_MARKS_S = (100, 200, 300, 400, 500)
QUANTUM = 20_000.0
"""Of `deficit_prefix`, as built by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What the clients ask for, and the replica's room; the defaults are the paper's.

    Attributes:
        rates_rpm: requests per minute of each client, evenly spaced.
        weights: of the clients under the fair orders.
    """

    rates_rpm: Mapping[str, float]
    num_prompt_tokens: int = 256
    num_output_tokens: int = 256
    num_kv_tokens: int = 10_000
    duration_s: float = 500.0
    weights: Mapping[str, float] | None = None

    @property
    def fair_bound(self) -> float:
        """Most by which the service of two clients that both wait may differ under `fair_share`."""
        return 2 * max(PROMPT_TOKEN_COST * self.num_prompt_tokens, OUTPUT_TOKEN_COST * self.num_kv_tokens)

    @property
    def deficit_bound(self) -> float:
        """The same under `deficit_prefix`."""
        return QUANTUM + self.fair_bound

    def requests(self) -> Iterator[Request]:
        """Yield the requests in order of arrival; prompts share nothing."""
        streams = (self._stream(index, client) for index, client in enumerate(self.rates_rpm))
        yield from merge(*streams, key=lambda request: request.arrival_s)

    def _stream(self, index: int, client: str) -> Iterator[Request]:
        gap_s = 60 / self.rates_rpm[client]
        for number in range(int(self.duration_s / gap_s)):
            prompt = np.full(self.num_prompt_tokens, index, np.int32)
            prompt[0] = number
            yield Request(
                request_id=f"{client}-{number}",
                prompt=prompt,
                max_tokens=self.num_output_tokens,
                tenant=client,
                arrival_s=number * gap_s,
            )


PAPER = Workload(rates_rpm={"modest": 90, "greedy": 180})


def gaps(workload: Workload, ordering: str) -> list[tuple[float, float]]:
    """Serve the workload; return time and difference of service between its two clients after each step.

    Service is what the clients see: prompts when they start, tokens when they come, divided by the client's weight.
    """
    config = SchedulerConfig(max_num_seqs=256, max_model_len=4096, tenant_weights=dict(workload.weights or {}))
    num_blocks = workload.num_kv_tokens // _BLOCK_SIZE
    scheduler = build_scheduler(
        config=config,
        cache=CacheConfig(num_blocks=num_blocks, block_size=_BLOCK_SIZE),
        policy=PolicyConfig(ordering=ordering, memory="predicted_peak"),
    )
    executor = SimulatedExecutor(
        num_blocks=num_blocks,
        block_size=_BLOCK_SIZE,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        step_time=RooflineModel(shape_named("llama-2-7b"), gpu_named("a10"), 1),
    )
    arrivals = list(workload.requests())
    tenants = {request.request_id: request.tenant for request in arrivals}
    service = dict.fromkeys(workload.rates_rpm, 0.0)
    weights = {client: (workload.weights or {}).get(client, 1.0) for client in service}
    history: list[tuple[float, float]] = []
    now_s, next_arrival = 0.0, 0
    while now_s < workload.duration_s:
        while next_arrival < len(arrivals) and arrivals[next_arrival].arrival_s <= now_s:
            scheduler.add(arrivals[next_arrival], arrivals[next_arrival].arrival_s)
            next_arrival += 1
        plan = scheduler.plan(now_s)
        if plan.is_empty:
            if next_arrival == len(arrivals):
                break
            now_s = arrivals[next_arrival].arrival_s
            continue
        result = executor.execute(plan)
        now_s += result.elapsed_s
        for client, tokens in _served([*plan.events, *scheduler.apply(result, now_s)], tenants):
            service[client] += tokens / weights[client]
        first, second = service.values()
        history.append((now_s, abs(first - second)))
    return history


def _served(events: list[Event], tenants: Mapping[str, str]) -> Iterator[tuple[str, float]]:
    """Yield client and weighted tokens of what the events deliver; what is computed again was paid for before."""
    for event in events:
        if isinstance(event, Admitted) and not event.resumed:
            new = event.num_known_tokens - event.num_cached_tokens
            yield tenants[event.request_id], PROMPT_TOKEN_COST * new
        elif isinstance(event, Tokens):
            for state in event.states:
                yield tenants[state.request_id], OUTPUT_TOKEN_COST * len(event.tokens)


def measure(ordering: str) -> Row:
    history = gaps(PAPER, ordering)
    times = [time_s for time_s, _ in history]
    at = {
        f"gap at {mark} s": round(history[int(np.searchsorted(times, mark, side="right")) - 1][1]) for mark in _MARKS_S
    }
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
