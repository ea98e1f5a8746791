"""The application behind the main listener: who may come in, and which way a request goes.

Requests for a model become exchanges; everything else is answered by an ordinary ASGI application in this process.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final, NamedTuple, Protocol

from starlette.types import ASGIApp

from expediter.control.health import Failure
from expediter.gateway.backends.backend import Backend
from expediter.gateway.door import refusals
from expediter.gateway.door.drain import Drain
from expediter.gateway.door.exchange import Exchange
from expediter.gateway.door.parts import DoorParts
from expediter.gateway.errors import ApiError, over_limit
from expediter.gateway.http.asgi import AsgiCall
from expediter.gateway.http.reply import Answer, Reply
from expediter.gateway.http.wire import HttpRequest
from expediter.gateway.tenants import Tenant, TenantBook, Tenants
from expediter.telemetry.exchanges import ExchangeRecord
from expediter.telemetry.late_records import LateRecords

OPEN_PATHS: Final = frozenset({"/health", "/ready"})
"""Those that say only whether the server is there; all others need a key, whether they exist or not."""
MODEL_PATHS: Final = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"),
        *("/v1/messages", "/v1/messages/count_tokens"),
        *("/v1/rerank", "/v1/score", "/rerank", "/score", "/pooling", "/classify", "/tokenize", "/detokenize"),
    }
)
"""Paths whose POST is for a model and may be answered by any backend that serves it."""
_SWEEP_S: Final = 0.1
_CLIENT: Final = "client"
_LARGE_BYTES: Final = 100_000
"""Of a body that is worth a look at its tenant's limits before it is read; so is one that does not say its length."""


class Counts(Protocol):
    """Shows how many requests are under way, and how many had no key."""

    def entered(self) -> None: ...

    def left(self) -> None: ...

    def unauthorized(self) -> None: ...


class _KnownClient(NamedTuple):
    """Whose requests with the same head are, in this book of tenants."""

    book: TenantBook
    tenant: Tenant | None


class Door:
    """Answers all requests of the main listener.

    Args:
        app: answers what is not for a model.
        records: hear of each exchange that has ended.
    """

    def __init__(
        self,
        parts: DoorParts,
        tenants: Tenants,
        drain: Drain,
        app: ASGIApp,
        counts: Counts,
        records: LateRecords,
    ) -> None:
        self._parts = parts
        self._tenants = tenants
        self._drain = drain
        self._app = app
        self._counts = counts
        self._records = records
        self._live: dict[str, Exchange] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        hooks = parts.backends.hooks
        hooks.on_room = parts.room.call_soon
        hooks.on_ejected = self._ejected
        hooks.on_gone = self._gone
        hooks.can_retry = parts.budget.has_retry

    def start(self) -> None:
        """Begin to watch the time."""
        self._sweep()

    def stop(self) -> None:
        """End what is left with errors, and close the connections to backends."""
        self.end_exchanges()
        self._records.settle()
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._parts.pools.close_all()

    # ---- requests

    def admit(self, request: HttpRequest) -> Answer | None:
        """Refuse who has no key, new work while draining, and large bodies of who is over its limits anyway."""
        tenant = None
        if request.path not in OPEN_PATHS:
            request.context = tenant = self._tenant(request)
            if tenant is None:
                self._counts.unauthorized()
                return self._refusal(request, refusals.no_key())
        if request.method != "POST":
            return None
        if self._drain.is_draining:
            return self._refusal(request, refusals.shutting_down(self._drain.retry_after_s))
        is_large = request.length is None or request.length >= _LARGE_BYTES
        if is_large and tenant is not None and request.path in MODEL_PATHS:
            exceeded = self._parts.limits.refusal(tenant.name, request.arrived_s)
            if exceeded is not None:
                return self._turned_away(request, tenant, over_limit(exceeded, tenant.limits))
        return None

    def handle(self, request: HttpRequest, reply: Reply) -> None:
        """Answer a request."""
        tenant = request.context if isinstance(request.context, Tenant) else None
        if request.method != "POST":
            self._ask_app(request, reply, tenant)
            return
        self._drain.enter()
        if tenant is not None and request.path in MODEL_PATHS:
            exchange = Exchange(self._parts, request, reply, tenant, self._ended)
            self._live[exchange.request_id] = exchange
            self._counts.entered()
            exchange.begin()
        else:
            self._ask_app(request, reply, tenant).task.add_done_callback(lambda _: self._drain.leave())

    def refuse(self, status: int, message: str, path: str) -> Answer:
        """Return how the server says what is wrong with a request that it cannot take."""
        return refusals.answer(refusals.broken_request(status, message), path=path)

    def _ask_app(self, request: HttpRequest, reply: Reply, tenant: Tenant | None) -> AsgiCall:
        shown_id = request.client_request_id
        extra = () if shown_id is None else ((b"x-request-id", shown_id),)
        failure = refusals.answer(refusals.internal_error(), shown_id, request.path)
        return AsgiCall(self._app, request, reply, failure, extra, {} if tenant is None else {"tenant": tenant})

    def _tenant(self, request: HttpRequest) -> Tenant | None:
        """Return whose a request is; the same head again is whose it was."""
        book = self._tenants.book
        known = request.memory.get(_CLIENT)
        if isinstance(known, _KnownClient) and known.book is book:
            return known.tenant
        if request.repeats(b"authorization") or request.repeats(b"x-api-key"):
            return None
        tenant = self._tenants.of(request.fields.get(b"authorization"), request.fields.get(b"x-api-key"))
        request.memory[_CLIENT] = _KnownClient(book, tenant)
        return tenant

    def _turned_away(self, request: HttpRequest, tenant: Tenant, error: ApiError) -> Answer:
        """Refuse a request whose body is not here yet, and record it as any other."""
        record = ExchangeRecord(
            request_id=self._parts.ids.new(),
            client_request_id=(request.client_request_id or b"").decode("ascii") or None,
            tenant=tenant.name,
            path=request.path,
            arrived_s=request.arrived_s,
            ended_s=time.monotonic(),
            status=error.status,
            outcome=refusals.outcome_of(error.status),
            error_code=refusals.recorded_code(error),
        )
        self._records.record(record)
        return self._refusal(request, error)

    def _refusal(self, request: HttpRequest, error: ApiError) -> Answer:
        return refusals.answer(error, request.client_request_id, request.path)

    # ---- exchanges

    def live(self, tenant: str, name: str) -> list[ExchangeRecord]:
        """Return what there is to say of a tenant's requests under way: by our id, or the client's own."""
        now_s = time.monotonic()
        records = (exchange.record(now_s) for exchange in self._live.values())
        return [one for one in records if one.tenant == tenant and name in (one.request_id, one.client_request_id)]

    def end_exchanges(self) -> None:
        """End all exchanges with foreign backends now, with an error."""
        for exchange in tuple(self._live.values()):
            exchange.end_now(self._drain.retry_after_s)

    def _ended(self, record: ExchangeRecord) -> None:
        del self._live[record.request_id]
        self._counts.left()
        self._drain.leave()
        self._records.record(record)

    def _ejected(self, backend: Backend) -> None:
        """Let those who still wait for a backend that has failed others try elsewhere."""
        for exchange in tuple(self._live.values()):
            exchange.leave(backend, Failure.TIMEOUT)

    def _gone(self, backend: Backend) -> None:
        self._parts.pools.close(backend.replica_id)
        self._parts.patience.forget(backend.replica_id)

    def _sweep(self) -> None:
        now_s = time.monotonic()
        for exchange in tuple(self._live.values()):
            exchange.check(now_s)
        self._parts.room.sweep(now_s)
        self._records.settle()
        self._sweeper = asyncio.get_running_loop().call_later(_SWEEP_S, self._sweep)
