"""Prometheus metrics of what the scheduler decided, and of what came of it per SLO class and tenant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from expediter.core.events import Admitted, Finished, FirstToken, Preempted, Queued, Rejected
from expediter.core.explanation import Reason
from expediter.core.request import FinishReason
from expediter.core.slo import Slo

_LABELS: Final = ("model_name", "engine")
_SHARE_BUCKETS: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99, 1.0)
_WAITING: Final = tuple(
    reason.value
    for reason in Reason
    if reason not in (Reason.FORWARDED, Reason.INTERRUPTED, Reason.PREFILLING, Reason.DECODING)
    and reason not in (Reason.REJECTED, Reason.ENDED)
)

DecisionEvent = Queued | Rejected | Admitted | Preempted | FirstToken | Finished


@dataclass(slots=True)
class _Live:
    """What a request that has not ended will be judged by."""

    arrival_s: float
    tenant: str
    slo_class: str
    slo: Slo
    first_token_s: float | None = None


class DecisionMetrics:
    """The metrics of one server, in its registry; `for_replica` makes what feeds them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.live: dict[str, _Live] = {}

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, (*_LABELS, *labels), registry=registry)

        self.waiting = Gauge(
            "expediter:num_requests_waiting_by_reason",
            "Waiting requests by what held them when the last step was planned.",
            (*_LABELS, "reason"),
            registry=registry,
        )
        self.held = counter("expediter:request_held_seconds", "Waiting of started requests by what held it.", "reason")
        self.budget = Histogram(
            "expediter:step_budget_used_share",
            "Share of the token budget used, of steps that computed prompts.",
            _LABELS,
            buckets=_SHARE_BUCKETS,
            registry=registry,
        )
        # Gauges that only rise: the replica keeps the sums, and a restarted one begins anew.
        self.step_times = {
            kind: Gauge(f"expediter:step_seconds_{kind}_sum", text, _LABELS, registry=registry)
            for kind, text in (
                ("actual", "Duration of the steps that the step-time model was compared with."),
                ("predicted", "What it had predicted of them."),
                ("error", "Sum of the absolute differences."),
            )
        }
        self.preemptions = counter("expediter:preemptions_by_cause", "Preemptions by what needed the room.", "cause")
        self.queries = counter("expediter:tenant_prompt_tokens", "Prompt tokens at first admission.", "tenant")
        self.hits = counter("expediter:tenant_cached_tokens", "Those of them found in the prefix cache.", "tenant")
        self.judged = counter(
            "expediter:request_slo",
            "Ended requests by whether they met their targets; its rate with met=true is the goodput.",
            *("slo_class", "tenant", "met"),
        )

    def for_replica(self, *labels: str) -> ReplicaDecisions:
        """Return what records one replica's events; the labels are the model's name and the replica's number."""
        return ReplicaDecisions(self, labels)


class ReplicaDecisions:
    """Records one replica's events; what it keeps of a request is dropped at its end."""

    def __init__(self, server: DecisionMetrics, labels: tuple[str, ...]) -> None:
        self._server = server
        self._labels = labels
        self._live = server.live
        self._waiting = {reason: server.waiting.labels(*labels, reason) for reason in _WAITING}
        self._budget = server.budget.labels(*labels)

    def record(self, event: DecisionEvent) -> None:
        """Count one event; their order per request must be that of `core.events`."""
        match event:
            case Queued():
                self._live[event.request_id] = _Live(event.now_s, event.tenant, event.slo_class, event.slo)
            case Admitted():
                self._admitted(event)
            case FirstToken():
                if (live := self._live.get(event.request_id)) is not None:
                    live.first_token_s = event.now_s
            case Preempted():
                self._server.preemptions.labels(*self._labels, event.cause.value).inc()
            case Rejected():
                if (live := self._live.pop(event.request_id, None)) is not None:
                    self._judge(live, met=False)
            case Finished():
                self._finished(event)

    def record_step(self, num_prefill_tokens: int, num_tokens: int, budget_tokens: int) -> None:
        """Count a step; one without prompts says nothing of the budget."""
        if num_prefill_tokens and budget_tokens:
            self._budget.observe(num_tokens / budget_tokens)

    def set_waiting(self, by_reason: Mapping[str, int]) -> None:
        """Show what holds the waiting requests at this moment."""
        for reason, gauge in self._waiting.items():
            gauge.set(by_reason.get(reason, 0))

    def set_step_times(self, actual_s: float, predicted_s: float, error_s: float) -> None:
        """Show the replica's sums over the steps that its step-time model was compared with."""
        for kind, seconds in (("actual", actual_s), ("predicted", predicted_s), ("error", error_s)):
            self._server.step_times[kind].labels(*self._labels).set(seconds)

    def _admitted(self, event: Admitted) -> None:
        for reason, seconds in event.held_s.items():
            self._server.held.labels(*self._labels, reason).inc(seconds)
        live = self._live.get(event.request_id)
        if live is not None and not event.resumed:
            self._server.queries.labels(*self._labels, live.tenant).inc(event.num_known_tokens)
            self._server.hits.labels(*self._labels, live.tenant).inc(event.num_cached_tokens)

    def _finished(self, event: Finished) -> None:
        live = self._live.pop(event.request_id, None)
        if live is None or event.reason is FinishReason.ABORT:
            return  # who leaves is not judged
        if event.reason is FinishReason.ERROR or live.first_token_s is None:
            self._judge(live, met=False)
            return
        num_gaps = event.num_output_tokens - 1
        tpot_s = (event.now_s - live.first_token_s) / num_gaps if num_gaps > 0 else None
        ttft_s, e2e_s = live.first_token_s - live.arrival_s, event.now_s - live.arrival_s
        self._judge(live, met=live.slo.is_met(ttft_s, tpot_s, e2e_s))

    def _judge(self, live: _Live, *, met: bool) -> None:
        self._server.judged.labels(*self._labels, live.slo_class, live.tenant, str(met).lower()).inc()
