"""One of two vLLM servers dies under load, and comes back. Last of these tests: it takes a server away."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from benchmarks.peers.vllm_server import VllmServer
from tests.engines.engine_door import text, wait_until
from vllm_door import MODEL, VllmDoor

from expediter.runtime.load_client import LoadClient, TimedPrompt

NUM_REQUESTS = 30
KILLED_AT = 12


def test_one_dies_under_load_and_comes_back(door: VllmDoor, pair: Sequence[VllmServer]) -> None:
    prompts = [
        TimedPrompt(arrival_s=0.25 * place, prompt=text(place, 48), max_tokens=24) for place in range(NUM_REQUESTS)
    ]
    killer = threading.Timer(0.25 * KILLED_AT, pair[0].kill)
    killer.start()
    outcomes = asyncio.run(LoadClient(door.url).replay(MODEL, prompts, lambda _: None))
    killer.join()
    cut = [outcome for outcome in outcomes if outcome.error is not None]
    assert all(outcome.token_times_s for outcome in cut), "a request without a first byte was not sent elsewhere"
    assert len(cut) < NUM_REQUESTS / 3
    for seed in range(6):
        door.complete(text(1000 + seed, 40))
    states = [backend["state"] for backend in door.backends()]
    assert states[0] != "up"
    assert states[1] == "up"

    pair[0].start()
    pair[0].wait_until_ready()
    assert wait_until(lambda: door.backends()[0]["state"] == "up", "it is back in use") < 5
    prompts = [TimedPrompt(arrival_s=0.0, prompt=text(2000 + place, 48), max_tokens=8) for place in range(12)]
    outcomes = asyncio.run(LoadClient(door.url).replay(MODEL, prompts, lambda _: None))
    assert [outcome.error for outcome in outcomes] == [None] * 12
    assert pair[0].metric("vllm:request_success_total") >= 2  # twelve at once are more than the other's share
