"""Why requests were sent where they were, for who asks later."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from expediter.control.routing.base import Decision, Placement
from expediter.core.explanation import Detail, Reason, Span
from expediter.core.request import Request


class RoutingNotes:
    """The newest decisions, by request.

    Args:
        max_notes: decisions kept.
    """

    def __init__(self, max_notes: int) -> None:
        self._max_notes = max_notes
        self._spans: OrderedDict[str, Span] = OrderedDict()

    def note(self, requests: Iterable[Request], decision: Decision, now_s: float) -> None:
        """Keep a decision for all sequences of a request."""
        span = span_of(decision, now_s)
        for request in requests:
            self._spans[request.request_id] = span
        while len(self._spans) > self._max_notes:
            self._spans.popitem(last=False)

    def before(self, request_id: str, spans: tuple[Span, ...]) -> tuple[Span, ...]:
        """Return what was told of a request, and before it why it was sent where it was, if that is still known."""
        span = self._spans.get(request_id)
        return spans if span is None else (span, *spans)


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
