"""Nodes that clients asked to keep for a while, bounded so that they cannot freeze the cache."""

from __future__ import annotations

import heapq

from expediter.kvcache.node import Node


class Pins:
    """Who is pinned, until when, and how many blocks that is.

    A pinned node is the last to be evicted, not safe from it. What is above a pinned node is pinned at least as long.

    Args:
        max_blocks: most blocks that pins may hold; those that find no room are no pins.
    Attributes:
        num_blocks: pinned blocks.
    """

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.num_blocks = 0
        self._num_nodes = 0
        self._num_entries = 0
        self._timers: list[tuple[float, int, Node]] = []

    @property
    def room(self) -> int:
        """Blocks that may still be pinned."""
        return self.max_blocks - self.num_blocks

    def pin(self, node: Node, until_s: float) -> None:
        """Pin a node for whose blocks there is room, or prolong its pin."""
        if not node.pinned_until_s:
            self.num_blocks += len(node.blocks)
            self._num_nodes += 1
        elif until_s <= node.pinned_until_s:
            return
        node.pinned_until_s = until_s
        self._start_timer(node)

    def split(self, upper: Node, lower: Node) -> None:
        """Pin the new `upper` as its blocks were in `lower`."""
        upper.pinned_until_s = lower.pinned_until_s
        if upper.pinned_until_s:
            self._num_nodes += 1
            self._start_timer(upper)

    def evicted(self, node: Node, num_blocks: int) -> None:
        """Forget the last `num_blocks` blocks of a node."""
        if node.pinned_until_s:
            self.num_blocks -= num_blocks
            if num_blocks == len(node.blocks):
                self._num_nodes -= 1
                node.pinned_until_s = 0.0

    def expire(self, now_s: float) -> list[Node]:
        """Return the nodes whose time is over; they are ordinary again."""
        over: list[Node] = []
        while self._timers and self._timers[0][0] <= now_s:
            until_s, _, node = heapq.heappop(self._timers)
            if node.pinned_until_s == until_s:
                self.num_blocks -= len(node.blocks)
                self._num_nodes -= 1
                node.pinned_until_s = 0.0
                over.append(node)
        return over

    def _start_timer(self, node: Node) -> None:
        self._num_entries += 1
        heapq.heappush(self._timers, (node.pinned_until_s, self._num_entries, node))
        if len(self._timers) > 64 + 2 * self._num_nodes:
            self._timers = [entry for entry in self._timers if entry[2].pinned_until_s == entry[0]]
            heapq.heapify(self._timers)
