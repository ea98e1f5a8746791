"""Parts of a trace, row by row."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from expediter.core.errors import ConfigurationError
from expediter.sim.trace_rows import TraceRow


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSlice:
    """Which requests to keep; several conditions apply one after the other, in this order.

    Args:
        start_s, end_s: arrivals from `start_s` up to but not including `end_s`; times then count from `start_s`.
        conversations: one conversation in so many, whole; 1 keeps all. Requests belong to one conversation if their
            first `conversation_blocks` prefix blocks are equal; one without prefix ids is a conversation of its own.
            Which ones are kept depends on their ids alone.
        conversation_blocks: more than a system prompt that all requests share.
        every: each so-manieth request, from the first.
        first: at most so many requests.
    Raises:
        ConfigurationError: a number is out of range.
    """

    start_s: float = 0.0
    end_s: float | None = None
    conversations: int = 1
    conversation_blocks: int = 2
    every: int = 1
    first: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.start_s < float("inf"):
            raise ConfigurationError(f"start must be a number of seconds from 0, not {self.start_s}")
        if self.end_s is not None and not self.end_s > self.start_s:
            raise ConfigurationError(f"end must be after start ({self.start_s} s), not {self.end_s} s")
        for name in ("conversations", "conversation_blocks", "every", "first"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigurationError(f"{name.replace('_', ' ')} must be at least 1, not {value}")

    def of(self, rows: Iterable[TraceRow]) -> Iterator[TraceRow]:
        """Yield the rows to keep of rows in order of arrival; reads no further than it has to."""
        kept = self._window(rows)
        if self.conversations > 1:
            kept = self._whole_conversations(kept)
        return islice(kept, 0, None if self.first is None else self.first * self.every, self.every)

    def _window(self, rows: Iterable[TraceRow]) -> Iterator[TraceRow]:
        for row in rows:
            if self.end_s is not None and row.arrival_s >= self.end_s:
                return
            if row.arrival_s >= self.start_s:
                row.arrival_s -= self.start_s
                yield row

    def _whole_conversations(self, rows: Iterable[TraceRow]) -> Iterator[TraceRow]:
        for number, row in enumerate(rows):
            ids = row.prefix_ids[: self.conversation_blocks]
            key = f"prefix {ids[-1]}" if ids else f"row {number}"
            digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
            if int.from_bytes(digest) % self.conversations == 0:
                yield row
