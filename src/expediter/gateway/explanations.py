"""Why a request was slow: what held it at the gateway, joined with what its replica says."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import msgspec

from expediter.control.routing.base import Placement
from expediter.core.errors import CapacityError
from expediter.core.explanation import Detail, Reason, Span
from expediter.gateway.recent import RecentRequests
from expediter.gateway.siblings import Siblings
from expediter.runtime.supervisor import Supervisor
from expediter.telemetry.exchanges import Attempt, ExchangeRecord, Outcome

Entry = dict[str, object]
"""One sequence on a replica: `request_id` and `spans`, with times since the first of them began."""


class OwnReplicas(Protocol):
    """The server's own pool."""

    async def entries(self, tenant: str, name: str) -> list[Entry]:
        """Return the sequences that a tenant means by a name; none if it is not known (any more)."""
        ...

    def door_id(self, tenant: str, name: str) -> str:
        """Return what the gateway calls the request that they belong to; "" if that is not known."""
        ...


AskBackend = Callable[[str, str], Awaitable[object]]
"""Returns the JSON that a backend, by its name, has at a path; None if it is no Expediter, or gives none in time."""


class Pool:
    """`OwnReplicas` over the supervisor of the server's replicas."""

    def __init__(self, recent: RecentRequests, supervisor: Supervisor) -> None:
        self._recent = recent
        self._supervisor = supervisor

    def door_id(self, tenant: str, name: str) -> str:
        return self._recent.door_id(tenant, name)

    async def entries(self, tenant: str, name: str) -> list[Entry]:
        told = [(one, await self._supervisor.explain(one)) for one in self._recent.find(tenant, name)]
        return [{"request_id": one, "spans": told_spans(spans, spans[0].from_s)} for one, spans in told if spans]


class Explanations:
    """Answers `GET /requests/{name}`.

    Args:
        siblings: who knows the records of requests, those under way as well.
        own: None if the server has no replicas of its own.
        ask: asks a foreign backend.
        is_own: whether a backend, by its name, is the server's own pool.
    """

    def __init__(
        self,
        siblings: Siblings,
        own: OwnReplicas | None = None,
        ask: AskBackend | None = None,
        is_own: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._siblings = siblings
        self._own = own
        self._ask = ask
        self._is_own = is_own

    async def explain(self, tenant: str, name: str) -> Entry | None:
        """Return what is known of a tenant's requests of this name; None if there are none.

        A name is the gateway's id, the client's X-Request-Id, or, for replicas of this server, the response's id or
        that of one sequence.
        """
        records = await self._siblings.requests(tenant, name)
        entries = [entry for record in records for entry in await self._at_backend(record)]
        if not entries and self._own is not None:
            entries = await self._own.entries(tenant, name)
            door_id = self._own.door_id(tenant, name)
            if entries and door_id and not records:  # the name is of a response, or of one sequence of several
                records = await self._siblings.requests(tenant, door_id)
                entries = [_placed(record, entry) for record in records[:1] for entry in entries] or entries
        if not records and not entries:
            return None
        return {"id": name, "gateway": [_told(record) for record in records], "requests": entries}

    async def _at_backend(self, record: ExchangeRecord) -> list[Entry]:
        """Return what the backend says that had the request last; it knows the request by the gateway's id."""
        if not record.attempts:
            return []
        last = record.attempts[-1]
        if self._is_own(last.backend):
            try:
                entries = await self.own_entries(record)
            except CapacityError as error:  # what the gateway knows is worth telling all the same
                entries = [{"request_id": record.request_id, "spans": [], "error": str(error)}]
        elif self._ask is not None:
            entries = _entries(await self._ask(last.backend, f"/requests/{record.request_id}"))
        else:
            entries = []
        return [_placed(record, entry) for entry in entries]

    async def own_entries(self, record: ExchangeRecord) -> list[Entry]:
        """Return what the server's own replicas say of a request; nothing if it was not theirs.

        Raises:
            CapacityError: a replica did not answer in time.
        """
        if self._own is None or not record.attempts or not self._is_own(record.attempts[-1].backend):
            return []
        return await self._own.entries(record.tenant, record.request_id)


def spans_of(record: ExchangeRecord) -> list[Span]:
    """Return what the gateway did with a request, in order."""
    spans = []
    is_open = record.outcome is Outcome.OPEN
    until_s = record.left_queue_s
    if record.queued_s is not None and until_s is not None:
        waited: dict[str, Detail] = {
            "requests": record.queued_behind_requests,
            "tokens": record.queued_behind_tokens,
            "no_slot_s": until_s - record.queued_s,
        }
        still_waits = is_open and until_s == record.ended_s
        spans.append(Span(record.queued_s, None if still_waits else until_s, Reason.QUEUED, waited))
    for number, attempt in enumerate(record.attempts, 1):
        is_last = number == len(record.attempts)
        if is_last and record.route is not None:
            spans.append(_routed(record.route, record.route_backends, attempt))
        spans.append(_forwarded(record, attempt, is_last=is_last, is_open=is_open))
    if not is_open:
        spans.append(_end(record))
    return sorted(spans, key=lambda span: span.from_s)  # it may have waited between two attempts


def told_spans(spans: Sequence[Span], origin_s: float) -> list[dict[str, object]]:
    """Return spans as JSON, with times since `origin_s`: the server's clock means nothing to a client."""
    return [
        {
            "from_s": span.from_s - origin_s,
            "to_s": None if span.to_s is None else span.to_s - origin_s,
            "reason": span.reason.value,
            "details": span.details,
            "text": span.in_words(),
        }
        for span in spans
    ]


def _placed(record: ExchangeRecord, entry: Entry) -> Entry:
    """Return an entry of the last attempt's backend with where it was, and when it began by the gateway's spans.

    An Expediter behind this one says the same of its own backends.
    """
    if not record.attempts:
        return entry
    last, inner, inner_s = record.attempts[-1], entry.get("backend"), entry.get("from_s")
    backend = f"{last.backend}/{inner}" if isinstance(inner, str) else last.backend
    from_s = last.dispatched_s - record.arrived_s + (inner_s if isinstance(inner_s, float) else 0.0)
    return {**entry, "backend": backend, "from_s": from_s}


def _told(record: ExchangeRecord) -> Entry:
    return {
        "request_id": record.request_id,
        "client_request_id": record.client_request_id,
        "model": record.model,
        "outcome": record.outcome.value,
        "status": record.status,
        "spans": told_spans(spans_of(record), record.arrived_s),
    }


def _routed(route: Placement, names: Sequence[str], attempt: Attempt) -> Span:
    details: dict[str, Detail] = {"replica": attempt.backend, "because": route.because}
    for rank, (name, candidate) in enumerate(zip(names, route.candidates, strict=False), 1):
        details[f"replica_{rank}"] = name
        details[f"cost_{rank}"] = candidate.cost
        details[f"cached_tokens_{rank}"] = candidate.num_cached_tokens
    return Span(attempt.dispatched_s, attempt.dispatched_s, Reason.ROUTED, details)


def _forwarded(record: ExchangeRecord, attempt: Attempt, *, is_last: bool, is_open: bool) -> Span:
    details: dict[str, Detail] = {"backend": attempt.backend}
    if attempt.failure is not None:
        details["failure"] = attempt.failure
    if is_last and record.first_byte_s is not None:
        details["first_byte_s"] = record.first_byte_s - attempt.dispatched_s
    if is_last and record.predicted_ttft_s is not None:
        details["expected_s"] = record.predicted_ttft_s
    return Span(attempt.dispatched_s, None if is_last and is_open else attempt.ended_s, Reason.FORWARDED, details)


def _end(record: ExchangeRecord) -> Span:
    if not record.attempts and record.outcome is not Outcome.OK:
        cause = record.outcome.value.replace("_", " ")
        told: dict[str, Detail] = {"cause": cause if record.error_code is None else f"{cause} ({record.error_code})"}
        return Span(record.ended_s, record.ended_s, Reason.REJECTED, told)
    details: dict[str, Detail] = {"cause": record.outcome.value, "output_tokens": record.num_output_tokens}
    return Span(record.ended_s, record.ended_s, Reason.ENDED, details)


class _Told(msgspec.Struct):
    """What an Expediter behind this one answers: what held the request at its own gateway, and on its replica."""

    gateway: list[dict[str, Any]] = []
    requests: list[dict[str, Any]] = []


def _entries(answer: object) -> list[Entry]:
    """Return the entries of a backend's answer; none if it is no Expediter, whose answer may then be anything."""
    try:
        told = msgspec.convert(answer, _Told)
    except msgspec.ValidationError:
        return []
    return [*told.gateway, *told.requests]
