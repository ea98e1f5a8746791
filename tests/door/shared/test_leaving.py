"""A client that leaves is passed on at once, and nothing of its request stays (CASES 37, 38)."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from tests.door.front_door import FrontDoor, front_door, run, until
from tests.door.http_client import CHAT, Connection, ask, chat
from tests.door.mock_backends import MockBackend, all_do

SLOW = {"prefill_s": 30.0}
STREAM = {"num_chunks": 2000, "gap_s": 0.02}


def num_cancelled(mocks: list[MockBackend]) -> int:
    return sum(mock.num_cancelled for mock in mocks)


def num_working(mocks: list[MockBackend]) -> int:
    return sum(mock.num_in_flight for mock in mocks)


@pytest.mark.parametrize(
    ("stream", "behaviour", "reads_head"),
    [(False, SLOW, False), (True, SLOW, False), (True, STREAM, True)],
    ids=["not streamed", "before the first token", "mid-stream"],
)
@pytest.mark.parametrize("how", ["reset", "close"])
def test_the_backend_sees_it_within_a_second(
    door: FrontDoor, mocks: list[MockBackend], stream: bool, behaviour: dict[str, float], reads_head: bool, how: str
) -> None:
    """Case 38 (vllm #54947, sglang PR#36552), for foreign backends."""

    async def story() -> None:
        all_do(mocks, **behaviour)
        connection = await Connection.open(door.port)
        connection.send("POST", CHAT, chat(stream=stream))
        await until(lambda: num_working(mocks) == 1)
        if reads_head:
            await connection.reader.readuntil(b"data: ")
        if how == "reset":
            connection.leave()
        else:
            await connection.close()
        assert await until(lambda: num_cancelled(mocks) == 1, 5, "the backend sees it") < 1
        await until(lambda: door.in_flight() == 0, 5, "counted no more")

    run(story())


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_the_central_queue(mocks: list[MockBackend], stream: bool) -> None:
    """A request that waits in the door reaches no backend once its client has left; who came later moves up."""
    one = mocks[:1]
    with front_door([], config=f'[[backends]]\nurl = "{one[0].url}"\nmax_requests = 1\n') as door:

        async def story() -> None:
            all_do(one, prefill_s=1.0)
            first = asyncio.create_task(ask(door.port, chat("first")))
            await until(lambda: num_working(one) == 1)
            leaver = await Connection.open(door.port)
            leaver.send("POST", CHAT, chat("leaver", stream=stream))
            await asyncio.sleep(0.1)
            last = asyncio.create_task(ask(door.port, chat("last")))
            await asyncio.sleep(0.1)
            leaver.leave()
            answers = await asyncio.gather(first, last)
            assert all(answer.is_good for answer in answers)
            assert [b"leaver" in arrival.body for arrival in one[0].work] == [False, False]
            assert door.in_flight() == 0

        run(story())


def test_load_counters_are_zero_after_500_aborts(door: FrontDoor, mocks: list[MockBackend]) -> None:
    """Case 37 (ray #61551): left at any point, whole, failed; what the door counts for its backends goes back to 0."""

    async def story() -> None:
        all_do(mocks, prefill_s=0.02, num_chunks=20, gap_s=0.01)
        random = Random(5)

        async def one() -> None:
            connection = await Connection.open(door.port)
            connection.send("POST", CHAT, chat("x" * random.randint(1, 3000), stream=random.random() < 0.7))
            await asyncio.sleep(random.choice([0, 0.01, 0.05, 0.1, 0.2]))
            connection.leave()

        fds = door.num_fds()
        for _ in range(10):
            await asyncio.gather(*(one() for _ in range(50)))
        await until(lambda: num_working(mocks) == 0, 5, "backends idle")
        await until(lambda: door.in_flight() == 0, 5, "nothing in flight")
        assert all(row["num_pending_tokens"] == 0 for row in door.backends().values())
        await until(lambda: door.num_fds() <= fds + 70, 5, "only kept connections are left")
        assert (await ask(door.port, chat())).is_good

    run(story())
