"""What it costs the door to choose a backend, count a request there and take it off again.

    python -m benchmarks.dispatch [--backends N] [--kilobytes N] [--routing NAME]

Prints microseconds of CPU per request: prompts share a beginning with one in eight of the others, 32 are in flight.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import deque
from dataclasses import replace

import numpy as np

from expediter.core.request import Request
from expediter.gateway.backends.backend import Dispatch, Usage
from expediter.gateway.backends.config import BackendConfig
from expediter.gateway.backends.dispatcher import Chosen
from expediter.gateway.backends.registry import DEFAULT_ROUTING, Backends
from expediter.runtime.clock import MonotonicClock
from expediter.telemetry.exchanges import Outcome

_IN_FLIGHT = 32
_ROUND = 2000


def requests(num_requests: int, num_bytes: int, seed: int) -> list[Request]:
    """Return requests whose prompts are bytes as the door sees them, four to a token."""
    rng = np.random.default_rng(seed)
    heads = rng.integers(0, 1 << 30, (8, num_bytes // 8), np.int32)
    tails = rng.integers(0, 1 << 30, (num_requests, num_bytes // 8), np.int32)
    return [
        Request(request_id=str(number), prompt=np.concatenate((heads[number % 8], tail)), max_tokens=64)
        for number, tail in enumerate(tails)
    ]


def one_round(backends: Backends, given: list[Request]) -> float:
    """Return microseconds of CPU per request."""
    live: deque[Dispatch] = deque()
    began_s = time.process_time()
    for request in given:
        now_s = time.monotonic()
        chosen = backends.dispatcher.choose(request, "m", now_s)
        assert isinstance(chosen, Chosen)
        dispatch = backends.dispatcher.dispatched(chosen, request, now_s, is_stream=True)
        live.append(dispatch)
        if len(live) == _IN_FLIGHT:
            oldest = live.popleft()
            oldest.first_byte(now_s)
            oldest.ended(Outcome.OK, now_s, Usage(512, 64, 0))
    taken_s = time.process_time() - began_s
    for dispatch in live:
        dispatch.ended(Outcome.OK, time.monotonic())
    return taken_s / len(given) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backends", type=int, default=4, metavar="N")
    parser.add_argument("--kilobytes", type=int, default=2, metavar="N", help="of a prompt")
    parser.add_argument("--routing", default=DEFAULT_ROUTING.name, metavar="NAME")
    parser.add_argument("--rounds", type=int, default=7, metavar="N")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    flags = parser.parse_args()
    backends = Backends(clock=MonotonicClock(), routing=replace(DEFAULT_ROUTING, name=flags.routing))
    for number in range(flags.backends):
        backends.add(BackendConfig(url=f"http://b{number}", models=("m",)))
    taken = [one_round(backends, requests(_ROUND, flags.kilobytes << 10, seed)) for seed in range(flags.rounds + 1)][1:]
    print(
        f"{flags.routing}, {flags.backends} backends, prompts of {flags.kilobytes} KB: "
        f"{statistics.median(taken):.1f} us per request (least {min(taken):.1f})"
    )
    if flags.json:
        with open(flags.json, "w", encoding="utf-8") as file:
            json.dump({"us_per_request": taken, **vars(flags)}, file)


if __name__ == "__main__":
    main()
