"""A configuration file that changes under a running door: what it takes, and what it says of the rest."""

from __future__ import annotations

import asyncio
import json
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.door.front_door import FrontDoor, front_door, run, until
from tests.door.http_client import ask, chat
from tests.door.mock_backends import MockBackend, all_do


def table(mock: MockBackend, **fields: object) -> str:
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in fields.items())
    return f'[[backends]]\nurl = "{mock.url}"\nname = "{mock.name}"\n{lines}'


def reload(door: FrontDoor, text: str) -> Any:
    door.config.write_text(text)
    return door.admin("POST", "/reload", {})


def refusal(door: FrontDoor, text: str) -> str:
    with pytest.raises(urllib.error.HTTPError) as caught:
        reload(door, text)
    with caught.value as error:
        assert error.code == 409
        return str(json.loads(error.read())["error"]["message"])


def names(door: FrontDoor) -> list[str]:
    return [row["name"] for row in door.backends().values()]


@contextmanager
def door_of(mocks: list[MockBackend], config: str, *flags: str) -> Iterator[FrontDoor]:
    with front_door([], *flags, config=config) as door:
        yield door


def test_the_queues_bounds_and_a_backends_own(mocks: list[MockBackend]) -> None:
    narrow = table(mocks[0], max_requests=1)
    with door_of(mocks, narrow + "[queue]\nmax_requests = 0\n") as door:

        async def story() -> None:
            all_do(mocks, hang="before_head")
            first = asyncio.create_task(ask(door.port, chat("one")))
            await until(lambda: mocks[0].num_in_flight == 1)
            assert (await ask(door.port, chat("two"))).json["error"]["code"] == "queue_full"
            await asyncio.to_thread(reload, door, narrow + "[queue]\nmax_requests = 5\n")
            waiting = asyncio.create_task(ask(door.port, chat("three")))
            await asyncio.sleep(0.2)
            assert not waiting.done()
            all_do(mocks)
            # Another limit is another backend: what is in flight at the former one goes on, and counts there no more.
            await asyncio.to_thread(reload, door, table(mocks[0], max_requests=4) + "[queue]\nmax_requests = 5\n")
            assert (await waiting).is_good
            assert not first.done()
            assert next(iter(door.backends().values()))["max_requests"] == 4
            first.cancel()

        run(story())


def test_backends_come_and_go_with_their_tables(mocks: list[MockBackend]) -> None:
    with door_of(mocks, table(mocks[0])) as door:

        async def story() -> None:
            all_do(mocks, prefill_s=1.0)
            under_way = asyncio.create_task(ask(door.port, chat("at the old one")))
            await until(lambda: mocks[0].num_in_flight == 1)
            assert await asyncio.to_thread(reload, door, table(mocks[1])) == {"reloaded": True, "after_restart": []}
            assert names(door) == ["mock1"]
            await until(lambda: door.get("/ready").status == 200)
            assert door.get("/ready").json == {"ready": True, "backends": {"mock1": "up"}, "replicas": {}}
            all_do(mocks)
            assert (await ask(door.port, chat("at the new one"))).is_good
            assert len(mocks[1].work) == 1
            assert (await under_way).is_good
            door.admin("POST", "/backends", {"url": mocks[2].url, "name": "by-hand"})
            await asyncio.to_thread(reload, door, table(mocks[1]) + table(mocks[3]))
            assert names(door) == ["mock1", "by-hand", "mock3"]

        run(story())


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("[queue]\nmax_requests = -1\n", ":5: [queue] max_requests must not be negative"),
        ("[door]\nmin_progress = 1\n", ":5: [door] has no 'min_progress'"),
        ('[[backends]]\nurl = "http://127.0.0.1:1"\napi_key_env = "NOT_SET"\n', "NOT_SET is not set"),
        ('[[backends]]\nurl = "http://127.0.0.1:1"\nname = "by-hand"\n', "there is a backend 'by-hand' already"),
        ('[tenants.alice]\nkey_env = ["NOT_SET"]\n', "tenant 'alice': the environment variable NOT_SET is not set"),
        ("[[backends]\n", "line 4"),
    ],
)
def test_a_file_that_cannot_be_used_changes_nothing(mocks: list[MockBackend], wrong: str, words: str) -> None:
    with door_of(mocks, table(mocks[0])) as door:
        door.admin("POST", "/backends", {"url": mocks[2].url, "name": "by-hand"})
        good_part = table(mocks[1])
        message = refusal(door, good_part + wrong.replace("max_requests = -1", "max_requests = -1\nordering = 'lifo'"))
        assert message.startswith("nothing has changed: ")
        assert words in message
        assert names(door) == ["mock0", "by-hand"]
        assert reload(door, good_part)["reloaded"]
        assert names(door) == ["by-hand", "mock1"]


def test_limits_hold_for_connections_that_come_then(mocks: list[MockBackend]) -> None:
    with door_of(mocks, table(mocks[0])) as door:

        async def story() -> None:
            assert (await ask(door.port, chat("x" * 9000))).is_good
            await asyncio.to_thread(reload, door, table(mocks[0]) + "[door]\nmax_body_bytes = 5000\nmax_attempts = 1\n")
            assert (await ask(door.port, chat("x" * 9000))).status == 413
            all_do(mocks, status=500)
            assert (await ask(door.port, chat())).status == 500
            assert len(mocks[0].work) == 2, "one attempt, and the one before"

        run(story())


def test_a_tenants_limits_and_what_was_used_of_them(mocks: list[MockBackend]) -> None:
    def with_limit(number: int) -> str:
        return f"{table(mocks[0])}[anonymous]\nmax_requests_per_minute = {number}\n"

    with door_of(mocks, with_limit(2)) as door:

        async def statuses(number: int) -> list[int]:
            return [(await ask(door.port, chat())).status for _ in range(number)]

        async def story() -> None:
            assert await statuses(3) == [200, 200, 429]
            await asyncio.to_thread(reload, door, with_limit(4))
            assert await statuses(3) == [200, 200, 429]

        run(story())


def test_what_takes_a_restart_is_said(mocks: list[MockBackend]) -> None:
    routing = '[routing]\nname = "round_robin"\n'
    with door_of(mocks, table(mocks[0])) as door:
        for _ in range(2):  # as long as the file says something else
            assert reload(door, table(mocks[0]) + routing)["after_restart"] == ["[routing]"]
        assert reload(door, table(mocks[0]))["after_restart"] == []


def test_every_process_takes_it(mocks: list[MockBackend]) -> None:
    with door_of(mocks, table(mocks[0]), "--gateway-processes", "2") as door:
        reload(door, table(mocks[1]))

        async def story() -> None:
            async def others_know() -> bool:
                answers = await asyncio.gather(*(ask(door.port, chat(f"{number}")) for number in range(16)))
                return all(answer.is_good for answer in answers)

            before = len(mocks[0].work)
            while not await others_know():
                pass
            assert len(mocks[0].work) == before == 0
            assert len(mocks[1].work) >= 16

        run(story(), 20)
