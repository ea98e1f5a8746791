"""Why a request was slow, in a sentence."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from expediter.core.errors import CapacityError
from expediter.core.explanation import Reason
from expediter.gateway.explanations import Explanations
from expediter.telemetry.exchanges import ExchangeRecord, Outcome

_NOT_WAITING: Final = frozenset(
    reason.value
    for reason in (Reason.ROUTED, Reason.FORWARDED, Reason.DECODING, Reason.ENDED, Reason.REJECTED, Reason.PREFILLING)
)
_WORTH_TELLING_S: Final = 0.001
_MAX_KEPT: Final = 1024
_ENDINGS: Final = {
    Outcome.NO_CAPACITY: "refused: nobody could take it",
    Outcome.LATE: "refused: it could not have been in time",
    Outcome.EXPIRED: "its deadline passed while it waited",
    Outcome.FAILED: "failed, and nobody could take over",
    Outcome.CLIENT_GONE: "the client left",
}
_BROKEN: Final = "it broke off after its answer had begun, so that nobody could take over"


class SlowReasons:
    """Says why requests were slow; asks the server's own replicas about theirs, once each."""

    def __init__(self, explanations: Explanations) -> None:
        self._explanations = explanations
        self._replica_told: OrderedDict[str, str] = OrderedDict()

    async def of(self, record: ExchangeRecord) -> str:
        """Return a sentence; it holds numbers and names of backends, never what a client wrote."""
        parts = [missed_targets(record), *at_gateway(record), await self._at_replica(record)]
        return "; ".join(filter(None, parts)) or "nothing held it"

    async def _at_replica(self, record: ExchangeRecord) -> str:
        known = self._replica_told.get(record.request_id)
        if known is not None:
            return known
        try:
            told = longest_wait(await self._explanations.own_entries(record))
        except CapacityError:
            return ""  # the replica is busy; the next look asks again
        self._replica_told[record.request_id] = told
        while len(self._replica_told) > _MAX_KEPT:
            self._replica_told.popitem(last=False)
        return told


def missed_targets(record: ExchangeRecord) -> str:
    """Return which targets an answered request missed, and by how much; "" if it missed none.

    What was late need not be its first token, which is what the rest of the sentence is about.
    """
    if record.outcome is not Outcome.OK:
        return ""
    times = (
        (record.ttft_s, record.slo.ttft_s, "until the first token"),
        (record.tpot_s, record.slo.tpot_s, "per output token"),
        (record.e2e_s, record.slo.e2e_s, "until the end"),
    )
    missed = [
        f"{_in_digits(took_s)} {of} (target {_in_digits(target_s)})"
        for took_s, target_s, of in times
        if took_s is not None and target_s is not None and took_s > target_s
    ]
    return f"late: {', '.join(missed)}" if missed else ""


def at_gateway(record: ExchangeRecord) -> list[str]:
    """Return what the gateway knows of a request's way, in order."""
    parts = []
    queued, failed_s = _in_queue(record), math.inf
    for attempt in record.attempts:
        if queued and record.left_queue_s == attempt.dispatched_s:
            parts.append(queued)
        elif attempt.dispatched_s - failed_s >= _WORTH_TELLING_S:
            parts.append(f"{_seconds(attempt.dispatched_s - failed_s)} until the next attempt")
        if attempt.failure is not None:
            lost_s = attempt.ended_s - attempt.dispatched_s
            parts.append(f"{_seconds(lost_s)} lost at {attempt.backend}: {attempt.failure}")
        failed_s = attempt.ended_s
    if queued and record.left_queue_s == record.ended_s:
        parts.append(queued)
    if record.attempts and record.attempts[-1].failure is None:
        parts.append(_at_backend(record))
    if record.outcome in _ENDINGS:
        code = f" ({record.error_code})" if record.error_code else ""
        has_begun = record.outcome is Outcome.FAILED and record.first_byte_s is not None
        parts.append(f"{_BROKEN if has_begun else _ENDINGS[record.outcome]}{code}")
    return parts


def _in_queue(record: ExchangeRecord) -> str:
    queue_s, behind = record.queue_s or 0.0, record.queued_behind_requests
    if queue_s < _WORTH_TELLING_S:
        return ""
    whom = f" behind {behind} request{'s' if behind != 1 else ''}" if behind else ""
    return f"{_seconds(queue_s)} in the gateway's queue{whom}, no backend being free"


def longest_wait(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return what held one of a request's sequences longest on its replica; "" if nothing did."""
    waits = [
        (span["to_s"] - span["from_s"], span["text"])
        for entry in entries
        for span in entry["spans"]
        if span["to_s"] is not None and span["reason"] not in _NOT_WAITING
    ]
    held_s, text = max(waits, default=(0.0, ""))
    return f"there {_seconds(held_s)}: {text}" if held_s >= _WORTH_TELLING_S else ""


def _at_backend(record: ExchangeRecord) -> str:
    last = record.attempts[-1]
    if record.first_byte_s is None:
        return f"{_seconds(last.ended_s - last.dispatched_s)} at {last.backend}, without an answer"
    until = "until the first token" if record.is_stream else "until the answer"
    took = f"{_seconds(record.first_byte_s - last.dispatched_s)} at {last.backend} {until}"
    if record.predicted_ttft_s is not None and record.is_stream:
        took = f"{took}, where {_seconds(record.predicted_ttft_s)} were expected"
    return took


def _in_digits(seconds: float) -> str:
    """Three digits: a target that was missed by little is not shown as met."""
    return f"{seconds * 1000:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 0.9995 else f"{seconds:.2f} s"
