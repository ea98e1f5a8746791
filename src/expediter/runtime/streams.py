"""What a request's consumer sees: its events, taken in batches by one reader."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from expediter.core.events import Admitted, Finished, Rejected
from expediter.core.plan import TokenLogprobs
from expediter.core.request import FinishReason, Request


@dataclass(slots=True)
class OutputTokens:
    """Tokens that came since the last `take`, in order. `logprobs` is empty unless asked for, else one per token."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]


StreamItem = Admitted | OutputTokens | Finished | Rejected


@dataclass(slots=True, eq=False)
class RequestStream:
    """One request in flight. The supervisor pushes and sets `wake`, one task takes.

    What lies here unread is bounded by the request's max_tokens: tokens of several steps are kept as one item.
    After a `Finished` or `Rejected` nothing follows.

    Attributes:
        num_pending_tokens: of its prompt, as far as not taken to be cached, until the first token comes; the first
            sequence of a group has them all.
    """

    request: Request
    replica_id: int
    wake: asyncio.Event
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_pending_tokens: int = 0
    has_started: bool = False
    _items: list[StreamItem] = field(default_factory=list)

    def push(self, item: Admitted | Finished | Rejected) -> None:
        if isinstance(item, Admitted) and not item.resumed:
            self.num_cached_tokens = item.num_cached_tokens
        self.has_started = True
        self._items.append(item)
        self.wake.set()

    def push_tokens(self, tokens: list[int], logprobs: TokenLogprobs | None) -> None:
        self.num_output_tokens += len(tokens)
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

    def lost(self, now_s: float) -> Finished:
        """Return the event that ends the request when its replica cannot say so any more."""
        return Finished(
            request_id=self.request.request_id,
            now_s=now_s,
            reason=FinishReason.ERROR,
            num_prompt_tokens=self.request.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
        )
