"""What a client sees of backends that fail: as little as possible, and never for longer than it lasts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
from tests.door.front_door import IMPATIENT, TIMEOUT_S, FrontDoor, front_door, num_up, run, until
from tests.door.http_client import Answer, ask, ask_all, chat
from tests.door.mock_backends import Behaviour, Metrics, MockBackend, all_do, mock_backends
from tests.gateway.live_server import wait_until


async def keep_asking(port: int, answers: list[Answer], stop: asyncio.Event, concurrency: int = 8) -> None:
    """Send small requests without a pause until told to stop; errors are answered by the next one."""

    async def client() -> None:
        while not stop.is_set():
            answers.append(await ask(port, chat()))
            await asyncio.sleep(0.005)

    await asyncio.gather(*(client() for _ in range(concurrency)))


def test_a_moment_of_503_from_all_does_not_lock_the_door(door: FrontDoor, mocks: list[MockBackend]) -> None:
    async def story() -> None:
        answers: list[Answer] = []
        stop = asyncio.Event()
        clients = asyncio.create_task(keep_asking(door.port, answers, stop))
        await until(lambda: sum(answer.is_good for answer in answers) > 20)
        fault_ends_s = time.monotonic() + 0.5
        for mock in mocks:
            mock.behaviour = Behaviour(status=503, status_until_s=fault_ends_s)
        await until(lambda: time.monotonic() > fault_ends_s)
        after = lambda: [answer for answer in answers if answer.is_good and answer.sent_s > fault_ends_s]  # noqa: E731
        await until(lambda: bool(after()), 2, "a success")
        assert after()[0].ended_s - fault_ends_s < 2
        await until(lambda: num_up(door) == 4, 6, "all up again")
        stop.set()
        await clients
        assert {answer.status for answer in answers} <= {200, 502, 503}
        assert all(answer.is_whole for answer in answers)

    run(story())


@pytest.mark.parametrize("status", [400, 404, 422])
def test_the_clients_own_errors_are_passed_on_and_open_no_breaker(
    door: FrontDoor, mocks: list[MockBackend], status: int
) -> None:
    async def story() -> None:
        for mock in mocks:
            mock.behaviour = Behaviour(status=status)
        bad = await ask_all(door.port, [chat()] * 30, 3)
        assert [answer.status for answer in bad] == [status] * 30
        assert bad[0].json["error"]["message"] == "as told"
        assert sum(len(mock.work) for mock in mocks) == 30, "none was tried again"
        for mock in mocks:
            mock.behaviour = Behaviour()
        good = await ask(door.port, chat())
        assert good.is_good
        assert good.took_s < 1
        assert num_up(door) == 4

    run(story())


@pytest.mark.parametrize("health_answers", [True, False], ids=["only work hangs", "everything hangs"])
def test_a_hung_backend_costs_one_timeout_per_window(mocks: list[MockBackend], health_answers: bool) -> None:
    """Whoever got nothing is tried elsewhere; once it is known, at most one request at a time finds out again."""
    with front_door(mocks, config=IMPATIENT) as door:

        async def story() -> None:
            hung, *_ = mocks
            hung.behaviour = Behaviour(hang="before_head")
            hung.health_answers = health_answers
            answers: list[Answer] = []
            stop = asyncio.Event()
            clients = asyncio.create_task(keep_asking(door.port, answers, stop, 4))
            await until(lambda: bool(hung.work), 10, "work for the hung one")
            await until(lambda: bool(hung.num_cancelled), 4 * TIMEOUT_S, "the timeout")
            known_s = time.monotonic()
            first = len(hung.work)
            assert first <= 4
            await asyncio.sleep(4 * TIMEOUT_S)
            later = [arrival for arrival in hung.work if arrival.at_s > known_s]
            for arrival in later:
                end_s = arrival.cancelled_s or time.monotonic()
                others = [each for each in later if each is not arrival and arrival.at_s <= each.at_s < end_s]
                assert not others, "one at a time finds out whether it is back"
            assert len(later) <= 4
            stop.set()
            await clients
            assert all(answer.is_good for answer in answers), {answer.status for answer in answers}
            slow = [answer for answer in answers if answer.took_s > TIMEOUT_S / 2]
            assert len(slow) <= len(hung.work)
            hung.behaviour = Behaviour()

        run(story())


def test_a_killed_backend_is_no_error_before_the_first_byte_and_comes_back(
    door: FrontDoor, mocks: list[MockBackend]
) -> None:
    async def story() -> None:
        for mock in mocks:
            mock.behaviour = Behaviour(prefill_s=0.03)
        victim = mocks[0]
        answers: list[Answer] = []
        stop = asyncio.Event()
        clients = asyncio.create_task(keep_asking(door.port, answers, stop, 12))
        await until(lambda: victim.num_in_flight > 0 and len(victim.work) > 5)
        victim.kill()
        dead_from = len(answers)
        await until(lambda: len(answers) > dead_from + 100)
        victim.revive()
        revived_s = time.monotonic()
        await until(lambda: any(arrival.at_s > revived_s for arrival in victim.work), 5, "work for the revived one")
        stop.set()
        await clients
        assert all(answer.is_good for answer in answers), {answer.status for answer in answers}

    run(story())


@pytest.mark.parametrize("fault", ["killed", "hung"])
def test_one_that_is_well_again_is_in_use_where_requests_come_one_at_a_time(
    mocks: list[MockBackend], fault: str
) -> None:
    """The same prompt every 200 ms: what is cached of it speaks for somebody else all the time."""
    with front_door(mocks, config=IMPATIENT) as door:

        async def story() -> None:
            answers: list[Answer] = []

            async def ask_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
                deadline_s = time.monotonic() + timeout_s
                while not condition():
                    assert time.monotonic() < deadline_s, what
                    answers.append(await ask(door.port, chat("x" * 4096)))
                    await asyncio.sleep(0.2)

            await ask_until(lambda: len(answers) == 5, 10, "some answers")
            victim = max(mocks, key=lambda mock: len(mock.work))
            if fault == "killed":
                victim.kill()
            else:
                victim.behaviour = Behaviour(hang="before_head")
            await ask_until(lambda: num_up(door) == 3, 3 * TIMEOUT_S, "it is out")
            others = len(answers)
            await ask_until(lambda: len(answers) == others + 10, 10 * TIMEOUT_S, "the others answer")
            if fault == "killed":
                victim.revive()
            else:
                victim.behaviour = Behaviour()
            well_s = time.monotonic()
            worked = lambda: any(arrival.at_s > well_s and arrival.ended_s for arrival in victim.work)  # noqa: E731
            await ask_until(worked, 5, "work for the one that is well again")
            await until(lambda: num_up(door) == 4, 1, "it is up")
            assert all(answer.is_good for answer in answers), {answer.status for answer in answers}

        run(story())


def test_all_killed_and_revived(door: FrontDoor, mocks: list[MockBackend]) -> None:
    async def story() -> None:
        assert (await ask(door.port, chat())).is_good
        for mock in mocks:
            mock.kill()
        for _ in range(20):
            answer = await ask(door.port, chat())
            assert answer.status in (502, 503)
            assert answer.took_s < 1
        for mock in mocks:
            mock.revive()
        started_s = time.monotonic()
        while not (await ask(door.port, chat())).is_good:
            assert time.monotonic() - started_s < 5
            await asyncio.sleep(0.05)

    run(story())


def test_without_a_backend_the_answer_is_503_at_once() -> None:
    with mock_backends(2) as mocks:
        for mock in mocks:
            mock.kill()
        with front_door(mocks, wait_for_up=False) as door:

            async def story() -> None:
                for stream in (False, True):
                    answer = await ask(door.port, chat(stream=stream))
                    assert answer.status == 503
                    assert answer.took_s < 1
                    assert int(answer.headers["retry-after"]) >= 1
                    assert answer.json["error"]["type"]

            run(story())
            assert door.get("/health").status == 200
            assert door.get("/ready").status == 503


@pytest.mark.parametrize("mode", ["frozen", "missing", "hang", "garbage"])
def test_metrics_that_say_nothing_true_stop_no_traffic(mode: str) -> None:
    """One backend claims to be full for ever, or does not say anything; the others do not say anything at all."""
    with mock_backends(3) as mocks:
        mocks[0].metrics = Metrics(mode, running=10_000, waiting=10_000, kv_usage=1.0)  # type: ignore[arg-type]
        mocks[1].metrics = mocks[2].metrics = Metrics("missing")
        with front_door(mocks) as door:

            async def story() -> None:
                answers = await ask_all(door.port, [chat(f"{i} {'x' * i}") for i in range(150)], 8)
                assert all(answer.is_good for answer in answers)
                assert all(mock.work for mock in mocks[1:])

            run(story())


def test_metrics_that_go_stale_stop_no_traffic(door: FrontDoor, mocks: list[MockBackend]) -> None:
    async def story() -> None:
        for mock in mocks:
            mock.metrics = Metrics("frozen", running=500, waiting=500, kv_usage=0.99)
        await asyncio.sleep(1.5)  # it has been read
        for mock in mocks:
            mock.metrics = Metrics("hang")
        answers = await ask_all(door.port, [chat(f"{i} {'x' * i}") for i in range(200)], 8)
        assert all(answer.is_good for answer in answers)
        assert max(answer.took_s for answer in answers) < 5

    run(story())


def test_a_retry_does_not_go_where_it_failed(mocks: list[MockBackend]) -> None:
    """Three break before the head; whoever asks gets the fourth, within the budget for retries."""
    with front_door(mocks) as door:

        async def story() -> None:
            mocks[0].behaviour = Behaviour(reset="before_head")
            answers = [await ask(door.port, chat(f"{i}")) for i in range(20)]
            assert all(answer.is_good for answer in answers)

        run(story())


def test_a_wait_that_begins_after_a_failure_is_told_as_that(mocks: list[MockBackend]) -> None:
    """It fails at the only one that is free, and then has to wait for the one that is not."""
    two = mocks[:2]
    tables = "".join(f'[[backends]]\nurl = "{mock.url}"\nmax_requests = 1\n' for mock in two)
    with front_door([], config=tables) as door:

        async def story() -> None:
            all_do(two, prefill_s=1.0)
            first = asyncio.create_task(ask(door.port, chat("first")))
            await until(lambda: any(mock.work for mock in two))
            busy, free = sorted(two, key=lambda mock: -len(mock.work))
            busy.behaviour, free.behaviour = Behaviour(), Behaviour(status=503)
            second = await ask(door.port, chat("second"))
            assert second.is_good
            assert (await first).is_good
            assert (len(busy.work), len(free.work)) == (2, 1)
            (told,) = door.get(f"/requests/{second.headers['x-request-id']}").json["gateway"]
            spans = told["spans"]
            assert [span["reason"] for span in spans] == ["forwarded", "queued", "routed", "forwarded", "ended"]
            failed, queued = spans[:2]
            assert 0 <= failed["to_s"] <= queued["from_s"] < queued["to_s"]
            counted_s = door.live.metric("expediter:gateway_queue_seconds_sum")
            assert counted_s == pytest.approx(queued["to_s"] - queued["from_s"], abs=0.01)

        run(story())


def test_retries_have_a_budget(door: FrontDoor, mocks: list[MockBackend]) -> None:
    """Everything fails: what reaches the backends stays near what was asked."""

    async def story() -> None:
        for mock in mocks:
            mock.behaviour = Behaviour(status=500)
        answers = await ask_all(door.port, [chat()] * 300, 16)
        assert all(answer.status >= 500 for answer in answers)
        assert sum(len(mock.work) for mock in mocks) <= 300 * 1.5 + 50

    run(story())


def test_who_waits_at_a_backend_that_fails_others_and_cannot_be_tried_again_gets_its_answer() -> None:
    with mock_backends(1) as mocks, front_door(mocks, config="[door]\nmax_attempts = 1\n") as door:

        async def story() -> None:
            (mock,) = mocks
            mock.behaviour = Behaviour(prefill_s=1.5)
            waits = asyncio.create_task(ask(door.port, chat()))
            await until(lambda: len(mock.work) == 1)
            mock.behaviour = Behaviour(status=500)
            assert [answer.status for answer in await ask_all(door.port, [chat()] * 3, 1)] == [500] * 3
            assert num_up(door) == 0
            assert (await waits).is_good

        run(story())


def test_idle_connections_that_the_backend_closed_are_not_used(door: FrontDoor, mocks: list[MockBackend]) -> None:
    """The usual race of keep-alive, in both orders: closed long before the next request, and just before."""

    async def story() -> None:
        for pause_s in (0.3, 0.0) * 10:
            answers = await ask_all(door.port, [chat(f"{i}") for i in range(12)], 6)
            assert all(answer.is_good for answer in answers), [answer.status for answer in answers]
            for mock in mocks:
                mock.close_idle()
            await asyncio.sleep(pause_s)

    run(story())


def test_a_backend_comes_into_use_when_it_starts_after_the_door() -> None:
    with mock_backends(2) as mocks:
        mocks[1].kill()
        with front_door(mocks, wait_for_up=False) as door:
            wait_until(lambda: num_up(door) >= 1, 20)
            mocks[1].revive()
            wait_until(lambda: num_up(door) == 2, 10, "the late one up")

            async def story() -> None:
                answers = await ask_all(door.port, [chat(f"{i} {'y' * i}") for i in range(60)], 8)
                assert all(answer.is_good for answer in answers)
                assert all(mock.work for mock in mocks)

            run(story())
