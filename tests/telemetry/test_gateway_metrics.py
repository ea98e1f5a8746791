"""The gateway's metrics say what its records say, in one process and in several."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
from exchange_records import answered, routed
from prometheus_client import CollectorRegistry

from expediter.control.routing.base import Placement
from expediter.core.slo import Slo
from expediter.telemetry.counter_rows import CounterRows, read_rows
from expediter.telemetry.exchanges import Attempt, Outcome
from expediter.telemetry.gateway_metrics import GatewayMetrics, cause_of
from expediter.telemetry.process_place import ProcessPlace
from expediter.telemetry.shown_backend import ShownBackend

PREFIX = "expediter:gateway_"


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(PREFIX + name, labels)


def test_an_answered_request() -> None:
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry, policy="predicted_ttft")
    metrics.record(answered())
    model, who = {"model_name": "m", "backend": "b0"}, {"model_name": "m", "tenant": "alice"}
    assert value(registry, "requests_total", **model, tenant="alice", outcome="ok") == 1
    assert value(registry, "time_to_first_token_seconds_sum", **model) == 1.0
    assert value(registry, "time_to_first_token_seconds_bucket", **model, le="1.0") == 1
    assert value(registry, "time_to_first_token_seconds_bucket", **model, le="0.75") == 0
    assert value(registry, "time_to_first_token_seconds_bucket", **model, le="+Inf") == 1
    assert value(registry, "time_per_output_token_seconds_sum", **model) == pytest.approx(0.1)
    assert value(registry, "request_seconds_sum", **model) == 2.0
    assert value(registry, "queue_seconds_sum", model_name="m") == 0.5
    assert value(registry, "request_slo_total", slo_class="fast", tenant="alice", met="true") == 1
    tokens = [value(registry, "tokens_total", **who, kind=kind) for kind in ("prompt", "output", "cached")]
    assert tokens == [100, 11, 60]
    assert value(registry, "expected_cached_tokens_total", backend="b0") == 64
    assert value(registry, "bytes_total", direction="in") == 400
    assert value(registry, "bytes_total", direction="out") == 1000
    assert value(registry, "routing_decisions_total", policy="predicted_ttft", cause="cached") == 1
    predicted = [
        value(registry, "predicted_ttft_seconds_total", kind=k) for k in ("expected", "actual", "absolute_error")
    ]
    assert predicted == [0.25, 0.5, 0.25]
    assert value(registry, "ttft_predictions_total") == 1


@pytest.mark.parametrize(
    ("fields", "met"),
    [
        ({}, True),
        ({"slo": Slo(ttft_s=0.9)}, False),
        ({"slo": Slo(tpot_s=0.09)}, False),
        ({"is_stream": False, "slo": Slo(ttft_s=0.9, e2e_s=2.5)}, True),
        ({"is_stream": False, "slo": Slo(e2e_s=1.5)}, False),
        ({"outcome": Outcome.FAILED}, False),
        ({"outcome": Outcome.EXPIRED}, False),
        ({"outcome": Outcome.NO_CAPACITY}, False),
        ({"outcome": Outcome.LATE}, False),
        ({"outcome": Outcome.CLIENT_GONE}, None),
        ({"outcome": Outcome.CLIENT_ERROR}, None),
        ({"outcome": Outcome.OVER_LIMIT, "error_code": "tokens"}, None),
    ],
)
def test_who_met_their_targets(fields: dict[str, object], met: bool | None) -> None:
    registry = CollectorRegistry()
    record = answered(**fields)
    GatewayMetrics(registry).record(record)
    assert record.met_slo is met
    judged = [value(registry, "request_slo_total", slo_class="fast", tenant="alice", met=m) for m in ("true", "false")]
    assert judged == [float(met is True), float(met is False)]


def test_attempts_limits_and_health() -> None:
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    failed = Attempt(backend="b1", dispatched_s=100.1, ended_s=100.2, failure="connect")
    timed_out = Attempt(backend="b2", dispatched_s=100.2, ended_s=100.4, failure="timeout")
    metrics.record(answered(attempts=(failed, timed_out, *answered().attempts)))
    metrics.record(answered(attempts=(failed,), outcome=Outcome.FAILED, status=502))
    metrics.record(answered(attempts=(), route=None, outcome=Outcome.OVER_LIMIT, error_code="tokens", status=429))
    assert value(registry, "attempt_failures_total", backend="b1", cause="connect") == 2
    assert value(registry, "attempt_failures_total", backend="b2", cause="timeout") == 1
    assert value(registry, "retries_total", cause="connect") == 1
    assert value(registry, "retries_total", cause="timeout") == 1
    assert value(registry, "limited_total", tenant="alice", limit="tokens") == 1
    metrics.ejected("b1")
    metrics.probed("b1", succeeded=False)
    metrics.probed("b1", succeeded=True)
    assert value(registry, "ejections_total", backend="b1") == 1
    assert value(registry, "probes_total", backend="b1", result="failure") == 1
    metrics.entered()
    metrics.entered()
    metrics.left()
    metrics.queue(3, 4096)
    assert value(registry, "requests_in_flight") == 1
    assert (value(registry, "queue_requests"), value(registry, "queue_tokens")) == (3, 4096)


@pytest.mark.parametrize(
    ("route", "cause"),
    [
        (routed(), "turn"),
        (routed(1.0, 1.0), "cost"),
        (routed(1.0, 2.0, num_cached_tokens=5), "cached"),
        (routed(2.0, 1.0, num_cached_tokens=5, is_held_back=True), "bounded"),
    ],
)
def test_causes_of_routing(route: Placement, cause: str) -> None:
    assert cause_of(route) == cause


def test_backends() -> None:
    registry = CollectorRegistry()
    backends = [ShownBackend(name="b0", state="ejected", num_in_flight=2, kv_usage=0.5), ShownBackend(name="b1")]
    GatewayMetrics(registry, lambda: backends)
    sample = registry.get_sample_value
    assert sample("expediter:backend_state", {"backend": "b0", "state": "ejected"}) == 1
    assert sample("expediter:backend_state", {"backend": "b0", "state": "up"}) == 0
    assert sample("expediter:backend_requests_in_flight", {"backend": "b0"}) == 2
    assert sample("expediter:backend_kv_usage", {"backend": "b0"}) == 0.5
    assert sample("expediter:backend_kv_usage", {"backend": "b1"}) is None, "it has told nothing"


def test_what_is_news_the_first_time_is_shown_before() -> None:
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry, lambda: [ShownBackend(name="b0"), ShownBackend(name="replica 0", is_own=True)])

    def shown() -> list[float | None]:
        return [
            value(registry, "ejections_total", backend="b0"),
            value(registry, "probes_total", backend="b0", result="failure"),
            value(registry, "attempt_failures_total", backend="b0", cause="connect"),
            value(registry, "retries_total", cause="timeout"),
            value(registry, "unauthorized_total"),
        ]

    assert shown() == [0, 0, 0, 0, 0], "or the rate of the first ones would be seen by nobody"
    metrics.ejected("b0")
    metrics.probed("b0", succeeded=False)
    metrics.unauthorized()
    failed = [
        Attempt(backend="b0", dispatched_s=100.1, ended_s=100.2, failure=cause) for cause in ("timeout", "connect")
    ]
    metrics.record(answered(attempts=(*failed, *answered().attempts)))
    assert shown() == [1, 1, 1, 1, 1]
    assert value(registry, "ejections_total", backend="replica 0") is None, "own replicas are never ejected"


def test_labels_are_bounded() -> None:
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    for number in range(6000):
        metrics.record(answered(tenant=f"t{number}", model=f"m{number}"))
    samples = [sample for family in registry.collect() for sample in family.samples]
    counts = [(s.labels["tenant"], s.value) for s in samples if s.name == PREFIX + "requests_total"]
    assert sum(number for _, number in counts) == 6000, "none is lost"
    assert sum(number for tenant, number in counts if tenant == "other") > 1000
    assert len(samples) < 200_000


def _count(folder: Path, slot: int, times: int) -> None:
    metrics = GatewayMetrics(CollectorRegistry(), place=ProcessPlace(folder, slot, 3))
    for _ in range(times):
        metrics.record(answered())
    metrics.entered()


def test_processes_add_up_and_a_new_one_goes_on(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    for slot, times in ((1, 5), (2, 7), (1, 11)):  # slot 1 died and was started again
        process = context.Process(target=_count, args=(tmp_path, slot, times))
        process.start()
        process.join(60)
        assert process.exitcode == 0
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry, place=ProcessPlace(tmp_path, 0, 3))
    metrics.record(answered())
    labels = {"model_name": "m", "tenant": "alice", "backend": "b0", "outcome": "ok"}
    assert value(registry, "requests_total", **labels) == 24
    assert value(registry, "request_seconds_sum", model_name="m", backend="b0") == 48
    assert value(registry, "requests_in_flight") == 2, "of slot 1, what its first process held is gone"


def test_rows_survive_a_death_half_way(tmp_path: Path) -> None:
    rows = CounterRows(tmp_path / "rows")
    first = rows.place(("a", "x"), 2)
    assert first is not None
    rows.values[first] = 1.5
    rows._memory[rows._end : rows._end + 64] = b"\xff" * 64  # a row begun; the end not moved
    again = CounterRows(tmp_path / "rows")
    second = again.place(("b",), 3)
    assert second is not None
    again.values[second + 2] += 1.0
    assert again.place(("a", "x"), 2) == first
    assert read_rows(tmp_path / "rows") == again.rows() == {("a", "x"): [1.5, 0.0], ("b",): [0.0, 0.0, 1.0]}


def test_no_room_is_no_row() -> None:
    rows = CounterRows()
    places = [rows.place((str(number),), 20_000) for number in range(20)]
    assert places[0] is not None
    assert places[-1] is None
