"""Who is busy is not taken for hung: a backend may be silent to a request for far longer than is usual."""

from __future__ import annotations

import asyncio

import pytest
from tests.door.front_door import IMPATIENT, TIMEOUT_S, FrontDoor, front_door, run, until
from tests.door.http_client import ask, ask_all, chat
from tests.door.mock_backends import Behaviour, MockBackend


async def one_waits_beside_another(
    door: FrontDoor, busy: MockBackend, others_port: int, late: Behaviour, *, stream: bool
) -> None:
    """A stream is answered at `others_port` while one request behind the door waits, and it gets its answer."""
    usual = await ask_all(door.port, [chat(stream=stream)] * 4, 1)
    assert all(answer.is_good for answer in usual)
    busy.behaviour = Behaviour(num_chunks=30, gap_s=TIMEOUT_S / 6)
    other = asyncio.create_task(ask(others_port, chat(stream=True)))
    await until(lambda: len(busy.work) == 5)
    busy.behaviour = late
    answer = await ask(door.port, chat(stream=stream))
    assert answer.is_good
    assert answer.took_s > 2 * TIMEOUT_S
    assert (await other).is_good
    assert len(busy.work) == 6, "nobody was sent a second time"
    assert door.live.metric("expediter:gateway_ejections_total") == 0


def test_a_slow_stream_is_not_taken_for_a_hung_one(mocks: list[MockBackend]) -> None:
    """It lasts longer than the timeout, and there is progress all the time."""
    with front_door(mocks, config=IMPATIENT) as door:

        async def story() -> None:
            for mock in mocks:
                mock.behaviour = Behaviour(num_chunks=24, gap_s=TIMEOUT_S / 12)
            answers = await ask_all(door.port, [chat(stream=True)] * 8, 8)
            assert all(answer.is_good and answer.events[-1] == "[DONE]" for answer in answers)
            assert min(answer.took_s for answer in answers) > 1.5 * TIMEOUT_S
            assert sum(len(mock.work) for mock in mocks) == 8

        run(story())


@pytest.mark.parametrize(
    ("late", "stream"),
    [
        (Behaviour(prefill_s=3 * TIMEOUT_S), True),
        (Behaviour(prefill_s=3 * TIMEOUT_S), False),
        (Behaviour(num_chunks=2, gap_s=3 * TIMEOUT_S), True),
    ],
    ids=["in its queue", "in its queue, whole", "pushed aside"],
)
def test_an_overloaded_engine_is_not_taken_for_a_hung_one(
    mocks: list[MockBackend], late: Behaviour, stream: bool
) -> None:
    """One request hears nothing for far longer than is usual, and another is answered all the while."""
    busy, *_ = mocks
    with front_door([busy], config=f"{IMPATIENT}usual_gap_s = 0.3\n") as door:
        run(one_waits_beside_another(door, busy, door.port, late, stream=stream))


def test_an_engine_that_works_for_others_is_not_taken_for_a_hung_one(mocks: list[MockBackend]) -> None:
    """Those others ask it themselves, or through another door: nothing but its metrics tells that they are answered."""
    busy, *_ = mocks
    with front_door([busy], config=IMPATIENT) as door:
        run(one_waits_beside_another(door, busy, busy.port, Behaviour(prefill_s=3 * TIMEOUT_S), stream=True))


def test_an_engine_that_computes_many_prompts_in_one_step_is_not_taken_for_a_hung_one(mocks: list[MockBackend]) -> None:
    """It takes as long as all of them take one by one, and says nothing to anybody until it is done."""
    busy, *_ = mocks
    one_s = TIMEOUT_S / 4
    with front_door([busy], config=IMPATIENT) as door:

        async def story() -> None:
            for number in range(20):
                share = (1 + number % 4) / 4
                busy.behaviour = Behaviour(prefill_s=one_s * share)
                assert (await ask(door.port, chat(f"{number} " + "x" * int(4000 * share), stream=True))).is_good
            busy.behaviour = Behaviour(prefill_s=12 * one_s)
            answers = await ask_all(door.port, [chat(f"{i} " + "y" * 4000, stream=True) for i in range(12)], 12)
            assert all(answer.is_good for answer in answers)
            assert min(answer.took_s for answer in answers) > 10 * one_s
            assert len(busy.work) == 32, "nobody was sent a second time"
            assert door.live.metric("expediter:gateway_ejections_total") == 0

        run(story())
