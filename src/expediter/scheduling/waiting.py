"""The queue of requests that do not run: a heap by the ordering's key."""

from __future__ import annotations

import heapq

from expediter.core.request import RequestState, Status
from expediter.scheduling.ordering import Ordering

_Entry = tuple[tuple[float, ...], int, RequestState]


class WaitingQueue:
    """Waiting and preempted requests, least key first. O(log n) per change; an abort leaves a stale entry behind.

    Attributes:
        num_tokens: known tokens of all queued requests.
    """

    def __init__(self, ordering: Ordering) -> None:
        self._ordering = ordering
        self._heap: list[_Entry] = []
        self._num_queued = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return self._num_queued

    def push(self, state: RequestState) -> None:
        """Queue a request; its status is WAITING or PREEMPTED."""
        heapq.heappush(self._heap, (self._ordering.key(state), state.sequence, state))
        self._num_queued += 1
        self.num_tokens += state.num_known_tokens

    def pop(self) -> RequestState | None:
        """Take the first request out, or return None if the queue is empty."""
        while self._heap:
            state = heapq.heappop(self._heap)[2]
            if state.status is not Status.FINISHED:
                self._forget(state)
                return state
        return None

    def discard(self, state: RequestState) -> None:
        """Take a queued request out from wherever it stands. Its status must become FINISHED in the same breath."""
        self._forget(state)
        if len(self._heap) > 64 and len(self._heap) > 2 * self._num_queued:
            self._heap = [
                entry for entry in self._heap if entry[2].status is not Status.FINISHED and entry[2] is not state
            ]
            heapq.heapify(self._heap)

    def _forget(self, state: RequestState) -> None:
        self._num_queued -= 1
        self.num_tokens -= state.num_known_tokens
