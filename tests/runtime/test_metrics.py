"""Metrics are what the events say."""

from __future__ import annotations

import re

from expediter.core.events import (
    Admitted,
    Finished,
    FirstToken,
    PreemptCause,
    Preempted,
    Queued,
    Rejected,
    RejectReason,
)
from expediter.core.plan import StepFeatures
from expediter.core.request import FinishReason
from expediter.telemetry.metrics import ServerMetrics
from expediter.telemetry.step_log import StepLog


def value(metrics: ServerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, {"model_name": "m", "engine": "3", **labels})


def test_one_request_from_queue_to_end() -> None:
    metrics = ServerMetrics("m")
    replica = metrics.for_replica(3)
    replica.record([Queued("a", 10.0), Admitted("a", 11.0, 20, 16, False), FirstToken("a", 12.0)])
    replica.record_tokens(12.0, ["a"])
    replica.record_tokens(12.5, ["a"])
    replica.record([Preempted("a", 12.5, PreemptCause.GROWTH, 21), Admitted("a", 13.0, 22, 16, True)])
    replica.record_tokens(14.0, ["a"])
    assert replica.num_live == 1
    replica.record([Finished("a", 14.0, FinishReason.LENGTH, 20, 3, 16, 1)])
    assert replica.num_live == 0
    want = {
        "vllm:prefix_cache_queries_total": 20,
        "vllm:prefix_cache_hits_total": 16,
        "vllm:num_preemptions_total": 1,
        "vllm:prompt_tokens_total": 20,
        "vllm:generation_tokens_total": 3,
        "vllm:request_queue_time_seconds_sum": 1.0,
        "vllm:time_to_first_token_seconds_sum": 2.0,
        "vllm:inter_token_latency_seconds_sum": 2.0,
        "vllm:inter_token_latency_seconds_count": 2,
        "vllm:request_time_per_output_token_seconds_sum": 1.0,
        "vllm:e2e_request_latency_seconds_sum": 4.0,
    }
    assert {name: value(metrics, name) for name in want} == want
    assert value(metrics, "vllm:request_success_total", finished_reason="length") == 1


def test_a_request_ends_once() -> None:
    metrics = ServerMetrics("m")
    replica = metrics.for_replica(3)
    replica.record([Queued("a", 0.0)])
    for reason in (FinishReason.ERROR, FinishReason.ABORT):
        replica.record([Finished("a", 1.0, reason, 5, 0, 0, 0)])
    assert value(metrics, "vllm:request_success_total", finished_reason="error") == 1
    assert value(metrics, "vllm:request_success_total", finished_reason="abort") is None
    replica.record([Queued("b", 0.0), Rejected("b", 0.0, RejectReason.SHUTDOWN, "no")])
    assert replica.num_live == 0
    assert value(metrics, "expediter:request_rejected_total", reason="shutdown") == 1


def test_gauges_and_exposition() -> None:
    metrics = ServerMetrics("m")
    replica = metrics.for_replica(3)
    replica.set_gauges(num_running=2, num_waiting=1, num_pending_tokens=7, num_used_blocks=3, num_blocks=4)
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0.75
    assert value(metrics, "vllm:num_requests_running") == 2
    replica.set_up(False)
    assert value(metrics, "vllm:num_requests_running") == 0
    text = metrics.render().decode()
    assert re.search(r'^vllm:num_requests_waiting\{engine="3",model_name="m"\} 0\.0$', text, re.M)


def test_the_step_log_is_bounded() -> None:
    log = StepLog(max_steps=3)
    for number in range(5):
        log.append(0, StepFeatures(number, 1, 0, 0, 0.0), 0.5)
    assert [step.sequence for step in log.since(0)] == [2, 3, 4]
    assert [step.features.num_tokens for step in log.since(4)] == [4]
