"""Several gateway processes on one port: they agree on load, limits and prefixes well enough, and come back."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from tests.door.front_door import FrontDoor, front_door, num_up, run, until
from tests.door.http_client import Answer, ask, ask_all, chat
from tests.door.mock_backends import MockBackend, all_do, best_hit_share, hit_share
from tests.gateway.live_server import children_of, is_alive, wait_until


@pytest.fixture
def pair(mocks: list[MockBackend]) -> Iterator[FrontDoor]:
    """A door of two processes before four backends."""
    with front_door(mocks, "--gateway-processes", "2") as door:
        yield door


def prefix(number: int, num_bytes: int = 4096) -> str:
    return " ".join(f"p{number}x{i}" for i in range(num_bytes))[:num_bytes]


def test_they_agree_on_load(pair: FrontDoor, mocks: list[MockBackend]) -> None:
    """A burst of new prompts over many connections, which the kernel divides as it likes, is spread as by one."""

    async def story() -> None:
        all_do(mocks, prefill_s=1.5)
        burst = asyncio.create_task(ask_all(pair.port, [chat(prefix(i)) for i in range(40)], 40))
        await until(lambda: sum(len(mock.work) for mock in mocks) == 40, 10, "all dispatched")
        assert max(len(mock.work) for mock in mocks) <= 18, [len(mock.work) for mock in mocks]
        assert all(answer.is_good for answer in await burst)
        await until(lambda: pair.in_flight() == 0, 5, "nothing in flight")

    run(story())


def test_they_tell_each_other_of_prefixes(pair: FrontDoor, mocks: list[MockBackend]) -> None:
    """Groups with a common beginning, each request on a connection of its own: most find their prefix all the same."""

    async def story() -> None:
        all_do(mocks, prefill_s=0.01)
        for question in range(8):
            for group in range(12):
                answer = await ask(pair.port, chat(prefix(group) + f" question {question}?"))
                assert answer.is_good
        assert hit_share(mocks) >= 0.85 * best_hit_share(mocks), (hit_share(mocks), best_hit_share(mocks))

    run(story())


def test_they_share_a_tenants_limits(mocks: list[MockBackend]) -> None:
    hashed = sha256(b"sk-alice").hexdigest()
    text = f'[tenants.alice]\nkey_hashes = ["{hashed}"]\nmax_concurrent_requests = 6\n'
    with front_door(mocks, "--gateway-processes", "2", config=text) as door:

        async def story() -> None:
            all_do(mocks, prefill_s=2.0)
            key = {"authorization": "Bearer sk-alice"}
            tasks = []
            for number in range(24):  # not in one instant: what a process has heard of the other may be some ms old
                tasks.append(asyncio.create_task(ask(door.port, chat(f"{number}"), headers=key)))
                await asyncio.sleep(0.02)
            statuses = [answer.status for answer in await asyncio.gather(*tasks)]
            assert set(statuses) == {200, 429}
            assert 6 <= statuses.count(200) <= 8

        run(story())


def test_one_that_is_killed_comes_back_and_the_other_serves(pair: FrontDoor, mocks: list[MockBackend]) -> None:
    async def story() -> None:
        workers = children_of(pair.pid)
        assert len(workers) >= 2 or workers, "there are processes to kill"
        os.kill(workers[-1], signal.SIGKILL)
        answers: list[Answer] = []
        while len(answers) < 40:
            answers.append(await ask(pair.port, chat(f"{len(answers)}")))
            await asyncio.sleep(0.02)
        assert sum(answer.is_good for answer in answers) >= 30, "those that the dead one had accepted are lost"
        assert all(answer.is_good for answer in answers[-10:])
        await until(lambda: len(children_of(pair.pid)) == len(workers), 15, "a new process")
        await until(lambda: pair.in_flight() == 0, 5, "what the dead one had counted is forgotten")

    run(story())
    assert num_up(pair) == 4


def test_all_of_them_end_at_sigterm(mocks: list[MockBackend]) -> None:
    with front_door(mocks, "--gateway-processes", "2") as door:
        pids = [door.pid, *children_of(door.pid)]

        async def story() -> None:
            all_do(mocks, num_chunks=20, gap_s=0.05)
            streams = [asyncio.create_task(ask(door.port, chat(stream=True))) for _ in range(12)]
            await until(lambda: sum(mock.num_in_flight for mock in mocks) == 12)
            door.live.process.send_signal(signal.SIGTERM)
            assert all(answer.is_good for answer in await asyncio.gather(*streams))

        run(story())
        assert door.live.process.wait(15) == 0
        wait_until(lambda: not any(map(is_alive, pids)), what="all processes gone")


def test_metrics_of_any_process_are_those_of_all(pair: FrontDoor, mocks: list[MockBackend]) -> None:
    answers = run(ask_all(pair.port, [chat(f"{i}") for i in range(60)], 12))
    assert all(answer.is_good for answer in answers)

    def totals() -> set[float]:
        return {pair.live.metric("expediter:gateway_requests_total") for _ in range(6)}

    wait_until(lambda: totals() == {60.0}, 2, "each process has counted its newest requests")
    assert totals() == {60.0}


def test_own_replicas_have_one_process(mocks: list[MockBackend], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "expediter.cli.main", "serve", str(tmp_path), "--gateway-processes", "2"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "gateway-processes" in done.stderr
    assert "Traceback" not in done.stderr
