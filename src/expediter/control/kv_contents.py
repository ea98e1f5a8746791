"""What a backend's KV cache holds, as its own events tell: which blocks were stored, which were dropped."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple


class Stored(NamedTuple):
    """Blocks were stored, or were found stored.

    Attributes:
        hashes: the engine's names of them, in the order of the prompt.
        block_tokens: tokens of each.
    """

    hashes: tuple[Hashable, ...]
    block_tokens: int


class Removed(NamedTuple):
    """Blocks were dropped."""

    hashes: tuple[Hashable, ...]


class Cleared(NamedTuple):
    """All blocks were dropped."""


KvEvent = Stored | Removed | Cleared


class News(NamedTuple):
    """What a batch of events changes.

    Attributes:
        is_lost: everything that was held before is gone.
        has_dropped: something is gone.
    """

    is_lost: bool = False
    has_dropped: bool = False


class CacheContents:
    """Follows one backend's numbered batches of events.

    Attributes:
        next_number: of the batch that comes next; None before the first.
        is_complete: whether nothing was missed since the cache was empty, so that `num_tokens` is what it holds.
        num_tokens: in the blocks that are known.
    """

    def __init__(self) -> None:
        self.next_number: int | None = None
        self.is_complete = False
        self.num_tokens = 0
        self._blocks: dict[Hashable, int] = {}

    def misses(self, number: int) -> bool:
        """Return whether batches are missing before this one, which may be had again."""
        return number > (self.next_number or 0)

    def apply(self, number: int, events: list[KvEvent]) -> News:
        """Take in a batch. One that came already changes nothing; one from before says that the engine began anew."""
        if self.next_number is not None and number < self.next_number:
            if number > 0:
                return News()
            self._forget()
            self.is_complete = True
            self.next_number = 1
            return News(is_lost=True, has_dropped=self._take(events).has_dropped)
        if number == 0:
            self.is_complete = True
        elif self.misses(number):
            # What was dropped meanwhile is not known: better to know too little than to believe in what is gone.
            self._forget()
        self.next_number = number + 1
        return self._take(events)

    def _take(self, events: list[KvEvent]) -> News:
        is_lost = has_dropped = False
        for event in events:
            match event:
                case Stored(hashes, block_tokens):
                    for each in hashes:
                        self.num_tokens += block_tokens - self._blocks.get(each, 0)
                        self._blocks[each] = block_tokens
                case Removed(hashes):
                    for each in hashes:
                        self.num_tokens -= self._blocks.pop(each, 0)
                    has_dropped = True
                case Cleared():
                    self._forget()
                    self.is_complete = is_lost = True
        return News(is_lost, has_dropped)

    def _forget(self) -> None:
        self._blocks.clear()
        self.num_tokens = 0
        self.is_complete = False
