"""Which leaf of the prefix cache goes next: the policy's order, with a part of the pool kept for each holder.

A holder is whoever's prompts these are, by their cache salt. Half of the pool is kept in equal parts for those who have
anything cached: what a holder has within its part, and has used lately, goes only after what others have beyond theirs.
So nobody can flush another's cache, however much it sends, and what nobody uses is nobody's for long.
"""

from __future__ import annotations

import heapq
from typing import Final

import numpy as np
import numpy.typing as npt

from expediter.core.errors import InvariantError
from expediter.kvcache.eviction import EvictionPolicy
from expediter.kvcache.node import Entry, Holder, Node

_KEPT_SHARE: Final = 0.5
_KEPT_S: Final = 600.0
"""What was not used for so long is not kept from others."""


class Candidates:
    """Leaves whose last block has no owner, in one heap per holder; entries out of date are dropped as they surface.

    Args:
        nodes: of the tree, by number.
        refs: owners per block.
    """

    def __init__(self, policy: EvictionPolicy, nodes: list[Node | None], refs: npt.NDArray[np.int32]) -> None:
        self._policy = policy
        self._nodes = nodes
        self._refs = refs
        self._num_kept_blocks = int(_KEPT_SHARE * len(refs))
        self._holders: dict[str, Holder] = {}
        self._active: dict[str, Holder] = {}

    def holder_of(self, salt: str) -> Holder:
        """Return whose prompts under a salt are: what stands before its first slash, all without one together."""
        name = salt.partition("/")[0] if "/" in salt else ""
        holder = self._holders.get(name)
        if holder is None:
            holder = self._holders[name] = Holder(name)
        return holder

    def count(self, holder: Holder, num_blocks: int) -> None:
        """Note that a holder has more blocks in the tree, or, if negative, fewer."""
        holder.num_blocks += num_blocks
        if not holder.num_blocks:
            del self._active[holder.name]
        elif holder.num_blocks == num_blocks:
            self._active[holder.name] = holder

    def offer(self, node: Node) -> None:
        """Put `node` among the candidates if its last block can go."""
        if not self.can_shorten(node):
            return
        heap = node.holder.heap
        heapq.heappush(heap, self.entry(node))
        if len(heap) > 64 + 2 * len(self._nodes):
            heap[:] = [
                self.entry(n) for n in self._nodes if n is not None and n.holder is node.holder and self.can_shorten(n)
            ]
            heapq.heapify(heap)

    def is_first(self, node: Node) -> bool:
        """Return whether `node` is its holder's first candidate as it is now."""
        return node.holder.heap[0] == self.entry(node)

    def entry(self, node: Node) -> Entry:
        return (node.pinned_until_s > 0, self._policy.key(node), node.stamp, node.node_id)

    def can_shorten(self, node: Node) -> bool:
        return node.children is None and node.parent is not None and not self._refs[node.blocks[-1]]

    def next(self, now_s: float) -> tuple[Node, int]:
        """Return the leaf to be cut, and how many blocks at most before it may be another's turn.

        It stays among the candidates. Cost: O(holders), each O(log leaves) per entry that is out of date.

        Raises:
            InvariantError: no leaf can go.
        """
        if len(self._active) == 1:
            (holder,) = self._active.values()
            node = self._head(holder)
            if node is not None:
                return node, len(node.blocks)
        num_kept = self._num_kept_blocks // max(len(self._active), 1)
        best: tuple[bool, Entry, Node, int] | None = None
        for holder in self._active.values():
            node = self._head(holder)
            if node is None:
                continue
            beyond = holder.num_blocks - num_kept
            is_old = node.used_s <= now_s - _KEPT_S
            is_kept = beyond <= 0 and not is_old
            most = len(node.blocks) if is_kept or is_old else beyond
            if best is None or (is_kept, holder.heap[0]) < best[:2]:
                best = (is_kept, holder.heap[0], node, most)
        if best is None:
            raise InvariantError("blocks count as evictable, but no leaf can go")
        return best[2:]

    def _head(self, holder: Holder) -> Node | None:
        """Return a holder's first leaf, None if it has none that can go."""
        heap = holder.heap
        while heap:
            entry = heap[0]
            node = self._nodes[entry[3]]
            # A stale entry: the node went, was used again, ranks differently, has children or an owner since.
            if node is not None and entry == self.entry(node) and self.can_shorten(node):
                return node
            heapq.heappop(heap)
        return None

    def check(self) -> None:
        """Verify that each leaf that can go is offered, and that the blocks of each holder are counted.

        Raises:
            InvariantError: the candidates are corrupt (a bug of ours).
        """
        num_blocks = dict.fromkeys(self._active, 0)
        offered = {entry for holder in self._holders.values() for entry in holder.heap}
        for node in self._nodes:
            if node is None:
                continue
            if node.holder is not self._active.get(node.holder.name):
                raise InvariantError(f"the holder of node {node.node_id} is not known")
            num_blocks[node.holder.name] += len(node.blocks)
            if self.can_shorten(node) and self.entry(node) not in offered:
                raise InvariantError(f"leaf {node.node_id} can never be evicted")
        for name, holder in self._active.items():
            if holder.num_blocks != num_blocks[name]:
                raise InvariantError(f"{num_blocks[name]} blocks of {name!r}, {holder.num_blocks} counted")
