"""What a request's consumer sees: its events, taken in batches by one reader."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from expediter.core.events import Admitted, Finished, Rejected
from expediter.core.plan import TokenLogprobs
from expediter.core.request import Carried, FinishReason, Request


@dataclass(slots=True)
class OutputTokens:
    """Tokens that came since the last `take`, in order. `logprobs` is empty unless asked for, else one per token."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]


StreamItem = Admitted | OutputTokens | Finished | Rejected


@dataclass(slots=True, eq=False)
class RequestStream:
    """One request in flight. The dispatcher pushes and sets `wake`, one task takes.

    What lies here unread is bounded by the request's max_tokens: tokens of several steps are kept as one item.
    After a `Finished` or `Rejected` nothing follows.

    Attributes:
        leader_id: first sequence of the group that it was submitted with.
        replica_id: who has it, or had it last.
        output: all tokens so far: what another replica goes on from if this one is lost.
        num_pending_tokens: of its prompt, as far as not taken to be cached, until the first token comes; the first
            sequence of a group has them all.
        num_resumes: times that it went on at another replica, or at a restarted one.
        retry_after_s: when one that was refused is worth another try.
        abort_reason: as its consumer asked for its end; None as long as it has not.
    """

    request: Request
    leader_id: str
    wake: asyncio.Event
    replica_id: int = -1
    output: list[int] = field(default_factory=list)
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_pending_tokens: int = 0
    num_resumes: int = 0
    retry_after_s: float = 0.0
    abort_reason: FinishReason | None = None
    has_started: bool = False
    _items: list[StreamItem] = field(default_factory=list)

    def push(self, item: Admitted | Finished | Rejected) -> None:
        if isinstance(item, Admitted) and not item.resumed:
            self.num_cached_tokens = item.num_cached_tokens
            self.first_scheduled_s = item.now_s
        self.has_started = True
        self._items.append(item)
        self.wake.set()

    def push_tokens(self, tokens: list[int], logprobs: TokenLogprobs | None) -> None:
        self.output += tokens
        if not self._items or not isinstance(self._items[-1], OutputTokens):
            self._items.append(OutputTokens([], []))
        last = self._items[-1]
        assert isinstance(last, OutputTokens)
        last.tokens += tokens
        if logprobs is not None:
            last.logprobs.append(logprobs)
        self.wake.set()

    @property
    def rejection(self) -> Rejected | None:
        """The event by which it was refused, unless it was taken."""
        return next((item for item in self._items if isinstance(item, Rejected)), None)

    def take(self) -> list[StreamItem]:
        """Return what has come since the last call; never waits (`wake` is for that)."""
        items, self._items = self._items, []
        return items

    def carried(self) -> Carried:
        """Return what another replica has to know to go on with it."""
        return Carried(
            output=tuple(self.output),
            first_scheduled_s=self.first_scheduled_s,
            first_token_s=self.first_token_s,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
        )

    def owed_end(self) -> FinishReason | None:
        """Return how a request ends whose replica is gone before it could say so; None if it has to go on.

        Its consumer asked for its end, or its last token is the last one.
        """
        request, num_output = self.request, len(self.output)
        if self.abort_reason is not None:
            return self.abort_reason
        if num_output and self.output[-1] in request.stop_token_ids and num_output >= request.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_output >= request.max_tokens else None

    def ended(self, now_s: float, reason: FinishReason) -> Finished:
        """Return the event that ends the request when its replica cannot say so any more."""
        return Finished(
            request_id=self.request.request_id,
            now_s=now_s,
            reason=reason,
            num_prompt_tokens=self.request.num_prompt_tokens,
            num_output_tokens=len(self.output),
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
        )
