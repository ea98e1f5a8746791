"""A heap whose members can leave from the middle."""

from __future__ import annotations

import heapq
from typing import Generic, Protocol, TypeVar

Key = tuple[float, ...]
"""Sort key, least first. All keys of one heap have the same length."""


class Member(Protocol):
    """What a heap holds."""

    @property
    def sequence(self) -> int:
        """Unique number within a heap, in order of arrival."""
        ...


MemberT = TypeVar("MemberT", bound=Member)


class LazyHeap(Generic[MemberT]):
    """Members by key; ties go to the lower sequence number.

    A member that leaves, or whose key changes, leaves a dead entry behind, which is dropped when it surfaces or when
    the dead outnumber the living. O(log n) per change, amortized.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Key, int, int, MemberT]] = []
        self._tickets: dict[int, int] = {}
        self._next_ticket = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, member: MemberT) -> bool:
        return member.sequence in self._tickets

    def put(self, member: MemberT, key: Key) -> None:
        """Add a member, or give one another key."""
        self._tickets[member.sequence] = self._next_ticket
        heapq.heappush(self._entries, (key, member.sequence, self._next_ticket, member))
        self._next_ticket += 1
        if len(self._entries) > 64 + 2 * len(self._tickets):
            self._entries = [entry for entry in self._entries if self._tickets.get(entry[1]) == entry[2]]
            heapq.heapify(self._entries)

    def remove(self, member: MemberT) -> bool:
        """Take a member out; return whether it was in."""
        return self._tickets.pop(member.sequence, None) is not None

    def first(self) -> tuple[Key, MemberT] | None:
        """Return the least key and its member, or None if the heap is empty."""
        while self._entries:
            key, sequence, ticket, member = self._entries[0]
            if self._tickets.get(sequence) == ticket:
                return key, member
            heapq.heappop(self._entries)
        return None
