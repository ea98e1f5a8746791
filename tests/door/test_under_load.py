"""Spread, pace and change while requests come (CASE 36)."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from statistics import median

import pytest
from tests.door.front_door import FrontDoor, front_door, run, until
from tests.door.http_client import Answer, ask, ask_all, chat
from tests.door.mock_backends import MockBackend, all_do, best_hit_share, hit_share, mock_backends


def prefix(number: int, num_bytes: int = 4096) -> str:
    words = " ".join(f"w{number}x{i}" for i in range(num_bytes))
    return words[:num_bytes]


def test_one_shared_prefix_does_not_flood_one_backend(door: FrontDoor, mocks: list[MockBackend]) -> None:
    async def story() -> None:
        all_do(mocks, prefill_s=0.02)
        answers = await ask_all(door.port, [chat(prefix(0) + f" question {i}?") for i in range(96)], 16)
        assert all(answer.is_good for answer in answers)
        counts = [len(mock.work) for mock in mocks]
        assert sum(counts) == 96
        assert max(counts) <= 48, counts
        assert hit_share(mocks) >= 0.9 * best_hit_share(mocks), (hit_share(mocks), best_hit_share(mocks))

    run(story())


def test_many_shared_prefixes_stay_where_they_are_cached(door: FrontDoor, mocks: list[MockBackend]) -> None:
    """24 groups of 8: whoever sends them in turn misses half; still nobody gets more than half."""

    async def story() -> None:
        all_do(mocks, prefill_s=0.02)
        bodies = [chat(prefix(group) + f" question {i}?") for i in range(8) for group in range(24)]
        answers = await ask_all(door.port, bodies, 8)
        assert all(answer.is_good for answer in answers)
        assert max(len(mock.work) for mock in mocks) <= len(bodies) / 2
        assert hit_share(mocks) >= 0.9 * best_hit_share(mocks), (hit_share(mocks), best_hit_share(mocks))

    run(story())


def test_load_counts_at_dispatch(door: FrontDoor, mocks: list[MockBackend]) -> None:
    """Case 36 (sglang PR#27547, #14305): a burst of long prompts with short answers, none of which has answered yet.

    All are under way before any backend could say anything; whoever holds more of the common beginning gets no more
    than its share of the burst.
    """

    async def story() -> None:
        first = await ask(door.port, chat(prefix(1, 32_000)))
        assert first.is_good
        before = [len(mock.work) for mock in mocks]
        all_do(mocks, prefill_s=1.0)
        bodies = [chat(prefix(1, 8000) + prefix(i, 24_000), max_tokens=1) for i in range(40)]
        burst = asyncio.create_task(ask_all(door.port, bodies, 40))
        await until(lambda: sum(len(mock.work) for mock in mocks) == 41, 10, "all dispatched")
        got = [len(mock.work) - count for mock, count in zip(mocks, before, strict=True)]
        assert max(got) <= 16, got
        assert min(got) >= 4, got
        assert all(answer.is_good for answer in await burst)

    run(story())


def test_chunks_reach_the_client_at_the_pace_of_the_backend(door: FrontDoor, mocks: list[MockBackend]) -> None:
    """25 ms apart there, 25 ms apart here: nothing is held back or put together."""

    async def story() -> None:
        all_do(mocks, num_chunks=40, gap_s=0.025)
        answers = [await ask(door.port, chat(stream=True)) for _ in range(3)]
        for answer in answers:
            assert len(answer.events) == 42
            assert len(answer.chunks) >= 40, "each event came as a chunk of its own"
        gaps = [later - earlier for answer in answers for (earlier, _), (later, _) in pairwise(answer.chunks[:40])]
        assert 0.022 < median(gaps) < 0.035
        assert sum(gap < 0.01 for gap in gaps) < len(gaps) / 10, "held back, then sent together"

    run(story())


def test_the_first_chunk_does_not_wait_for_the_second(door: FrontDoor, mocks: list[MockBackend]) -> None:
    async def story() -> None:
        all_do(mocks, num_chunks=2, gap_s=2.0)
        answer = await ask(door.port, chat(stream=True))
        assert answer.is_good
        assert answer.chunks[0][0] - answer.sent_s < 1
        assert answer.took_s > 2

    run(story())


@pytest.mark.parametrize("way", ["drain, then remove", "remove at once"])
def test_adding_and_removing_a_backend_all_the_time(mocks: list[MockBackend], way: str) -> None:
    """One comes and goes every 200 ms; every request finishes."""
    with mock_backends(1) as (visitor,), front_door(mocks[:2]) as door:
        all_do([*mocks, visitor], prefill_s=0.01, num_chunks=6, gap_s=0.01)

        async def come_and_go(stop: asyncio.Event) -> int:
            count = 0
            while not stop.is_set():
                name = (await asyncio.to_thread(door.admin, "POST", "/backends", {"url": visitor.url}))["name"]
                await asyncio.sleep(0.2)
                if way == "drain, then remove":
                    await asyncio.to_thread(door.admin, "POST", f"/backends/{name}/drain")
                await asyncio.to_thread(door.admin, "DELETE", f"/backends/{name}")
                await asyncio.sleep(0.2)
                count += 1
            return count

        async def story() -> None:
            stop = asyncio.Event()
            changes = asyncio.create_task(come_and_go(stop))
            answers: list[Answer] = []
            for part in range(100):
                bodies = [chat(f"{part} {i} {'z' * 30 * i}", stream=i % 2 == 0) for i in range(30)]
                answers += await ask_all(door.port, bodies, 10)
                if visitor.work and changes.done() is False and len(answers) >= 600:
                    break
            stop.set()
            assert await changes >= 5
            assert all(answer.is_good for answer in answers), {answer.status for answer in answers}
            assert visitor.work, "it took part"
            assert visitor.num_cancelled == 0, "what it had was finished there"

        run(story())
