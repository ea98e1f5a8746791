"""Why requests were sent where they were, for who asks later."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace

from expediter.control.routing.base import Decision, Placement
from expediter.core.explanation import Detail, Reason, Span
from expediter.core.request import Request


class RoutingNotes:
    """The newest decisions, by request, and the losses of replicas between them.

    Args:
        max_notes: requests whose decisions are kept.
    """

    def __init__(self, max_notes: int) -> None:
        self._max_notes = max_notes
        self._spans: OrderedDict[str, tuple[Span, ...]] = OrderedDict()

    def note(self, requests: Iterable[Request], decision: Decision, now_s: float) -> None:
        """Keep a decision for all sequences of a request."""
        span = span_of(decision, now_s)
        for request in requests:
            self._append(request.request_id, span)

    def interrupted(self, request_id: str, replica_id: int, num_output_tokens: int, now_s: float) -> None:
        """Keep that a request's replica was lost; its next decision ends the wait."""
        details: dict[str, Detail] = {"replica": replica_id, "output_tokens": num_output_tokens}
        self._append(request_id, Span(now_s, None, Reason.INTERRUPTED, details))

    def _append(self, request_id: str, span: Span) -> None:
        """Add a span, which ends the one before that holds still."""
        earlier = self._spans.pop(request_id, ())
        if earlier and earlier[-1].to_s is None:
            earlier = (*earlier[:-1], replace(earlier[-1], to_s=span.from_s))
        self._spans[request_id] = (*earlier, span)
        while len(self._spans) > self._max_notes:
            self._spans.popitem(last=False)

    def before(self, request_id: str, spans: tuple[Span, ...]) -> tuple[Span, ...]:
        """Return what was told of a request, and before it how it came there, as far as that is still known."""
        return (*self._spans.get(request_id, ()), *spans)

    def while_interrupted(self, request_id: str) -> tuple[Span, ...] | None:
        """Return what is known of a request that waits for a replica; None if it does not."""
        spans = self._spans.get(request_id)
        return spans if spans and spans[-1].to_s is None else None


def span_of(decision: Decision, now_s: float) -> Span:
    """Return a decision as the first entry of an explanation."""
    if not isinstance(decision, Placement):
        return Span(now_s, now_s, Reason.REJECTED, {"cause": decision.message})
    details: dict[str, Detail] = {"replica": decision.replica_id, "because": decision.because}
    if decision.decode_id not in (None, decision.replica_id):
        details["decode_replica"] = decision.decode_id
    for rank, candidate in enumerate(decision.candidates, 1):
        details[f"replica_{rank}"] = candidate.replica_id
        details[f"cost_{rank}"] = candidate.cost
        details[f"cached_tokens_{rank}"] = candidate.num_cached_tokens
    return Span(now_s, now_s, Reason.ROUTED, details)
