"""The prefix cache: a radix tree over whole blocks of tokens.

Each node holds a run of blocks and the tokens in them, as raw int32 bytes; children are found by the bytes of their
first block. Everything is compared as tokens, never by a hash alone, so two prompts cannot be confused
(CVE-2025-25183 was such a confusion). Matching costs one dict look-up and one `memcmp` per node.

Owners are counted per block (`BlockPool.refs`). Sequences own prefixes of paths, so counts never rise from root to
leaf: the blocks of a node without an owner are its tail, and a leaf whose last block has none can be shortened. Which
of those goes next, `candidates.py` says, in the order of an `EvictionPolicy`.

A node is a unit of reuse: a request that reuses a part of one splits it, and what is computed after a reused prefix is
a node of its own. So all blocks of a node have been used equally often and at the same times.

Source: RadixAttention (SGLang, 2312.07104).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from expediter.core.errors import InvariantError
from expediter.core.request import CacheHint
from expediter.kvcache.candidates import Candidates
from expediter.kvcache.eviction import EvictionPolicy, Lru
from expediter.kvcache.node import NO_BLOCKS, Node, Root
from expediter.kvcache.node_table import NodeTable
from expediter.kvcache.pins import Pins
from expediter.kvcache.pool import BlockIds, BlockPool
from expediter.kvcache.walk import TOKEN_BYTES, descend, joined


class PrefixMatch(NamedTuple):
    """A cached prefix: its blocks in order."""

    blocks: BlockIds

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)


NO_MATCH = PrefixMatch(NO_BLOCKS)


class RadixTree:
    """Cached blocks by the tokens that they hold, one root per cache salt.

    Args:
        policy: which leaf goes first; it serves this tree only. None for `Lru`.
        max_pinned_share: most of the pool that pins may hold, in [0, 1].
    Attributes:
        nodes: by number, and by block.
        num_blocks: blocks in the tree.
        num_evictable: those of them without an owner. Who changes owners other than by `own` and `disown` adds it up.
        pins: what clients asked to keep.
        candidates: what can be evicted.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, policy: EvictionPolicy | None = None, max_pinned_share: float = 0.25
    ) -> None:
        self._pool = pool
        self.policy: EvictionPolicy = Lru() if policy is None else policy
        self.pins = Pins(int(max_pinned_share * pool.num_blocks))
        self._block_bytes = block_size * TOKEN_BYTES
        self._roots: dict[str, Root] = {}
        self.nodes = NodeTable(pool.num_blocks)
        self.candidates = Candidates(self.policy, self.nodes.by_id, pool.refs)
        self._stamp = 0
        self._now_s = 0.0
        self.num_evictable = 0
        self.num_blocks = 0

    # -- reading ------------------------------------------------------------------------------------------------------

    def match(self, tokens: bytes, salt: str, max_blocks: int) -> PrefixMatch:
        """Return the longest cached prefix of `tokens`, at most `max_blocks` whole blocks. Changes nothing.

        Args:
            tokens: int32 bytes.
            salt: root of the tree; prompts under different salts never share.
        Cost: O(matched tokens) compared in C, O(nodes on the path) in Python.
        """
        root = self._roots.get(salt)
        if root is None:
            return NO_MATCH
        end = min(max_blocks, len(tokens) // self._block_bytes) * self._block_bytes
        runs = descend(root, 0, tokens, 0, end, self._block_bytes)[3]
        if not runs:
            return NO_MATCH
        return PrefixMatch(runs[0] if len(runs) == 1 else joined(runs))

    def num_ownerless(self, match: PrefixMatch) -> int:
        """Return how many blocks of a match count as evictable until somebody owns them."""
        return match.num_blocks - int(np.count_nonzero(self._pool.refs[match.blocks]))

    # -- writing ------------------------------------------------------------------------------------------------------

    def insert(self, tokens: bytes, salt: str, blocks: BlockIds, num_inserted: int) -> BlockIds:
        """Add a sequence's blocks and return the ids that the tree holds for its tokens.

        Where equal tokens are cached already, the tree keeps its own block and the returned id differs from the given
        one: the caller must use the tree's and give its own up, so that a sequence always owns a path from the root.

        Args:
            tokens: int32 bytes, at least `len(blocks)` blocks.
            blocks: the sequence's blocks so far; new ones have exactly one owner, the sequence.
            num_inserted: leading blocks that are the tree's own already.
        """
        end = len(blocks) * self._block_bytes
        first, offset, start = self._resume(salt, blocks, num_inserted)
        node, offset, pos, runs = descend(first, offset, tokens, start, end, self._block_bytes)
        found = (pos - start) // self._block_bytes
        canonical = blocks
        if offset < len(node.blocks):
            node = self._split(node, offset)
        if found:
            canonical = blocks.copy()
            canonical[num_inserted : num_inserted + found] = joined(runs)
            self._hit(node, first)
        if pos < end:
            node = self._append(node, tokens[pos:end], blocks[num_inserted + found :])
        self._touch(node)
        return canonical

    def commit(self, tokens: bytes, salt: str, own: BlockIds, num_inserted: int) -> BlockIds:
        """Add an owner's blocks as `insert` does, and move its ownership over to those that the tree holds.

        Where they differ from its own, it owns the tree's from now on, and its own are free.
        """
        blocks = self.insert(tokens, salt, own, num_inserted)
        if blocks is not own:
            changed = blocks != own
            # Before ours go, or a common owner would be lost in between.
            self.num_evictable -= self._pool.acquire(blocks[changed])
            self._pool.push(self._pool.disown(own[changed]))
        return blocks

    def advance(self, now_s: float) -> None:
        """Set the clock; pins whose time is over are none any more."""
        if now_s > self._now_s:
            self._now_s = now_s
            for node in self.pins.expire(now_s):
                self.candidates.offer(node)

    def own(self, match: PrefixMatch, *, resumes: bool = False) -> None:
        """Add an owner to a matched prefix, whose blocks then cannot be evicted.

        Args:
            resumes: the owner was here before; what it finds again is no reuse by another.
        """
        if match.num_blocks:
            self.num_evictable -= self._pool.acquire(match.blocks)
            (self.touch if resumes else self.hit)(int(match.blocks[-1]))

    def disown(self, path: BlockIds, now_s: float, hint: CacheHint | None) -> None:
        """Take an owner off a path from a root, which may be empty; it stays cached unless the hint says otherwise.

        Args:
            now_s: the clock from here on.
            hint: what its client wishes for the blocks.
        """
        self.num_evictable += len(self._pool.disown(path))
        self.advance(now_s)
        if not len(path):
            return
        last = int(path[-1])
        self.touch(last)
        if hint is not None and hint.drop:
            self._pool.push(self.drop(last))
        elif hint is not None:
            self.pin(last, now_s + hint.pin_s)

    def hit(self, block: int) -> None:
        """Record that a request reuses the path down to `block`."""
        node = self._ending_at(block)
        self._hit(node, None)
        self._touch(node)

    def touch(self, block: int) -> None:
        """Mark the path down to `block` as used now; its end is offered for eviction if it is a leaf without owner."""
        self._touch(self._ending_at(block))

    def pin(self, block: int, until_s: float) -> None:
        """Keep the path down to `block` longer than all that is not pinned, as far as pins have room, head first."""
        path: list[Node] = []
        node: Node | None = self._ending_at(block)
        while node is not None and node.parent is not None:
            path.append(node)
            node = node.parent
        for step in reversed(path):
            room = len(step.blocks) if step.pinned_until_s else self.pins.room
            if room <= 0:
                break
            is_whole = room >= len(step.blocks)
            pinned = step if is_whole else self._split(step, room)
            self.pins.pin(pinned, until_s)
            self.candidates.offer(pinned)
            if not is_whole:
                break

    def drop(self, block: int) -> BlockIds:
        """Remove the blocks down to `block` that have no owner and that no other request ever reused, tail first."""
        dropped: list[BlockIds] = []
        node = self._ending_at(block)
        while self.candidates.can_shorten(node) and not node.num_hits and not node.pinned_until_s:
            parent = node.parent
            dropped.append(self._cut(node, len(node.blocks)))
            if node.parent is not None or parent is None:
                break
            node = parent
        return np.concatenate(dropped) if dropped else NO_BLOCKS

    def evict(self, count: int) -> BlockIds:
        """Remove `count` blocks without owners in the candidates' order: leaves first, tails before heads.

        Returns their ids in that order; the same blocks in the same order as evicting them one by one.

        Raises:
            InvariantError: fewer are evictable.
        Cost: O(log leaves + holders) per leaf touched.
        """
        evicted: list[BlockIds] = []
        missing = count
        while missing:
            leaf, most = self.candidates.next(self._now_s)
            evicted.append(self._cut(leaf, min(most, missing)))
            missing -= len(evicted[-1])
        return evicted[0] if len(evicted) == 1 else np.concatenate(evicted) if evicted else NO_BLOCKS

    # -- uses ---------------------------------------------------------------------------------------------------------

    def _hit(self, node: Node, above: Node | None) -> None:
        """Tell the policy that a request reuses the nodes from `node` up to below `above`."""
        step = node
        while step is not above and step.parent is not None:
            step.num_hits += 1
            for other in self.policy.hit(step, self._now_s):
                self.candidates.offer(other)
            step = step.parent

    def _touch(self, node: Node) -> None:
        self._stamp += 1
        step: Node | None = node
        while step is not None:
            step.stamp = self._stamp
            step.used_s = self._now_s
            step = step.parent
        self.candidates.offer(node)

    def _resume(self, salt: str, blocks: BlockIds, num_inserted: int) -> tuple[Node, int, int]:
        """Return node, offset and token position right after the first `num_inserted` blocks."""
        if num_inserted:
            node = self._ending_at(int(blocks[num_inserted - 1]))
            return node, len(node.blocks), num_inserted * self._block_bytes
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Root(salt, self.candidates.holder_of(salt))
        return root, 0, 0

    # -- the shape ----------------------------------------------------------------------------------------------------

    def _append(self, node: Node, tokens: bytes, blocks: BlockIds) -> Node:
        """Add a run below `node`; a leaf that nobody else used is lengthened, so a growing sequence stays one node."""
        self.num_blocks += len(blocks)
        self.candidates.count(node.holder, len(blocks))
        if node.children is None and node.parent is not None and not node.num_hits and not node.pinned_until_s:
            node.lengthen(tokens, blocks)
            self.nodes.node_of[blocks] = node.node_id
            return node
        child = self.nodes.add(node, tokens, blocks.copy(), self._stamp, self._now_s)
        self.policy.added(child)
        if node.children is None:
            node.children = {}
        node.children[tokens[: self._block_bytes]] = child
        return child

    def _split(self, node: Node, offset: int) -> Node:
        """Cut `node` before block `offset`; return the new upper part. The lower keeps its identity and heap entry."""
        cut = offset * self._block_bytes
        parent = node.parent
        if parent is None or parent.children is None:
            raise InvariantError("a root has no blocks to split")
        tokens = node.tokens
        upper = self.nodes.add(parent, tokens[:cut], node.blocks[:offset].copy(), node.stamp, node.used_s)
        upper.num_hits = node.num_hits
        self.pins.split(upper, node)
        self.policy.split(upper, node)
        parent.children[tokens[: self._block_bytes]] = upper
        node.settled, node.blocks = tokens[cut:], node.blocks[offset:].copy()
        node.parent = upper
        upper.children = {tokens[cut : cut + self._block_bytes]: node}
        return upper

    def _ending_at(self, block: int) -> Node:
        """Return the node that ends with `block`; what followed it in its node is a child now."""
        node = self.nodes.holding(block)
        if node.blocks[-1] == block:
            return node
        return self._split(node, int(np.flatnonzero(node.blocks == block)[0]) + 1)

    def _cut(self, node: Node, most: int) -> BlockIds:
        """Take up to `most` blocks without owners off a leaf's tail and return them, last first."""
        refs, taken = self._pool.refs, len(node.blocks)
        if refs[node.blocks[0]]:  # else nobody owns any of it
            taken -= int(np.count_nonzero(refs[node.blocks]))
        taken = min(most, taken)
        blocks = node.blocks[: -taken - 1 : -1]
        self.policy.evicted(node, taken)
        self.pins.evicted(node, taken)
        self.num_evictable -= taken
        self.num_blocks -= taken
        self.candidates.count(node.holder, -taken)
        self._shorten(node, len(node.blocks) - taken)
        return blocks

    def _shorten(self, node: Node, num_blocks: int) -> None:
        """Cut a leaf's tail off; an empty leaf goes, and its parent may become the next one."""
        self.nodes.node_of[node.blocks[num_blocks:]] = -1
        if num_blocks:
            node.shorten(num_blocks * self._block_bytes, num_blocks)
            if not self.candidates.is_first(node):  # else it is offered as before
                self.candidates.offer(node)
            return
        parent = node.parent
        if parent is None or parent.children is None:
            raise InvariantError("a root cannot be evicted")
        del parent.children[node.tokens[: self._block_bytes]]
        node.parent = None
        self.nodes.remove(node)
        if not parent.children:
            parent.children = None
            if isinstance(parent, Root):
                del self._roots[parent.salt]
            else:
                self.candidates.offer(parent)

    # -- integrity ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Verify the whole tree.

        Raises:
            InvariantError: it is corrupt (a bug of ours).
        """
        seen = np.zeros(self._pool.num_blocks, bool)
        self.candidates.check()
        pinned = 0
        for node in self.nodes:
            self._check_node(node)
            if seen[node.blocks].any() or (self.nodes.node_of[node.blocks] != node.node_id).any():
                raise InvariantError(f"a block of node {node.node_id} lies in two nodes")
            pinned += len(node.blocks) if node.pinned_until_s else 0
            seen[node.blocks] = True
        if int(seen.sum()) != self.num_blocks or (seen != (self.nodes.node_of >= 0)).any():
            raise InvariantError(f"{int(seen.sum())} blocks in the tree, {self.num_blocks} counted")
        if pinned != self.pins.num_blocks or pinned > self.pins.max_blocks:
            raise InvariantError(f"{pinned} blocks pinned, {self.pins.num_blocks} counted of {self.pins.max_blocks}")
        evictable = int((seen & (self._pool.refs == 0)).sum())
        if evictable != self.num_evictable:
            raise InvariantError(f"{evictable} blocks evictable, {self.num_evictable} counted")

    def _check_node(self, node: Node) -> None:
        refs = self._pool.refs[node.blocks]
        parent = node.parent
        if parent is None or parent.children is None:
            raise InvariantError(f"node {node.node_id} hangs in the air")
        if parent.children.get(node.tokens[: self._block_bytes]) is not node:
            raise InvariantError(f"node {node.node_id} is not where its tokens lead")
        if not len(node.blocks) or len(node.tokens) != len(node.blocks) * self._block_bytes:
            raise InvariantError(f"node {node.node_id} holds {len(node.tokens)} bytes for {len(node.blocks)} blocks")
        if (np.diff(refs) > 0).any() or (len(parent.blocks) and refs[0] > self._pool.refs[parent.blocks[-1]]):
            raise InvariantError(f"owners rise along node {node.node_id}: somebody owns no whole path")
        if node.stamp > parent.stamp and parent.parent is not None:
            raise InvariantError(f"node {node.node_id} was used after its parent")
        if node.pinned_until_s > parent.pinned_until_s and parent.parent is not None:
            raise InvariantError(f"node {node.node_id} is pinned longer than its parent")
