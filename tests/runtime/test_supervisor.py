"""Replicas that cannot start, and what a supervisor leaves behind: nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

import pytest
from supervisors import assert_gone, collect, request, spec, supervisor

from expediter.core.errors import CapacityError, ConfigurationError, ReplicaError
from expediter.core.explanation import Reason, Span
from expediter.core.request import FinishReason
from expediter.runtime.questions import Questions
from expediter.runtime.replica_process import to_its_end
from expediter.runtime.spec import decode_spec, encode_spec
from expediter.runtime.supervisor import ReplicaState, SupervisorConfig


def test_questions_are_answered_once_for_all_who_asked() -> None:
    async def ask() -> None:
        questions = Questions()
        futures = [questions.ask(name) for name in ("a", "a", "b")]
        spans = (Span(0.0, None, Reason.QUEUED),)
        futures[0].cancel()
        questions.answer("a", spans)
        questions.answer("nobody", None)
        questions.give_up()
        assert await futures[1] == spans
        assert await futures[2] is None

    asyncio.run(ask())


@pytest.mark.parametrize("routing", ["cache_aware", "predicted_ttft", "session"])
def test_requests_that_belong_together_go_to_one_replica_and_it_is_told_why(routing: str) -> None:
    async def story() -> None:
        running = supervisor(specs=[spec(0), spec(1)], routing=routing)
        await running.start()
        homes: dict[int, int] = {}
        for turn in range(5):
            for number in range(2):
                turns = request(f"r{number}.{turn}", [number] * 4 * (turn + 1) + [9], 3, session=f"s{number}")
                (stream,) = running.submit([turns], asyncio.Event())
                homes.setdefault(number, stream.replica_id)
                assert stream.replica_id == homes[number]
                await collect(stream)
        spans = await running.explain("r1.4")
        assert spans is not None
        assert (spans[0].reason, spans[0].details["replica"]) == (Reason.ROUTED, homes[1])
        assert homes[0] != homes[1]
        assert [span.from_s for span in spans] == sorted(span.from_s for span in spans)
        await running.stop()

    asyncio.run(story())


def test_spec_crosses_standard_input() -> None:
    assert decode_spec(encode_spec(spec(3, 17))) == spec(3, 17)
    for raw in (b"", b"{}", b'{"replica_id": "x"}'):
        with pytest.raises(ReplicaError):
            decode_spec(raw)


def test_requests_over_two_replicas() -> None:
    async def story() -> None:
        running = supervisor(specs=[spec(0), spec(1)])
        with pytest.raises(CapacityError):
            running.submit([request("early", [1])], asyncio.Event())
        hellos = await running.start()
        pids = list(running.pids.values())
        assert sorted(hello.replica_id for hello in hellos) == [0, 1]
        assert sorted(hello.pid for hello in hellos) == sorted(pids)
        assert all(hello.max_model_len == 256 for hello in hellos), "the pool is shorter than the model"
        streams = [running.submit([request(f"r{i}", [i + 1] * 5, 3)], asyncio.Event())[0] for i in range(6)]
        assert [stream.replica_id for stream in streams] == [0, 1] * 3
        for i, stream in enumerate(streams):
            tokens, finished = await collect(stream)
            assert tokens == [i + 1] * 3
            assert finished.reason is FinishReason.LENGTH
        assert running.num_in_flight == 0
        running.drain()
        assert not running.is_ready
        with pytest.raises(CapacityError):
            running.submit([request("late", [1])], asyncio.Event())
        await running.stop()
        assert_gone(*pids)

    asyncio.run(story())


def test_whichever_replica_had_it_explains_a_request() -> None:
    async def story() -> None:
        running = supervisor(specs=[spec(0), spec(1)])
        assert await running.explain("r0") is None, "there is nobody to ask yet"
        await running.start()
        streams = [running.submit([request(f"r{i}", [i + 1] * 2, 1)], asyncio.Event())[0] for i in range(2)]
        for stream in streams:
            await collect(stream)
            spans = await running.explain(stream.request.request_id)
            assert spans is not None
            assert [span.reason for span in spans][-1] is Reason.ENDED
        assert await running.explain("nobody") is None
        os.kill(running.pids[0], signal.SIGSTOP)
        with pytest.raises(CapacityError, match="in time"):
            await running.explain("r0", timeout_s=0.05)
        os.kill(running.pids[0], signal.SIGCONT)
        running._replicas[0].process.kill()  # type: ignore[union-attr]
        assert (await running.explain("r1")) is not None, "the other one knows"
        await running.stop()
        assert await running.explain("r1") is None

    asyncio.run(story())


def test_a_replica_that_refuses_its_spec() -> None:
    async def story() -> None:
        for failing in (supervisor("--refuse"), supervisor(specs=[spec(0), spec(1, max_model_len=10_000)])):
            with pytest.raises(ConfigurationError, match=r"refuses|exceeds the KV cache"):
                await failing.start()
            assert not failing.pids

    asyncio.run(story())


@pytest.mark.parametrize(
    "command", [(sys.executable, "-c", "raise SystemExit(3)"), ("/bin/true",), ("/no/such/program",)]
)
def test_a_replica_that_dies_at_its_start(command: tuple[str, ...]) -> None:
    async def story() -> None:
        failing = supervisor(command=command)
        with pytest.raises(ReplicaError, match="exited with code"):
            await failing.start()
        assert not failing.pids

    asyncio.run(story())


def test_a_replica_that_never_says_hello() -> None:
    async def story() -> None:
        slow = supervisor(command=(sys.executable, "-c", "import time; time.sleep(60)"), start_timeout_s=0.5)
        started_s = time.monotonic()
        with pytest.raises(ReplicaError, match="not up"):
            await slow.start()
        assert time.monotonic() - started_s < 5
        assert not slow.pids

    asyncio.run(story())


def test_a_replica_that_talks_nonsense() -> None:
    code = (
        "import json, socket, sys, time; spec = json.load(sys.stdin);"
        "sock = socket.socket(fileno=spec['socket_fd']); sock.sendall(b'\\0\\0\\0\\1x'); time.sleep(60)"
    )

    async def story() -> None:
        failing = supervisor(command=(sys.executable, "-c", code))
        with pytest.raises(ReplicaError, match="exited with code -9"):
            await failing.start()

    asyncio.run(story())


def test_death_restart_and_backoff() -> None:
    async def story() -> None:
        running = supervisor("--step-s", "0.02")
        await running.start()
        for _ in range(3):
            (pid,) = running.pids.values()
            (stream,) = running.submit([request("r", [1, 2, 3], 200)], asyncio.Event())
            await stream.wake.wait()
            os.kill(pid, signal.SIGKILL)
            _, finished = await collect(stream)
            assert finished.reason is FinishReason.LENGTH, "the restarted one went on with it"
            async with asyncio.timeout(10):
                while running.states != {0: ReplicaState.UP}:  # noqa: ASYNC110 - a state, not an event of this test
                    await asyncio.sleep(0.02)
        tokens, _ = await collect(*running.submit([request("r", [1, 2, 3], 3)], asyncio.Event()))
        assert tokens == [1, 2, 3]
        (pid,) = running.pids.values()
        await running.stop()
        assert_gone(pid)

    asyncio.run(story())


def test_a_stopped_process_is_still_ended() -> None:
    """SIGSTOP holds SIGTERM back; after the grace it is killed."""

    async def story() -> None:
        running = supervisor()
        await running.start()
        (pid,) = running.pids.values()
        os.kill(pid, signal.SIGSTOP)
        await running.stop()
        assert_gone(pid)

    asyncio.run(story())


def test_config_is_checked() -> None:
    for wrong in (
        {"stall_s": 0.0},
        {"stall_s": 5.0, "kill_stalled_s": 1.0},
        {"min_backoff_s": 9.0, "max_backoff_s": 1.0},
    ):
        with pytest.raises(ConfigurationError):
            SupervisorConfig(**wrong)


def test_work_goes_to_its_end_although_its_caller_is_cancelled() -> None:
    async def story() -> None:
        steps: list[str] = []
        has_begun = asyncio.Event()

        async def work() -> str:
            steps.append("begun")
            has_begun.set()
            await asyncio.sleep(0.05)
            steps.append("ended")
            return "result"

        caller = asyncio.create_task(to_its_end(work()))
        await has_begun.wait()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert steps == ["begun", "ended"]
        assert await to_its_end(work()) == "result"
        assert len(steps) == 4

    asyncio.run(story())
