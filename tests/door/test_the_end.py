"""Stopping, and answering how one is while there is too much to do (CASES 49, 50)."""

from __future__ import annotations

import asyncio
import signal
import time

from tests.door.front_door import FrontDoor, front_door, run, until
from tests.door.http_client import CHAT, Answer, Connection, ask, chat
from tests.door.mock_backends import MockBackend, all_do


async def probe(door: FrontDoor, path: str) -> int:
    connection = await Connection.open(door.port)
    answer = await asyncio.wait_for(connection.ask("GET", path, b""), 5)
    connection.leave()
    return answer.status


def test_sigterm_under_load(mocks: list[MockBackend]) -> None:
    """Case 49 (vllm #36960): what is in flight finishes; alive, but not ready; nothing new; exit code 0."""
    with front_door(mocks, "--shutdown-timeout", "20") as door:

        async def story() -> None:
            all_do(mocks, num_chunks=40, gap_s=0.05)
            streams = [asyncio.create_task(ask(door.port, chat(stream=True))) for _ in range(12)]
            waiting = [asyncio.create_task(ask(door.port, chat())) for _ in range(4)]
            kept = await Connection.open(door.port)
            await until(lambda: sum(mock.num_in_flight for mock in mocks) >= 12)
            door.live.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.3)
            assert await probe(door, "/health") == 200
            assert await probe(door, "/ready") == 503
            refused = await kept.ask("POST", CHAT, chat())
            assert refused.status == 503
            assert int(refused.headers["retry-after"]) >= 1
            kept.leave()
            answers = [*await asyncio.gather(*streams), *await asyncio.gather(*waiting)]
            assert all(answer.is_good for answer in answers)
            assert all(answer.events[-1] == "[DONE]" for answer in answers[:12])

        run(story())
        assert door.live.process.wait(15) == 0


def test_what_does_not_finish_in_time_ends_with_an_error_event(mocks: list[MockBackend]) -> None:
    """Case 49, at the deadline."""
    with front_door(mocks, "--shutdown-timeout", "1") as door:

        async def story() -> list[Answer]:
            all_do(mocks, num_chunks=2000, gap_s=0.05)
            streams = [asyncio.create_task(ask(door.port, chat(stream=True))) for _ in range(4)]
            await until(lambda: sum(mock.num_in_flight for mock in mocks) == 4)
            await asyncio.sleep(0.3)
            door.live.process.send_signal(signal.SIGTERM)
            answers = await asyncio.gather(*streams)
            await until(lambda: sum(mock.num_in_flight for mock in mocks) == 0, 5, "the backends see it")
            return list(answers)

        for answer in run(story()):
            assert not answer.is_whole
            assert answer.events[-1]["error"]["message"]
        assert door.live.process.wait(10) == 0


def test_a_second_sigterm_is_fast(mocks: list[MockBackend]) -> None:
    """Case 49: whoever asks twice does not want to wait."""
    with front_door(mocks, "--shutdown-timeout", "60") as door:

        async def story() -> None:
            all_do(mocks, num_chunks=2000, gap_s=0.05)
            stream = asyncio.create_task(ask(door.port, chat(stream=True)))
            await until(lambda: sum(mock.num_in_flight for mock in mocks) == 1)
            door.live.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.3)
            door.live.process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(stream, 10)

        run(story())
        assert door.live.process.wait(10) == 0


def test_liveness_answers_in_a_burst_of_1280_requests(door: FrontDoor, mocks: list[MockBackend]) -> None:
    """Case 50 (ray #54070): probes are answered in time while everything comes at once."""

    async def story() -> None:
        all_do(mocks, prefill_s=0.5)
        burst = [asyncio.create_task(ask(door.port, chat(f"{i} " + "b" * 2000))) for i in range(1280)]
        slowest_s = 0.0
        while not all(task.done() for task in burst):
            started_s = time.monotonic()
            assert await probe(door, "/health") == 200
            slowest_s = max(slowest_s, time.monotonic() - started_s)
            await asyncio.sleep(0.02)
        assert slowest_s < 4
        answers = [task.result() for task in burst]
        assert {answer.status for answer in answers} <= {200, 503}
        assert sum(answer.is_good for answer in answers) > 100

    run(story())


def test_hung_backends_make_the_door_not_ready(mocks: list[MockBackend]) -> None:
    """Case 50 (vllm #36960): nobody answers any more; the door is alive, and says that it is not ready."""
    with front_door(mocks, config="[door]\nmin_progress_s = 1.5\nmax_progress_s = 4.0\n") as door:

        async def story() -> None:
            assert await probe(door, "/ready") == 200
            all_do(mocks, hang="before_head")
            for mock in mocks:
                mock.health_answers = False
            asked = [asyncio.create_task(ask(door.port, chat())) for _ in range(16)]
            started_s = time.monotonic()
            while await probe(door, "/ready") != 503:
                assert time.monotonic() - started_s < 15
                await asyncio.sleep(0.1)
            assert await probe(door, "/health") == 200
            answers = await asyncio.gather(*asked)
            assert all(answer.status in (502, 503, 504) for answer in answers), {a.status for a in answers}
            all_do(mocks)
            for mock in mocks:
                mock.health_answers = True
            started_s = time.monotonic()
            while not (await ask(door.port, chat())).is_good:
                assert time.monotonic() - started_s < 10
                await asyncio.sleep(0.1)

        run(story())
