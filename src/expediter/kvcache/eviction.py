"""Which cached blocks go first.

The tree asks only for a key per node and tells a policy what happens to its nodes; leaf before parent and tail before
head hold whatever the keys are. Keys depend on a node's past alone, never on when they are asked for, so a heap keeps
them in order and one eviction of many blocks equals many of one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from typing import Protocol

from expediter.core.errors import ConfigurationError
from expediter.kvcache.node import Node

_NUM_SAMPLES = 100  # over which `HintedLru` averages


class EvictionPolicy(Protocol):
    """Ranks the nodes of one tree. It may keep what it likes in `Node.history` and nowhere else in a node."""

    def added(self, node: Node) -> None:
        """A node has been computed and enters the tree."""

    def hit(self, node: Node, now_s: float) -> Iterable[Node]:
        """A request reuses `node`; called from the deepest node to the root, `num_hits` raised, `used_s` not yet.

        Returns:
            Other nodes whose keys have changed by it.
        """

    def split(self, upper: Node, lower: Node) -> None:
        """`lower` has given its first blocks to the new node `upper`, which has the same past."""

    def evicted(self, node: Node, num_blocks: int) -> None:
        """`node` is about to lose its last `num_blocks` blocks; all of them if it goes."""

    def key(self, node: Node) -> float:
        """Return the rank of a node: the smallest goes first; among equals, the least recently used."""


class Lru:
    """Least recently used first. Source: RadixAttention (SGLang, 2312.07104)."""

    def added(self, node: Node) -> None:
        pass

    def hit(self, node: Node, now_s: float) -> Iterable[Node]:  # noqa: ARG002 - the last use says it all
        return ()

    def split(self, upper: Node, lower: Node) -> None:
        upper.history = lower.history

    def evicted(self, node: Node, num_blocks: int) -> None:
        pass

    def key(self, node: Node) -> float:  # noqa: ARG002 - all rank alike, so the last use decides
        return 0.0


class Lfu(Lru):
    """Least frequently used first; a use counts half as much whenever a half-life has passed.

    Time is what has been evicted, in pools: without pressure nothing ages, and a large pool remembers longer. All
    uses fade alike, so the order of two nodes changes only when one is used, and the sum can be kept as a logarithm.

    Args:
        num_blocks: of the pool.
        half_life: evictions, as a multiple of the pool, after which a use counts half.
    Source: LRFU (Lee et al., IEEE Trans. Computers 50(12), 2001), which has LRU and LFU at its two ends.
    """

    def __init__(self, num_blocks: int, half_life: float = 1.0) -> None:
        if half_life <= 0:
            raise ConfigurationError(f"half_life must be above 0, not {half_life}")
        self._half_life_blocks = half_life * num_blocks
        self._num_evicted = 0

    def added(self, node: Node) -> None:
        node.history = self._num_evicted / self._half_life_blocks

    def hit(self, node: Node, now_s: float) -> Iterable[Node]:  # noqa: ARG002 - evictions are its clock
        # log2(sum of 2 ** time of use), in half-lives: what it exceeds the present by is small, so nothing overflows.
        now = self._num_evicted / self._half_life_blocks
        node.history = now + math.log2(1.0 + 2.0 ** (node.history - now))
        return ()

    def evicted(self, node: Node, num_blocks: int) -> None:  # noqa: ARG002 - whichever it was
        self._num_evicted += num_blocks

    def key(self, node: Node) -> float:
        return node.history


class SegmentedLru(Lru):
    """What was never reused goes before what was; within each, the least recently used.

    Reused nodes are protected until the protected hold more than their share of the pool; then those whose last hit is
    oldest are on probation again. Blocks of one-off prompts cannot flush what is shared.

    Args:
        num_blocks: of the pool.
        protected_share: most of the pool that may be protected, in [0, 1].
    Attributes:
        num_protected_blocks: now.
    Source: segmented LRU (Karedla, Love and Wherry, IEEE Computer 27(3), 1994). There, a page that loses its protection
        becomes the newest on probation; here, it takes its place by last use.
    """

    def __init__(self, num_blocks: int, protected_share: float = 0.3) -> None:
        if not 0 <= protected_share <= 1:
            raise ConfigurationError(f"protected_share must lie between 0 and 1, not {protected_share}")
        self.max_protected_blocks = int(protected_share * num_blocks)
        self.num_protected_blocks = 0
        self._num_protected = 0
        self._num_hits = 0
        self._num_entries = 0
        # By last hit, the number of which is the node's history; entries out of date are dropped when they surface.
        self._queue: list[tuple[float, int, Node]] = []

    def hit(self, node: Node, now_s: float) -> Iterable[Node]:  # noqa: ARG002 - only the order of hits counts
        if not node.history:
            self.num_protected_blocks += len(node.blocks)
            self._num_protected += 1
        self._num_hits += 1
        node.history = float(self._num_hits)
        self._enqueue(node)
        demoted: list[Node] = []
        while self.num_protected_blocks > self.max_protected_blocks:
            number, _, oldest = heapq.heappop(self._queue)
            if oldest.history == number:
                self.num_protected_blocks -= len(oldest.blocks)
                self._num_protected -= 1
                oldest.history = 0.0
                demoted.append(oldest)
        return demoted

    def split(self, upper: Node, lower: Node) -> None:
        upper.history = lower.history
        if upper.history:
            self._num_protected += 1
            self._enqueue(upper)

    def evicted(self, node: Node, num_blocks: int) -> None:
        if node.history:
            self.num_protected_blocks -= num_blocks
            if num_blocks == len(node.blocks):
                self._num_protected -= 1
                node.history = 0.0

    def key(self, node: Node) -> float:
        return 1.0 if node.history else 0.0

    def _enqueue(self, node: Node) -> None:
        self._num_entries += 1
        heapq.heappush(self._queue, (node.history, self._num_entries, node))
        if len(self._queue) > 64 + 2 * self._num_protected:
            self._queue = [entry for entry in self._queue if entry[2].history == entry[0]]
            heapq.heapify(self._queue)


class HintedLru(Lru):
    """The node whose next use is farthest, by the gaps between its uses so far, or that is idle for long, goes first.

    A node is ranked by the time since its last use plus a part of the gap that is expected for it: the exponentially
    weighted mean of its own gaps. Gaps vary much from one to the next, which is why idle time counts more. While a node
    was never reused, the mean first gap of others stands for its own, divided by the share of nodes that were ever
    reused. That share falls if such nodes go too soon to be reused, so the part is at most the mean time for which
    evicted nodes were idle: they are on probation for as long as the pool allows.

    Args:
        gap_weight: of the expected gap, against idle time.
        smoothing: weight of a node's newest gap in its mean, in (0, 1].
    Source: expected reuse by past gaps as in LRU-K (O'Neil et al., SIGMOD 1993); rank and constants are ours.
    """

    def __init__(self, gap_weight: float = 0.3, smoothing: float = 0.5) -> None:
        if gap_weight < 0 or not 0 < smoothing <= 1:
            raise ConfigurationError("gap_weight must not be negative, and smoothing must lie in (0, 1]")
        self._gap_weight = gap_weight
        self._smoothing = smoothing
        self._now_s = 0.0
        self._num_added = 0
        self._num_reused = 0
        self._num_gone = 0
        self._first_gap_s = 0.0
        self._idle_s = 0.0

    # `history` is the weighted gap: by so much the node counts as used earlier than it was.

    def added(self, node: Node) -> None:
        self._now_s = node.used_s
        self._num_added += 1
        expected_s = self._first_gap_s * self._num_added / max(self._num_reused, 1)
        node.history = min(self._gap_weight * expected_s, self._idle_s)

    def hit(self, node: Node, now_s: float) -> Iterable[Node]:
        self._now_s = now_s
        gap_s = now_s - node.used_s
        if node.num_hits == 1:
            self._num_reused += 1
            self._first_gap_s += (gap_s - self._first_gap_s) / min(self._num_reused, _NUM_SAMPLES)
            node.history = self._gap_weight * gap_s
        else:
            node.history += self._smoothing * (self._gap_weight * gap_s - node.history)
        return ()

    def evicted(self, node: Node, num_blocks: int) -> None:
        idle_s = self._now_s - node.used_s
        # Once per node, however many calls take it; what its client drops says nothing of the room that there is.
        if num_blocks == len(node.blocks) and idle_s > 0:
            self._num_gone = min(self._num_gone + 1, _NUM_SAMPLES)
            self._idle_s += (idle_s - self._idle_s) / self._num_gone

    def key(self, node: Node) -> float:
        return node.used_s - node.history
