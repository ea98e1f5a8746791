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
from expediter.core.slo import Slo
from expediter.telemetry.exposition import render
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
    text = render(metrics.registry).decode()
    assert re.search(r'^vllm:num_requests_waiting\{engine="3",model_name="m"\} 0\.0$', text, re.M)


def test_decisions() -> None:
    metrics = ServerMetrics("m")
    replica = metrics.for_replica(3)
    slo = Slo(ttft_s=2.5, tpot_s=1.0, e2e_s=5.0)
    for name, slo_class, first_s in (("a", "fast", 2.0), ("b", "fast", 3.0), ("c", "", 1.0)):
        replica.record([Queued(name, 0.0, "alice", slo_class, slo)])
        replica.record([Admitted(name, 1.0, 20, 16, False, {"budget": 0.75, "step": 0.25}), FirstToken(name, first_s)])
    replica.record([Preempted("c", 1.5, PreemptCause.GROWTH, 21), Admitted("c", 2.0, 22, 16, True, {"no_slot": 0.5})])
    replica.record([Finished("a", 4.0, FinishReason.STOP, 20, 3, 16, 0)])
    replica.record(
        [Finished("b", 4.0, FinishReason.LENGTH, 20, 3, 16, 0), Finished("c", 4.0, FinishReason.ABORT, 20, 3, 16, 1)]
    )
    replica.record([Queued("d", 0.0, "bob", "fast", slo), Rejected("d", 1.0, RejectReason.LATE, "no")])
    replica.record_step(StepFeatures(300, 3, 2, 9, 1.0), 400)
    replica.record_step(StepFeatures(2, 2, 2, 9, 0.0), 400)
    replica.set_step_times(2.0, 1.5, 0.75)
    replica.set_gauges(
        num_running=0,
        num_waiting=3,
        num_pending_tokens=0,
        num_used_blocks=0,
        num_blocks=1,
        waiting_by_reason={"no_slot": 2, "late": 1},
    )
    judged = "expediter:request_slo_total"
    assert value(metrics, judged, slo_class="fast", tenant="alice", met="true") == 1
    assert value(metrics, judged, slo_class="fast", tenant="alice", met="false") == 1
    assert value(metrics, judged, slo_class="fast", tenant="bob", met="false") == 1
    assert value(metrics, judged, slo_class="", tenant="alice", met="true") is None, "who leaves is not judged"
    assert value(metrics, "expediter:request_held_seconds_total", reason="budget") == 2.25
    assert value(metrics, "expediter:request_held_seconds_total", reason="no_slot") == 0.5
    assert value(metrics, "expediter:tenant_prompt_tokens_total", tenant="alice") == 60
    assert value(metrics, "expediter:tenant_cached_tokens_total", tenant="alice") == 48
    assert value(metrics, "expediter:preemptions_by_cause_total", cause="growth") == 1
    assert value(metrics, "expediter:step_budget_used_share_sum") == 0.75
    assert value(metrics, "expediter:step_budget_used_share_count") == 1
    assert value(metrics, "expediter:step_seconds_predicted_sum") == 1.5
    waiting = "expediter:num_requests_waiting_by_reason"
    assert [value(metrics, waiting, reason=r) for r in ("no_slot", "late", "budget")] == [2, 1, 0]


def test_the_step_log_is_bounded() -> None:
    log = StepLog(max_steps=3)
    for number in range(5):
        log.append(0, StepFeatures(number, 1, 0, 0, 0.0), 0.5)
    assert [step.sequence for step in log.since(0)] == [2, 3, 4]
    assert [step.features.num_tokens for step in log.since(4)] == [4]
