"""The queue of requests that do not run: an ordering, and the bound on how long it may pass anybody over."""

from __future__ import annotations

import math
from collections.abc import Iterable

from expediter.core.explanation import Detail
from expediter.core.request import RequestState
from expediter.scheduling.lazy_heap import Key, LazyHeap
from expediter.scheduling.ordering.base import Ordering


class WaitingQueue:
    """Waiting and preempted requests in the order in which they are tried.

    The ordering decides, but for who has waited longer than its `max_wait_s` since arrival: they go first, by age.
    So whatever the ordering prefers, a request is behind at most those that were over the bound before it.

    Attributes:
        num_tokens: known tokens of all queued requests.
    """

    def __init__(self, ordering: Ordering) -> None:
        self._ordering = ordering
        self._by_age: LazyHeap[RequestState] = LazyHeap()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._by_age)

    def push(self, state: RequestState, now_s: float) -> None:
        """Queue a request: a new one, or one that was preempted."""
        self._by_age.put(state, (state.request.arrival_s,))
        self._ordering.push(state, now_s)
        self.num_tokens += state.num_known_tokens

    def put_back(self, state: RequestState, now_s: float) -> None:
        """Queue a request again that was removed to be tried, and did not fit."""
        self._by_age.put(state, (state.request.arrival_s,))
        self._ordering.put_back(state, now_s)
        self.num_tokens += state.num_known_tokens

    def first(self, now_s: float) -> RequestState | None:
        """Return the next request to try, or None if the queue is empty."""
        oldest = self._by_age.first()
        if oldest is None:
            return None
        if self.is_over_age(oldest[1], now_s):
            return oldest[1]
        return self._ordering.first(now_s)

    @property
    def oldest(self) -> RequestState | None:
        """The queued request that arrived first."""
        entry = self._by_age.first()
        return None if entry is None else entry[1]

    def remove(self, state: RequestState) -> None:
        """Take a queued request out from wherever it stands."""
        self._by_age.remove(state)
        self._ordering.remove(state)
        self.num_tokens -= state.num_known_tokens

    def is_over_age(self, state: RequestState, now_s: float) -> bool:
        """Return whether a request has waited longer than the ordering's ageing bound."""
        return now_s - state.request.arrival_s > self._ordering.max_wait_s

    def urgency(self, state: RequestState, now_s: float) -> Key:
        """Return the key by which requests compare, queued or with a prompt under way: those over the bound first.

        Without the bound, a prompt under way could lose its budget to new arrivals for ever.
        """
        if self.is_over_age(state, now_s):
            return (0.0, state.request.arrival_s)
        return (1.0, *self._ordering.urgency(state, now_s))

    def place_among(self, state: RequestState, waiting: Iterable[RequestState], now_s: float) -> dict[str, Detail]:
        """Return how many of the waiting requests, and tokens of them, are tried before one of them. O(waiting)."""

        def rank(other: RequestState) -> tuple[Key, int]:
            return self.urgency(other, now_s), other.sequence

        own = rank(state)
        ahead = [other for other in waiting if other is not state and rank(other) < own]
        tokens = sum(other.num_known_tokens for other in ahead)
        place: dict[str, Detail] = {"ahead_requests": len(ahead), "ahead_tokens": tokens}
        return place | {"over_age": True} if self.is_over_age(state, now_s) else place

    def next_change_s(self, now_s: float) -> float:
        """Return when the order changes by age alone, at the earliest; infinity if it never does.

        Who is over the bound and does not fit blocks the queue, so nothing behind it matters.
        """
        oldest = self._by_age.first()
        if oldest is None or self.is_over_age(oldest[1], now_s):
            return math.inf
        return oldest[0][0] + self._ordering.max_wait_s
