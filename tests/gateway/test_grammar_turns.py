"""Who gets a worker next, and who is turned away: fair by time, whatever anybody sends."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expediter.core.errors import CapacityError
from expediter.gateway.grammar_turns import Turns

TENANTS = ["a", "b", "c"]


class Story:
    """Turns over a clock that stands still; whoever gets one holds it until told."""

    def __init__(self, num_workers: int = 3, max_wait_s: float = 60.0) -> None:
        self.now_s = 0.0
        self.turns = Turns(num_workers, max_wait_s=max_wait_s, now=lambda: self.now_s)
        self.running: list[tuple[str, asyncio.Event, asyncio.Task[None]]] = []
        self.waiting: list[tuple[str, asyncio.Task[None]]] = []
        self.order: list[str] = []

    async def ask(self, tenant: str) -> asyncio.Task[None]:
        task = asyncio.create_task(self._hold(tenant))
        self.waiting.append((tenant, task))
        await self.settle()
        return task

    async def _hold(self, tenant: str) -> None:
        async with self.turns.turn(tenant):
            event, task = asyncio.Event(), asyncio.current_task()
            assert task is not None
            self.waiting.remove((tenant, task))
            self.running.append((tenant, event, task))
            self.order.append(tenant)
            await event.wait()

    async def give_back(self, number: int = 0) -> str:
        tenant, event, task = self.running.pop(number)
        event.set()
        await task
        await self.settle()
        return tenant

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    async def end(self) -> None:
        tasks = [task for *_, task in self.running] + [task for _, task in self.waiting]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@given(
    num_workers=st.integers(1, 4),
    acts=st.lists(
        st.tuples(st.sampled_from(["ask", "give back", "leave", "pass"]), st.sampled_from(TENANTS), st.integers(0, 9)),
        max_size=60,
    ),
)
def test_no_worker_is_idle_while_somebody_may_have_it(num_workers: int, acts: list[tuple[str, str, int]]) -> None:
    async def run() -> None:
        story = Story(num_workers)
        most = max(1, num_workers - 1)
        for act, tenant, number in acts:
            if act == "ask":
                await story.ask(tenant)
            elif act == "give back" and story.running:
                await story.give_back(number % len(story.running))
            elif act == "leave" and story.waiting:
                _, task = story.waiting.pop(number % len(story.waiting))
                task.cancel()
                await story.settle()
            else:
                story.now_s += number
            counts = Counter(who for who, *_ in story.running)
            assert len(story.running) <= num_workers
            assert all(count <= most for count in counts.values())
            if len(story.running) < num_workers:
                assert all(counts[who] >= most for who, _ in story.waiting)
        await story.end()

    asyncio.run(run())


def test_who_has_taken_least_time_lately_is_next() -> None:
    async def run() -> None:
        story = Story()
        for tenant in "aaaabbbb":
            await story.ask(tenant)
        assert story.order == ["a", "a", "b"]
        story.now_s = 3.0
        await story.ask("c")
        await story.give_back(2)  # b's: it has taken 3 s, a 6 s, c nothing
        assert story.order[3:] == ["c"]
        story.now_s = 3.1
        await story.give_back(2)
        assert story.order[4:] == ["b"]
        story.now_s = 300.0
        await story.give_back(2)  # both of a's still run, so its four waiting ones cannot
        assert story.order[5:] == ["b"]
        await story.end()

    asyncio.run(run())


def test_a_turn_that_comes_to_one_who_leaves_is_not_lost() -> None:
    async def run() -> None:
        story = Story(1)
        await story.ask("a")
        leaver = await story.ask("b")
        _, event, first = story.running.pop()
        event.set()
        await asyncio.sleep(0)  # the turn is given back, and comes to b, which has not looked yet
        leaver.cancel()
        await asyncio.gather(first, leaver, return_exceptions=True)
        story.waiting.clear()
        story.running.clear()
        await story.ask("c")
        assert [who for who, *_ in story.running] == ["c"]
        await story.end()

    asyncio.run(run())


def test_waiting_has_an_end() -> None:
    async def run() -> None:
        story = Story(1, max_wait_s=0.05)
        await story.ask("a")
        with pytest.raises(CapacityError, match="wait to be compiled"):
            await (await story.ask("b"))
        story.waiting.clear()
        await story.give_back()
        await story.ask("c")
        assert [who for who, *_ in story.running] == ["c"]
        await story.end()

    asyncio.run(run())


def pause_s(turns: Turns, tenant: str = "a") -> float:
    try:
        turns.check(tenant)
    except CapacityError as error:
        return error.retry_after_s
    return 0.0


def test_pauses_double_and_end_with_one_that_goes_well() -> None:
    async def run() -> None:
        story = Story()
        turns = story.turns
        seen: list[Any] = []
        for _ in range(10):
            turns.ended("a", in_time=False)
            seen.append(pause_s(turns))
            story.now_s += seen[-1]
            assert not pause_s(turns), "it may try again"
        assert seen == [0, 0, 1, 2, 4, 8, 16, 32, 64, 120]
        assert not pause_s(turns, "b")
        turns.ended("a", in_time=True)
        turns.ended("a", in_time=False)
        assert not pause_s(turns)

    asyncio.run(run())


def test_old_failures_are_forgiven() -> None:
    async def run() -> None:
        story = Story()
        for _ in range(3):
            story.turns.ended("a", in_time=False)
        story.now_s = 700.0
        story.turns.ended("a", in_time=False)
        assert not pause_s(story.turns)

    asyncio.run(run())


def test_what_waits_is_turned_away_with_its_tenant() -> None:
    async def run() -> None:
        story = Story()
        for tenant in "aabb":
            await story.ask(tenant)
        waits = await story.ask("a")
        for _ in range(3):
            story.turns.ended("a", in_time=False)
        with pytest.raises(CapacityError, match="took too long"):
            await waits
        assert [who for who, _ in story.waiting if who == "b"] == ["b"]
        await story.end()

    asyncio.run(run())
