"""What a backend's KV cache holds, as its own events tell: which blocks were stored, which were dropped."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from expediter.control.prefix_index import PrefixKeys, continued_keys


class Stored(NamedTuple):
    """Blocks were stored, or were found stored.

    Attributes:
        hashes: the engine's names of them, in the order of the prompt.
        block_tokens: tokens of each.
        parent: name of the block before them; None if they are a prompt's first.
        tokens: their token ids; empty if something else than these tokens decides what is in them (an image, an
            adapter, a salt), so that they say nothing about plain prompts.
    """

    hashes: tuple[Hashable, ...]
    block_tokens: int
    parent: Hashable = None
    tokens: tuple[int, ...] = ()


class Removed(NamedTuple):
    """Blocks were dropped."""

    hashes: tuple[Hashable, ...]


class Cleared(NamedTuple):
    """All blocks were dropped."""


KvEvent = Stored | Removed | Cleared


@dataclass(slots=True)
class News:
    """What a batch of events changes.

    Attributes:
        is_lost: everything that was held before is gone.
        has_dropped: something is gone.
        stored: prefixes that are held now, by their numbers.
        dropped: prefixes whose last block is gone.
    """

    is_lost: bool = False
    has_dropped: bool = False
    stored: list[PrefixKeys] = field(default_factory=list)
    dropped: PrefixKeys = field(default_factory=list)


class _Block(NamedTuple):
    """One block that is held.

    Attributes:
        keys: of the prefixes that end in it; empty if it is not known whose it is.
        num_before: index blocks of its prompt up to its end.
    """

    num_tokens: int
    keys: PrefixKeys
    num_before: int


_UNKNOWN = _Block(0, [], 0)


class CacheContents:
    """Follows one backend's numbered batches of events.

    Args:
        key_tokens: tokens per block of the index that prefixes are numbered for.
    Attributes:
        root: number of the empty prefix there; None as long as prefixes need no numbers.
        next_number: of the batch that comes next; None before the first.
        is_complete: whether nothing was missed since the cache was empty, so that `num_tokens` is what it holds.
        num_tokens: in the blocks that are known.
    """

    def __init__(self, key_tokens: int = 16) -> None:
        self.root: int | None = None
        self.next_number: int | None = None
        self.is_complete = False
        self.num_tokens = 0
        self._key_tokens = key_tokens
        self._blocks: dict[Hashable, _Block] = {}

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
            news = self._take(events)
            news.is_lost = True
            return news
        if number == 0:
            self.is_complete = True
        elif self.misses(number):
            # What was dropped meanwhile is not known: better to know too little than to believe in what is gone.
            self._forget()
        self.next_number = number + 1
        return self._take(events)

    def _take(self, events: list[KvEvent]) -> News:
        news = News()
        for event in events:
            match event:
                case Stored():
                    self._store(event, news)
                case Removed(hashes):
                    for each in hashes:
                        block = self._blocks.pop(each, _UNKNOWN)
                        self.num_tokens -= block.num_tokens
                        news.dropped += block.keys
                    news.has_dropped = True
                case Cleared():
                    self._forget()
                    self.is_complete = True
                    news = News(is_lost=True)
        return news

    def _store(self, event: Stored, news: News) -> None:
        keys, num_before = self._numbers(event)
        per_block = event.block_tokens // self._key_tokens
        for place, name in enumerate(event.hashes):
            known = self._blocks.get(name, _UNKNOWN)
            end = (place + 1) * per_block
            # What is known of a block's place stays, if it is only found again.
            own = keys[place * per_block : end] or known.keys
            block = _Block(event.block_tokens, own, num_before + end if keys else known.num_before)
            self.num_tokens += block.num_tokens - known.num_tokens
            self._blocks[name] = block
        if keys:
            news.stored.append(keys)

    def _numbers(self, event: Stored) -> tuple[PrefixKeys, int]:
        """Return the numbers of the prefixes that end in stored blocks, and the index blocks before them."""
        if self.root is None or len(event.tokens) != event.block_tokens * len(event.hashes):
            return [], 0
        if event.block_tokens % self._key_tokens:
            return [], 0
        key, num_before = self.root, 0
        if event.parent is not None:
            parent = self._blocks.get(event.parent, _UNKNOWN)
            if not parent.keys:
                return [], 0
            key, num_before = parent.keys[-1], parent.num_before
        return continued_keys(np.array(event.tokens, np.int32), key, num_before, self._key_tokens), num_before

    def _forget(self) -> None:
        self._blocks.clear()
        self.num_tokens = 0
        self.is_complete = False
