"""A heap whose members can leave from the middle."""

from __future__ import annotations

import heapq

from expediter.core.request import RequestState

Key = tuple[float, ...]
"""Sort key, least first. All keys of one heap have the same length."""


class LazyHeap:
    """Requests by key; ties go to the earlier arrival at the scheduler.

    A member that leaves, or whose key changes, leaves a dead entry behind, which is dropped when it surfaces or when
    the dead outnumber the living. O(log n) per change, amortized.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Key, int, int, RequestState]] = []
        self._tickets: dict[int, int] = {}
        self._next_ticket = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, state: RequestState) -> bool:
        return state.sequence in self._tickets

    def put(self, state: RequestState, key: Key) -> None:
        """Add a request, or give a member another key."""
        self._tickets[state.sequence] = self._next_ticket
        heapq.heappush(self._entries, (key, state.sequence, self._next_ticket, state))
        self._next_ticket += 1
        if len(self._entries) > 64 + 2 * len(self._tickets):
            self._entries = [entry for entry in self._entries if self._tickets.get(entry[1]) == entry[2]]
            heapq.heapify(self._entries)

    def remove(self, state: RequestState) -> bool:
        """Take a request out; return whether it was in."""
        return self._tickets.pop(state.sequence, None) is not None

    def first(self) -> tuple[Key, RequestState] | None:
        """Return the least key and its request, or None if the heap is empty."""
        while self._entries:
            key, sequence, ticket, state = self._entries[0]
            if self._tickets.get(sequence) == ticket:
                return key, state
            heapq.heappop(self._entries)
        return None
