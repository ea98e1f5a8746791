"""A refusal says when another try is worth it: from how long replicas take to start, and from what they have to do."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from supervisors import request, spec, supervisor

from expediter.control.routing.build import RoutingConfig, make_router
from expediter.control.speed import Speed
from expediter.core.clock import VirtualClock
from expediter.core.errors import CapacityError
from expediter.core.events import Rejected, RejectReason
from expediter.core.ports import ExecutorLimits
from expediter.core.slo import Slo
from expediter.runtime.dispatch import Dispatcher, ResumeConfig
from expediter.runtime.frames import Hello
from expediter.runtime.replica import ManagedReplica, ReplicaState
from expediter.telemetry.metrics import ServerMetrics


def test_while_no_replica_is_up_it_is_the_time_to_start_one() -> None:
    async def story() -> None:
        running = supervisor(min_backoff_s=5.0, max_backoff_s=5.0)
        await running.start()
        took_s = running.start_took_s
        assert took_s > 0
        os.kill(running.pids[0], signal.SIGKILL)
        (replica,) = running._replicas
        while replica.up_in_s(time.monotonic()) < 1:  # noqa: ASYNC110 - its end is noticed, and the next start set
            await asyncio.sleep(0.01)
        with pytest.raises(CapacityError) as caught:
            running.submit([request("r", [1])], asyncio.Event())
        assert 2.0 < caught.value.retry_after_s <= 5.0 + took_s
        running.drain()
        with pytest.raises(CapacityError) as caught:
            running.submit([request("r", [1])], asyncio.Event())
        assert caught.value.retry_after_s == took_s
        await running.stop()

    asyncio.run(story())


@pytest.mark.parametrize(
    ("state", "in_s"), [(ReplicaState.UP, 0.0), (ReplicaState.STARTING, 7.0), (ReplicaState.DOWN, 7.0)]
)
def test_when_a_replica_is_up(state: ReplicaState, in_s: float) -> None:
    made = ManagedReplica(spec(), ServerMetrics("m").for_replica(0), state, starting_s=10.0, start_took_s=5.0)
    assert made.up_in_s(8.0) == in_s
    assert made.up_in_s(100.0) == 0.0


@pytest.mark.parametrize("is_known", [False, True])
def test_who_is_refused_as_late_comes_back_when_it_would_be_in_time(is_known: bool) -> None:
    """A thousand tokens wait, 10 ms each: one that allows 3 s, and takes 1 s itself, may be in time 8 s later."""

    async def story() -> None:
        made = ManagedReplica(spec(), ServerMetrics("m").for_replica(0), ReplicaState.UP)
        limits = ExecutorLimits(num_blocks=64, block_size=4, max_model_len=256, vocab_size=9, max_num_seqs=8)
        made.hello = Hello(replica_id=0, pid=1, limits=limits, max_model_len=256)
        made.process = SimpleNamespace(send=lambda frame: None)  # type: ignore[assignment]
        router = make_router(RoutingConfig(name="round_robin"))
        dispatcher = Dispatcher({0: made}, router, VirtualClock(0.0), ResumeConfig())
        dispatcher.join(made)
        dispatcher.learned(made, Speed(step_s=1e-6, token_s=0.01, context_s=0.0, is_known=is_known))
        hasty = replace(request("late", [1] * 100), slo=Slo(ttft_s=3.0), refuse_late=True)
        (stream,) = dispatcher.submit([hasty], asyncio.Event())
        dispatcher.submit([request("ahead", [2] * 1000)], asyncio.Event())
        dispatcher.pass_on(made, Rejected("late", 1.0, RejectReason.LATE, "late"))
        assert stream.rejection is not None
        assert stream.retry_after_s == pytest.approx(8.0 if is_known else 0.0, abs=0.1)

    asyncio.run(story())
