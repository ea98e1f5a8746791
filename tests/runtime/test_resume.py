"""Requests whose replica is killed go on at another one as if nothing had happened (CASES 35)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from supervisors import collect, request, spec, supervisor

from expediter.core.errors import ConfigurationError
from expediter.core.events import Admitted, Finished
from expediter.core.explanation import Reason
from expediter.core.request import FinishReason, Request
from expediter.runtime.dispatch import ResumeConfig
from expediter.runtime.streams import RequestStream
from expediter.runtime.supervisor import ReplicaState, Supervisor
from expediter.telemetry.metrics import ServerMetrics

SLOW = ("--model", "toy", "--step-s", "0.02")


async def until(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - a state, not an event of this test
            await asyncio.sleep(0.01)


def groups(prefix: str = "", max_tokens: int = 60) -> list[list[Request]]:
    """Two single requests and a group of three per replica, all different."""
    made = []
    for number, size in enumerate((1, 1, 1, 1, 3, 3)):
        first = request(f"{prefix}{number}.0", [number + 2, 5, 9, 14], max_tokens)
        made.append([replace(first, request_id=f"{prefix}{number}.{member}") for member in range(size)])
    return made


async def run_all(running: Supervisor, made: Sequence[Sequence[Request]]) -> list[RequestStream]:
    return [stream for group in made for stream in running.submit(group, asyncio.Event())]


def counted(metrics: ServerMetrics, name: str, **labels: str) -> float:
    return sum(
        sample.value
        for metric in metrics.registry.collect()
        for sample in metric.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def test_a_killed_replicas_requests_go_on_at_the_other_one() -> None:
    async def story() -> None:
        metrics = ServerMetrics("fake")
        running = supervisor(*SLOW, specs=[spec(0), spec(1)], metrics=metrics, min_backoff_s=30.0, max_backoff_s=30.0)
        await running.start()
        undisturbed = [await collect(stream) for stream in await run_all(running, groups("u"))]
        streams = await run_all(running, groups())
        victims = [stream for stream in streams if stream.replica_id == 0]
        assert 0 < len(victims) < len(streams)
        await until(lambda: all(len(stream.output) >= 5 for stream in streams))
        os.kill(running.pids[0], signal.SIGKILL)
        outcomes = [await collect(stream) for stream in streams]
        for (tokens, finished), (want, wanted) in zip(outcomes, undisturbed, strict=True):
            assert tokens == want, "no token twice, none lost"
            assert finished.reason is FinishReason.LENGTH
            assert finished.num_prompt_tokens == wanted.num_prompt_tokens == 4
            assert finished.num_output_tokens == 60
        assert all(stream.replica_id == 1 and stream.num_resumes == 1 for stream in victims)
        assert not any(stream.take() for stream in streams), "nothing follows the end"
        assert counted(metrics, "expediter:requests_resumed_total", engine="0") == len(victims)
        assert counted(metrics, "vllm:request_success_total") == 2 * len(streams)
        assert counted(metrics, "vllm:request_success_total", finished_reason="error") == 0
        assert counted(metrics, "vllm:prompt_tokens_total") == 4 * 2 * len(streams), "each prompt counts once"
        assert counted(metrics, "vllm:request_queue_time_seconds_count") == 2 * len(streams)
        assert running.num_in_flight == 0
        assert all(not r.num_pending_tokens and not r.num_context_tokens for r in running._replicas)
        await running.stop()

    asyncio.run(story())


def test_what_has_not_begun_begins_elsewhere_and_together() -> None:
    async def story() -> None:
        running = supervisor("--model", "toy", "--step-s", "0.7", specs=[spec(0), spec(1)], min_backoff_s=0.2)
        await running.start()
        group = [replace(request("a", [3, 4], 2), request_id=name) for name in "abc"]
        streams = await run_all(running, [group, [request("d", [5], 2)]])
        home = streams[0].replica_id
        os.kill(running.pids[home], signal.SIGKILL)
        outcomes = [await collect(stream) for stream in streams]
        assert [finished.reason for _, finished in outcomes] == [FinishReason.LENGTH] * 4
        assert len({tuple(tokens) for tokens, _ in outcomes[:3]}) == 1, "the toy model has no seeds"
        assert {stream.replica_id for stream in streams} == {1 - home}
        await running.stop()

    asyncio.run(story())


def test_a_request_may_be_what_replicas_die_of() -> None:
    async def story() -> None:
        running = supervisor(*SLOW, resume=ResumeConfig(max_resumes=2))
        await running.start()
        (stream,) = running.submit([request("r", [1, 2, 3], 200)], asyncio.Event())
        for num_resumes in range(3):
            num_output = len(stream.output)
            await until(lambda at_least=num_output: len(stream.output) > at_least)
            assert stream.num_resumes == num_resumes
            os.kill(running.pids[0], signal.SIGKILL)
            await until(lambda: running.states[0] is not ReplicaState.UP)
        tokens, finished = await collect(stream)
        assert finished.reason is FinishReason.ERROR
        assert len(tokens) == finished.num_output_tokens == len(stream.output)
        await running.stop()

    asyncio.run(story())


def test_nobody_waits_for_a_replica_for_ever() -> None:
    async def story() -> None:
        metrics = ServerMetrics("fake")
        running = supervisor(
            *SLOW, metrics=metrics, min_backoff_s=30.0, max_backoff_s=30.0, resume=ResumeConfig(within_s=2.0)
        )
        await running.start()
        left, stopped, lost = await run_all(running, [[request(f"r{i}", [i + 1], 200)] for i in range(3)])
        await until(lambda: all(s.output for s in (left, stopped, lost)))
        os.kill(running.pids[0], signal.SIGKILL)
        await until(lambda: not running.pids)
        assert running.num_in_flight == 3
        told = await running.explain("r2")
        assert told is not None
        assert [(span.reason, span.to_s) for span in told] == [(Reason.INTERRUPTED, None)]
        assert told[0].details == {"replica": 0, "output_tokens": len(lost.output)}
        assert told[0].in_words().startswith("replica 0 was lost; it goes on elsewhere behind ")
        running.abort("r0")
        running.abort("r1", FinishReason.STOP)
        assert running.num_in_flight == 1
        ends = [(await collect(stream))[1].reason for stream in (left, stopped, lost)]
        assert ends == [FinishReason.ABORT, FinishReason.STOP, FinishReason.ERROR]
        assert running.num_in_flight == 0
        assert counted(metrics, "vllm:request_success_total") == 3
        running.abort("r2")
        await running.stop()

    asyncio.run(story())


def test_draining_goes_on_elsewhere_too_and_stopping_does_not() -> None:
    async def story() -> None:
        running = supervisor(*SLOW, specs=[spec(0), spec(1)], min_backoff_s=30.0, max_backoff_s=30.0)
        await running.start()
        streams = await run_all(running, [[request(f"r{i}", [i + 1], 60)] for i in range(4)])
        await until(lambda: all(s.output for s in streams))
        running.drain()
        os.kill(running.pids[0], signal.SIGKILL)
        assert [(await collect(s))[1].reason for s in streams] == [FinishReason.LENGTH] * 4
        await running.stop()

        running = supervisor(*SLOW, specs=[spec(0), spec(1)])
        await running.start()
        streams = await run_all(running, [[request(f"r{i}", [i + 1], 200)] for i in range(4)])
        await until(lambda: all(s.output for s in streams))
        await running.stop()
        assert [(await collect(s))[1].reason for s in streams] == [FinishReason.ERROR] * 4
        assert not any(s.num_resumes for s in streams)
        assert running.num_in_flight == 0

    asyncio.run(story())


def test_the_explanation_tells_of_it() -> None:
    async def story() -> None:
        running = supervisor(*SLOW, specs=[spec(0), spec(1)], min_backoff_s=30.0, max_backoff_s=30.0)
        await running.start()
        streams = await run_all(running, [[request(f"r{i}", [i + 1], 40)] for i in range(2)])
        await until(lambda: all(s.output for s in streams))
        os.kill(running.pids[0], signal.SIGKILL)
        for stream in streams:
            await collect(stream)
        told = await running.explain("r0")
        assert told is not None
        assert [span.reason for span in told[:3]] == [Reason.ROUTED, Reason.INTERRUPTED, Reason.ROUTED]
        assert [span.details["replica"] for span in told[:3]] == [0, 0, 1]
        assert told[-1].reason is Reason.ENDED
        assert told[-1].details["output_tokens"] == 40
        assert [span.from_s for span in told] == sorted(span.from_s for span in told)
        await running.stop()

    asyncio.run(story())


def stream_of(output: list[int], abort: FinishReason | None = None, min_tokens: int = 0) -> RequestStream:
    made = Request(
        request_id="r", prompt=np.ones(3, np.int32), max_tokens=4, min_tokens=min_tokens, stop_token_ids=(7,)
    )
    stream = RequestStream(made, "r", asyncio.Event())
    stream.push_tokens(output, None)
    stream.abort_reason = abort
    return stream


@pytest.mark.parametrize(
    ("stream", "owed"),
    [
        (stream_of([]), None),
        (stream_of([1, 2, 3]), None),
        (stream_of([1, 7]), FinishReason.STOP),
        (stream_of([1, 7], min_tokens=3), None),
        (stream_of([7, 1]), None),
        (stream_of([1, 2, 3, 4]), FinishReason.LENGTH),
        (stream_of([1, 2, 3, 7]), FinishReason.STOP),
        (stream_of([1], FinishReason.ABORT), FinishReason.ABORT),
    ],
)
def test_what_lacks_only_its_end_does_not_go_on(stream: RequestStream, owed: FinishReason | None) -> None:
    assert stream.owed_end() is owed


def test_what_a_stream_carries_on() -> None:
    stream = stream_of([5, 6])
    stream.push(Admitted("r", 1.5, 3, 2, False))
    stream.push(Admitted("r", 4.0, 5, 0, True))
    carried = stream.carried()
    assert (carried.output, carried.first_scheduled_s, carried.num_cached_tokens) == ((5, 6), 1.5, 2)
    assert stream.ended(9.0, FinishReason.ERROR) == Finished("r", 9.0, FinishReason.ERROR, 3, 2, 2, 0)


@pytest.mark.parametrize("wrong", [{"within_s": -1.0}, {"within_s": float("nan")}, {"max_resumes": -1}])
def test_the_configuration_is_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError):
        ResumeConfig(**wrong)
