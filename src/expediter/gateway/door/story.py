"""What has become of one request at the door so far, and the record that is made of it."""

from __future__ import annotations

from typing import Final

from expediter.gateway.backends.backend import Dispatch
from expediter.gateway.backends.dispatcher import Chosen
from expediter.gateway.door.heads import OWN_ID
from expediter.gateway.door.usage import Answered
from expediter.gateway.http.reply import Reply
from expediter.gateway.http.wire import HttpRequest, repeatable
from expediter.gateway.terms import Terms
from expediter.telemetry.exchanges import Attempt, ExchangeRecord, Outcome
from expediter.telemetry.trace_context import TraceContext

_NO_TERMS: Final = Terms()
_CLIENT_ID: Final = b"x-request-id"


class Story:
    """Written by its exchange as things happen.

    Attributes:
        request_id: the door's. `own_id`: the same in bytes.
        shown_id: what the client is told: its own id, or the door's.
        chosen: the last choice of a backend.
        attempts: those that have ended.
        first_byte_s, queued_s, queued_behind, trace: as in `ExchangeRecord`; the third in requests and tokens.
        span_id: of the attempt under way, None if no trace is kept.
    """

    __slots__ = (
        "_client_id",
        "_reply",
        "_request",
        "_tenant",
        "attempts",
        "chosen",
        "first_byte_s",
        "is_stream",
        "model",
        "own_id",
        "queued_behind",
        "queued_s",
        "request_id",
        "shown_id",
        "span_id",
        "terms",
        "trace",
    )

    def __init__(self, request_id: str, request: HttpRequest, reply: Reply, tenant: str) -> None:
        self.request_id = request_id
        self.own_id = request_id.encode("ascii")
        fields = request.fields
        client_id = repeatable(fields[_CLIENT_ID]) if _CLIENT_ID in fields else None
        # Of another Expediter's door, which asks by it later.
        outer_id = repeatable(fields[OWN_ID]) if OWN_ID in fields else None
        self.shown_id = client_id or self.own_id
        self._client_id = outer_id or client_id
        self._request = request
        self._reply = reply
        self._tenant = tenant
        self.model = ""
        self.is_stream = False
        self.terms = _NO_TERMS
        self.attempts: tuple[Attempt, ...] = ()
        self.chosen: Chosen | None = None
        self.first_byte_s: float | None = None
        self.queued_s: float | None = None
        self.queued_behind = (0, 0)
        self.trace: TraceContext | None = None
        self.span_id: int | None = None

    def attempted(self, dispatch: Dispatch, now_s: float, failure: str | None = None) -> None:
        """Add an attempt that has ended."""
        self.attempts += (self._attempt(dispatch, now_s, failure),)

    def _attempt(self, dispatch: Dispatch, now_s: float, failure: str | None) -> Attempt:
        return Attempt(
            backend=dispatch.backend.name,
            dispatched_s=dispatch.at_s,
            ended_s=now_s,
            failure=failure,
            span_id=self.span_id,
        )

    def num_tokens(self, answered: Answered | None, num_counted: int) -> tuple[int, int]:
        """Return prompt and output tokens, as the backend said or as well as can be told from sizes.

        Args:
            num_counted: tokens of the prompt as the door counts them.
        """
        if answered is not None and answered.usage is not None:
            return answered.usage.num_prompt_tokens, answered.usage.num_output_tokens
        if self.first_byte_s is None:
            return 0, 0
        return num_counted, 0 if answered is None else answered.num_output_tokens(is_stream=self.is_stream)

    def so_far(self, dispatch: Dispatch | None, now_s: float) -> ExchangeRecord:
        """Return what there is to say of it while it goes on."""
        attempts = self.attempts
        if dispatch is not None:
            attempts = (*attempts, self._attempt(dispatch, now_s, None))
        return self._record(attempts, 0, Outcome.OPEN, now_s, None, None, (0, 0))

    def told(
        self,
        status: int,
        outcome: Outcome,
        now_s: float,
        code: str | None,
        answered: Answered | None,
        num_tokens: tuple[int, int],
    ) -> ExchangeRecord:
        """Return the record of an exchange that has ended."""
        return self._record(self.attempts, status, outcome, now_s, code, answered, num_tokens)

    def _record(
        self,
        attempts: tuple[Attempt, ...],
        status: int,
        outcome: Outcome,
        now_s: float,
        code: str | None,
        answered: Answered | None,
        num_tokens: tuple[int, int],
    ) -> ExchangeRecord:
        request, chosen, terms, client_id = self._request, self.chosen, self.terms, self._client_id
        usage = None if answered is None else answered.usage
        return ExchangeRecord(
            request_id=self.request_id,
            client_request_id=None if client_id is None else client_id.decode("ascii"),
            tenant=self._tenant,
            model=self.model,
            path=request.path,
            is_stream=self.is_stream,
            slo_class=terms.slo_class,
            slo=terms.slo,
            arrived_s=request.arrived_s,
            queued_s=self.queued_s,
            queued_behind_requests=self.queued_behind[0],
            queued_behind_tokens=self.queued_behind[1],
            dispatched_s=attempts[-1].dispatched_s if attempts else None,
            first_byte_s=self.first_byte_s,
            ended_s=now_s,
            attempts=attempts,
            route=None if chosen is None else chosen.decision,
            status=status,
            outcome=outcome,
            error_code=code,
            num_prompt_tokens=num_tokens[0],
            num_output_tokens=num_tokens[1],
            num_cached_tokens=None if usage is None else usage.num_cached_tokens,
            usage_is_exact=usage is not None,
            num_bytes_in=len(request.body),
            num_bytes_out=self._reply.num_bytes if answered is None else answered.num_bytes,
            predicted_ttft_s=None if chosen is None else chosen.predicted_ttft_s,
            trace=self.trace,
        )
