"""Prometheus metrics of a server, derived from the events of its replicas.

Names are vLLM's where the meaning is the same, so that dashboards and load generators made for it work; each has the
labels `model_name` and `engine`, the latter being the replica's number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from expediter.core.events import (
    Admitted,
    Event,
    Finished,
    FirstToken,
    Preempted,
    Queued,
    Rejected,
    Tokens,
)
from expediter.core.plan import StepFeatures
from expediter.telemetry.decisions import DecisionMetrics

_LABELS: Final = ("model_name", "engine")
_TTFT_BUCKETS_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_ITL_BUCKETS_S: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_BUCKETS_S: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


@dataclass(slots=True)
class _Live:
    """Times of one request that has not ended, in seconds of the replicas' clock."""

    arrival_s: float
    num_prompt_tokens: int = 0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None


class ServerMetrics:
    """All metrics of one server, in a registry of its own.

    Args:
        model_name: value of the label of that name.
    """

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._running = self._gauge("vllm:num_requests_running", "Requests in the running set.")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Requests waiting to be scheduled.")
        self._kv_usage = self._gauge("vllm:kv_cache_usage_perc", "Used share of the KV blocks; 1 means all.")
        self._pending = self._gauge("expediter:num_pending_tokens", "Tokens whose KV is yet to be computed.")
        self._up = self._gauge("expediter:replica_up", "1 while the replica serves.")
        self._restarts = self._counter("expediter:replica_restarts", "Times a replica was started again.")
        self._resumed = self._counter(
            "expediter:requests_resumed", "Requests of a lost replica that went on elsewhere, by the lost one."
        )
        self._queries = self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache, at a request's first admission."
        )
        self._hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found there.")
        self._preemptions = self._counter("vllm:num_preemptions", "Preemptions.")
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of requests that got a first token.")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Output tokens.")
        self._success = self._counter("vllm:request_success", "Ended requests by reason.", "finished_reason")
        self._rejected = self._counter("expediter:request_rejected", "Refused requests by reason.", "reason")
        self._ttft = self._histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", _TTFT_BUCKETS_S)
        self._itl = self._histogram("vllm:inter_token_latency_seconds", "Gap between output tokens.", _ITL_BUCKETS_S)
        self._tpot = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean gap per request after its first token.", _ITL_BUCKETS_S
        )
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", _REQUEST_BUCKETS_S)
        self._queue = self._histogram(
            "vllm:request_queue_time_seconds", "Arrival to first scheduled.", _REQUEST_BUCKETS_S
        )

        self._grammars = Counter(
            "expediter:grammars",
            "Grammars that were compiled for the first time, by outcome: compiled, refused, late or crashed.",
            ("model_name", "outcome"),
            registry=self.registry,
        )
        self._decisions = DecisionMetrics(self.registry)
        # Of all replicas together: a request may go on at another one than where it began.
        self._live: dict[str, _Live] = {}

    def for_replica(self, replica_id: int) -> ReplicaMetrics:
        """Return the sink for the events of one replica."""
        return ReplicaMetrics(self, replica_id)

    def count_grammar(self, outcome: str) -> None:
        """Count a compilation by how it ended."""
        self._grammars.labels(self._model_name, outcome).inc()

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, _LABELS, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, (*_LABELS, *labels), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, _LABELS, buckets=buckets, registry=self.registry)


class ReplicaMetrics:
    """Counts what happens to the requests of one replica; made by `ServerMetrics.for_replica`.

    What is kept per live request is dropped at the request's end, so it does not grow.
    """

    def __init__(self, server: ServerMetrics, replica_id: int) -> None:
        labels = (server._model_name, str(replica_id))
        self._labels = labels
        self._decisions = server._decisions.for_replica(*labels)
        self._live = server._live
        self._success = server._success
        self._rejected = server._rejected
        self._running = server._running.labels(*labels)
        self._waiting = server._waiting.labels(*labels)
        self._kv_usage = server._kv_usage.labels(*labels)
        self._pending = server._pending.labels(*labels)
        self._up = server._up.labels(*labels)
        self._restarts = server._restarts.labels(*labels)
        self._resumed = server._resumed.labels(*labels)
        self._queries = server._queries.labels(*labels)
        self._hits = server._hits.labels(*labels)
        self._preemptions = server._preemptions.labels(*labels)
        self._prompt_tokens = server._prompt_tokens.labels(*labels)
        self._generation_tokens = server._generation_tokens.labels(*labels)
        self._ttft = server._ttft.labels(*labels)
        self._itl = server._itl.labels(*labels)
        self._tpot = server._tpot.labels(*labels)
        self._e2e = server._e2e.labels(*labels)
        self._queue = server._queue.labels(*labels)

    @property
    def num_live(self) -> int:
        """Requests that have not ended, of all replicas of the server."""
        return len(self._live)

    def record(self, events: Iterable[Event]) -> None:
        """Count the events; their order per request must be that of `core.events`."""
        for event in events:
            if not isinstance(event, Tokens):
                self._decisions.record(event)
            match event:
                case Tokens():
                    ids = [state.request_id for state in event.states]
                    self.record_tokens(event.now_s, ids, len(event.tokens))
                case Queued():
                    self._live[event.request_id] = _Live(event.now_s)
                case Admitted():
                    self._admitted(event)
                case FirstToken():
                    self._first_token(event)
                case Preempted():
                    self._preemptions.inc()
                case Finished():
                    self._finished(event)
                case Rejected():
                    self._live.pop(event.request_id, None)
                    self._rejected.labels(*self._labels, event.reason.value).inc()

    def record_tokens(self, now_s: float, request_ids: Sequence[str], num_steps: int = 1) -> None:
        """Count output tokens that came at `now_s`, `num_steps` for each request."""
        self._generation_tokens.inc(num_steps * len(request_ids))
        for request_id in request_ids:
            live = self._live.get(request_id)
            if live is None:
                continue
            if live.last_token_s is not None:
                self._itl.observe(now_s - live.last_token_s)
            live.last_token_s = now_s

    def record_step(self, features: StepFeatures, budget_tokens: int) -> None:
        """Count a step that was executed, with the most tokens that it might have computed."""
        self._decisions.record_step(features.num_prefill_tokens, features.num_tokens, budget_tokens)

    def set_step_times(self, actual_s: float, predicted_s: float, error_s: float) -> None:
        """Show the replica's sums over the steps that its step-time model was compared with."""
        self._decisions.set_step_times(actual_s, predicted_s, error_s)

    def set_gauges(
        self,
        *,
        num_running: int,
        num_waiting: int,
        num_pending_tokens: int,
        num_used_blocks: int,
        num_blocks: int,
        waiting_by_reason: Mapping[str, int] | None = None,
    ) -> None:
        """Show the replica's state of this moment."""
        self._decisions.set_waiting(waiting_by_reason or {})
        self._running.set(num_running)
        self._waiting.set(num_waiting)
        self._pending.set(num_pending_tokens)
        self._kv_usage.set(num_used_blocks / max(num_blocks, 1))

    def set_up(self, up: bool) -> None:
        """Show whether the replica serves; one that is down holds nothing."""
        self._up.set(up)
        if not up:
            self.set_gauges(num_running=0, num_waiting=0, num_pending_tokens=0, num_used_blocks=0, num_blocks=1)

    def count_restart(self) -> None:
        self._restarts.inc()

    def count_resume(self) -> None:
        self._resumed.inc()

    def _admitted(self, event: Admitted) -> None:
        if event.resumed:
            return
        self._queries.inc(event.num_known_tokens)
        self._hits.inc(event.num_cached_tokens)
        live = self._live.get(event.request_id)
        if live is not None:
            live.num_prompt_tokens = event.num_known_tokens
            live.first_scheduled_s = event.now_s
            self._queue.observe(max(event.now_s - live.arrival_s, 0.0))

    def _first_token(self, event: FirstToken) -> None:
        live = self._live.get(event.request_id)
        if live is not None:
            live.first_token_s = event.now_s
            self._prompt_tokens.inc(live.num_prompt_tokens)
            self._ttft.observe(max(event.now_s - live.arrival_s, 0.0))

    def _finished(self, event: Finished) -> None:
        live = self._live.pop(event.request_id, None)
        if live is None:
            return  # it ended before, when its replica was lost
        self._success.labels(*self._labels, event.reason.value).inc()
        self._e2e.observe(max(event.now_s - live.arrival_s, 0.0))
        if live.first_token_s is not None and event.num_output_tokens > 1:
            self._tpot.observe((event.now_s - live.first_token_s) / (event.num_output_tokens - 1))
