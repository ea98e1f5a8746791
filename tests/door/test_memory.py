"""What the door remembers of prompts has a bound, and so has everything else that requests leave behind."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random

import numpy as np
from tests.door.front_door import FrontDoor, front_door, run, until
from tests.door.http_client import CHAT, Connection, ask, ask_all, chat
from tests.door.mock_backends import Behaviour, MockBackend

from expediter.core.clock import VirtualClock
from expediter.core.request import Request
from expediter.gateway.backends.backend import Usage
from expediter.gateway.backends.config import BackendConfig
from expediter.gateway.backends.dispatcher import Chosen
from expediter.gateway.backends.registry import DEFAULT_ROUTING, Backends
from expediter.telemetry.exchanges import Outcome

MIB = 1 << 20
TEXT = Random(1).randbytes(64 * 1024).hex()


def long_prompt(number: int, num_bytes: int = 32 * 1024) -> str:
    """Return a text that shares no beginning with that of any other number."""
    start = number * 37 % (len(TEXT) - num_bytes)
    return f"{number:08d} {TEXT[start : start + num_bytes - 9]}"


def test_memory_is_flat_after_the_cap_over_http(mocks: list[MockBackend]) -> None:
    """Distinct prompts of 32 KB, through a door whose index may take 16 MiB: as many again change nothing."""
    with front_door(mocks, config="[routing]\nindex_max_bytes = 16777216\n") as door:

        async def story() -> None:
            numbers = count()

            async def send(num_requests: int) -> int:
                for _ in range(num_requests // 100):
                    answers = await ask_all(door.port, [chat(long_prompt(next(numbers))) for _ in range(100)], 8)
                    assert all(answer.is_good for answer in answers)
                    for mock in mocks:  # the bodies that the backends keep are no memory of the door's, but of this one
                        mock.arrivals.clear()
                return door.rss_bytes()

            await send(1500)
            first = await send(500)
            second = await send(1500)
            assert second - first < 12 * MIB, (first / MIB, second / MIB)

        run(story(), 240)


def test_soak(door: FrontDoor, mocks: list[MockBackend]) -> None:
    """Mixed work that is finished, failed, and left at any point: memory, sockets and counts return to their base."""

    async def story() -> None:
        random = Random(7)

        async def one() -> None:
            fields = {"stream": random.random() < 0.6, "max_tokens": random.randint(1, 50)}
            body = chat("s" * random.randint(1, 20_000), **fields)
            how = random.random()
            if how < 0.5:
                await ask(door.port, body)
                return
            connection = await Connection.open(door.port)
            connection.send("POST", CHAT, body if how < 0.9 else body[: len(body) // 2])
            await asyncio.sleep(random.choice([0, 0.002, 0.02, 0.05]))
            connection.leave()

        async def rounds(number: int) -> None:
            for index in range(number):
                for mock in mocks:
                    mock.behaviour = Behaviour(prefill_s=0.005, num_chunks=8, gap_s=0.004)
                    mock.arrivals.clear()
                mocks[index % 4].behaviour = random.choice(
                    [Behaviour(reset="mid_stream"), Behaviour(status=500), Behaviour(reset="before_head"), Behaviour()]
                )
                await asyncio.gather(*(one() for _ in range(40)))

        async def rest() -> tuple[int, int]:
            await until(lambda: sum(mock.num_in_flight for mock in mocks) == 0, 10, "backends idle")
            await until(lambda: door.in_flight() == 0, 10, "nothing in flight")
            return door.rss_bytes(), door.num_fds()

        await rounds(110)  # as many requests as the door remembers for who asks about them
        rss, fds = await rest()
        await rounds(60)
        assert (await rest())[0] - rss < 12 * MIB
        await until(lambda: door.num_fds() <= fds + 40, 10, "sockets closed")
        for gauge in ("requests_in_flight", "queue_requests", "queue_tokens"):
            assert f"expediter:gateway_{gauge} 0.0" in door.get("/metrics").body.decode()
        assert all(row["num_pending_tokens"] == 0 for row in door.backends().values())

    run(story(), 240)


def test_20_000_distinct_prompts_in_the_registry() -> None:
    """The full number of prompts of 32 KB, sent and answered within one process: its memory is flat after the cap."""
    clock = VirtualClock()
    backends = Backends(clock=clock, routing=replace(DEFAULT_ROUTING, index_max_bytes=16 * MIB))
    for number in range(4):
        backends.add(BackendConfig(url=f"http://127.0.0.1:{9000 + number}", models=("mock",)))
    rng = np.random.default_rng(3)
    sizes = []
    for number in range(20_000):
        clock.advance_to(number * 0.01)
        prompt = rng.integers(0, 1 << 31, 8192, np.int32)
        request = Request(request_id=f"r{number}", prompt=prompt, max_tokens=16, arrival_s=clock.now())
        chosen = backends.dispatcher.choose(request, "mock", clock.now())
        assert isinstance(chosen, Chosen)
        dispatch = backends.dispatcher.dispatched(chosen, request, clock.now(), is_stream=True)
        dispatch.first_byte(clock.now())
        dispatch.ended(Outcome.OK, clock.now(), Usage(8192, 16))
        if number % 4000 == 3999:
            gc.collect()
            sizes.append(rss_bytes())
    assert sizes[-1] - sizes[0] < 8 * MIB, sizes
    assert all(backend.num_in_flight == 0 for backend in backends)


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
