"""Supervisors over replicas without a model, and what tests do with them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expediter.control.routing.build import RoutingConfig, make_router
from expediter.core.events import Finished
from expediter.core.request import Request
from expediter.runtime.clock import MonotonicClock
from expediter.runtime.spec import ReplicaSpec
from expediter.runtime.streams import OutputTokens, RequestStream
from expediter.runtime.supervisor import Supervisor, SupervisorConfig
from expediter.scheduling.build import PolicyConfig
from expediter.scheduling.config import SchedulerConfig
from expediter.telemetry.metrics import ServerMetrics
from expediter.telemetry.step_log import StepLog

FAKE_REPLICA = Path(__file__).parent / "fake_replica.py"


def spec(number: int = 0, max_model_len: int | None = None) -> ReplicaSpec:
    return ReplicaSpec(
        replica_id=number,
        model="none",
        dtype="auto",
        device="cpu",
        num_threads=1,
        block_size=4,
        num_blocks=64,
        kv_cache_memory_bytes=None,
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
        max_model_len=max_model_len,
        policy=PolicyConfig(),
        prefix_caching=True,
    )


def supervisor(
    *flags: str,
    command: tuple[str, ...] = (),
    specs: list[ReplicaSpec] | None = None,
    routing: str = "least_load",
    metrics: ServerMetrics | None = None,
    **config: Any,
) -> Supervisor:
    return Supervisor(
        command=command or (sys.executable, str(FAKE_REPLICA), *flags),
        specs=specs or [spec()],
        router=make_router(RoutingConfig(name=routing, index_block_tokens=4)),
        metrics=metrics or ServerMetrics("fake"),
        step_log=StepLog(),
        clock=MonotonicClock(),
        config=SupervisorConfig(**{"min_backoff_s": 0.05, "max_backoff_s": 0.2, **config}),
    )


def request(request_id: str, prompt: list[int], max_tokens: int = 100, session: str = "") -> Request:
    return Request(request_id=request_id, prompt=np.array(prompt, np.int32), max_tokens=max_tokens, session=session)


async def collect(stream: RequestStream) -> tuple[list[int], Finished]:
    tokens: list[int] = []
    while True:
        stream.wake.clear()
        for item in stream.take():
            if isinstance(item, OutputTokens):
                tokens += item.tokens
            if isinstance(item, Finished):
                return tokens, item
        await stream.wake.wait()


def assert_gone(*pids: int) -> None:
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
