"""The prefix cache: a radix tree over whole blocks of tokens.

Each node holds a run of blocks and the tokens in them, as raw int32 bytes; children are found by the bytes of their
first block. Everything is compared as tokens, never by a hash alone, so two prompts cannot be confused
(CVE-2025-25183 was such a confusion). Matching costs one dict look-up and one `memcmp` per node.

Owners are counted per block (`BlockPool.refs`). Sequences own prefixes of paths, so counts never rise from root to
leaf: the blocks of a node without an owner are its tail, and a leaf whose last block has none can be shortened. Those
leaves lie in a heap by the time of their last use; entries that are out of date are dropped when they surface.

Source: RadixAttention (SGLang, 2312.07104); leaf-first least recently used eviction.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from expediter.core.errors import InvariantError
from expediter.kvcache.pool import BlockIds, BlockPool

_TOKEN_BYTES = 4
_NO_BLOCKS: BlockIds = np.zeros(0, np.int32)


class Node:
    """A run of blocks below its parent's.

    Attributes:
        tokens: int32 bytes of the run.
        blocks: its block ids; `len(tokens) == len(blocks) * block_size * 4`.
        children: by the bytes of their first block; None while there are none, which most nodes keep.
        stamp: logical time of the last use; a node's is never older than its children's.
    """

    __slots__ = ("blocks", "children", "node_id", "parent", "stamp", "tokens")

    def __init__(self, node_id: int, parent: Node | None, tokens: bytes, blocks: BlockIds, stamp: int) -> None:
        self.node_id = node_id
        self.parent = parent
        self.tokens = tokens
        self.blocks = blocks
        self.children: dict[bytes, Node] | None = None
        self.stamp = stamp


class Root(Node):
    """The empty run above all prompts of one salt."""

    __slots__ = ("salt",)

    def __init__(self, salt: str) -> None:
        super().__init__(-1, None, b"", _NO_BLOCKS, 0)
        self.salt = salt


class PrefixMatch(NamedTuple):
    """A cached prefix: its blocks in order, and the node that the last of them lies in (None without a match)."""

    blocks: BlockIds
    node: Node | None

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)


def _joined(runs: list[BlockIds]) -> BlockIds:
    """Return the runs as one, read-only. Of many short ones the join of their bytes is faster than `np.concatenate`."""
    return np.frombuffer(b"".join(runs), np.int32)  # type: ignore[arg-type] # typeshed calls arrays buffers from 3.12 on


NO_MATCH = PrefixMatch(_NO_BLOCKS, None)


class RadixTree:
    """Cached blocks by the tokens that they hold, one root per cache salt.

    Attributes:
        num_evictable: blocks in the tree without an owner. The manager reports changes of ownership.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_bytes = block_size * _TOKEN_BYTES
        self._roots: dict[str, Root] = {}
        self._nodes: list[Node | None] = []
        self._spare_ids: list[int] = []
        self._node_of: npt.NDArray[np.int32] = np.full(pool.num_blocks, -1, np.int32)
        self._heap: list[tuple[int, int]] = []
        self._stamp = 0
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
        node, _, _, parts = self._descend(root, 0, tokens, 0, end)
        if not parts:
            return NO_MATCH
        return PrefixMatch(parts[0] if len(parts) == 1 else _joined(parts), node)

    def holds(self, blocks: BlockIds) -> npt.NDArray[np.bool_]:
        """Return which of `blocks` lie in the tree."""
        return self._node_of[blocks] >= 0

    @property
    def num_nodes(self) -> int:
        return len(self._nodes) - len(self._spare_ids)

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
        node, offset, start = self._resume(salt, blocks, num_inserted)
        node, offset, pos, parts = self._descend(node, offset, tokens, start, end)
        found = (pos - start) // self._block_bytes
        canonical = blocks
        if found:
            canonical = blocks.copy()
            canonical[num_inserted : num_inserted + found] = _joined(parts)
        if pos < end:
            if offset < len(node.blocks):
                node = self._split(node, offset)
            node = self._append(node, tokens[pos:end], blocks[num_inserted + found :])
        self.touch(node)
        return canonical

    def touch(self, node: Node) -> None:
        """Mark the path down to `node` as used now, and offer the node for eviction if it is a leaf without owners."""
        self._stamp += 1
        step: Node | None = node
        while step is not None:
            step.stamp = self._stamp
            step = step.parent
        self._offer(node)

    def node_of(self, block: int) -> Node:
        """Return the node that holds `block`.

        Raises:
            InvariantError: none does.
        """
        node_id = int(self._node_of[block])
        node = self._nodes[node_id] if node_id >= 0 else None
        if node is None:
            raise InvariantError(f"block {block} is not in the tree")
        return node

    def evict(self, count: int) -> BlockIds:
        """Remove the `count` least recently used blocks without owners, leaves first, tails before heads.

        Returns their ids in that order; the same blocks in the same order as evicting them one by one.

        Raises:
            InvariantError: fewer are evictable.
        Cost: O(log leaves) per leaf touched.
        """
        evicted: list[BlockIds] = []
        missing = count
        while missing:
            node = self._pop_leaf()
            ownerless = len(node.blocks) - int(np.count_nonzero(self._pool.refs[node.blocks]))
            taken = min(missing, ownerless)
            evicted.append(node.blocks[: -taken - 1 : -1])
            missing -= taken
            self._shorten(node, len(node.blocks) - taken)
        self.num_evictable -= count
        self.num_blocks -= count
        return evicted[0] if len(evicted) == 1 else np.concatenate(evicted) if evicted else _NO_BLOCKS

    # -- the walk -----------------------------------------------------------------------------------------------------

    def _descend(
        self, node: Node, offset: int, tokens: bytes, pos: int, end: int
    ) -> tuple[Node, int, int, list[BlockIds]]:
        """Follow `tokens[pos:end]` (whole blocks) from block `offset` of `node` as far as the tree goes.

        Returns the node and the offset in it where the walk stopped, the position reached, and the block runs passed.
        """
        width = self._block_bytes
        parts: list[BlockIds] = []
        if offset < len(node.blocks):
            same = self._common_blocks(node.tokens[offset * width :], tokens, pos, end)
            parts.append(node.blocks[offset : offset + same])
            offset += same
            pos += same * width
            if offset < len(node.blocks):
                return node, offset, pos, parts
        while pos < end and node.children is not None:
            child = node.children.get(tokens[pos : pos + width])
            if child is None:
                break
            node = child
            if not tokens.startswith(node.tokens, pos, end):
                offset = self._common_blocks(node.tokens, tokens, pos, end)
                parts.append(node.blocks[:offset])
                return node, offset, pos + offset * width, parts
            parts.append(node.blocks)
            pos += len(node.tokens)
        return node, len(node.blocks), pos, parts

    def _common_blocks(self, run: bytes, tokens: bytes, pos: int, end: int) -> int:
        """Return how many whole leading blocks of `run` equal `tokens[pos:end]`."""
        count = min(len(run), end - pos) // _TOKEN_BYTES
        if count <= 0:
            return 0
        differ = np.frombuffer(run, np.int32, count) != np.frombuffer(tokens, np.int32, count, pos)
        first = int(differ.argmax())
        return (first if differ[first] else count) * _TOKEN_BYTES // self._block_bytes

    def _resume(self, salt: str, blocks: BlockIds, num_inserted: int) -> tuple[Node, int, int]:
        """Return node, offset and token position right after the first `num_inserted` blocks."""
        if num_inserted:
            last = int(blocks[num_inserted - 1])
            node = self.node_of(last)
            offset = len(node.blocks)
            if node.blocks[-1] != last:
                offset = int(np.flatnonzero(node.blocks == last)[0]) + 1
            return node, offset, num_inserted * self._block_bytes
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Root(salt)
        return root, 0, 0

    # -- the shape ----------------------------------------------------------------------------------------------------

    def _append(self, node: Node, tokens: bytes, blocks: BlockIds) -> Node:
        """Add a run below `node`; a leaf is lengthened instead, so a growing sequence stays one node."""
        self.num_blocks += len(blocks)
        if node.children is None and node.parent is not None:
            node.tokens += tokens
            node.blocks = np.concatenate((node.blocks, blocks))
            self._node_of[blocks] = node.node_id
            return node
        child = self._new_node(node, tokens, blocks.copy())
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
        upper = self._new_node(parent, node.tokens[:cut], node.blocks[:offset].copy())
        upper.stamp = node.stamp
        parent.children[node.tokens[: self._block_bytes]] = upper
        node.tokens = node.tokens[cut:]
        node.blocks = node.blocks[offset:].copy()
        node.parent = upper
        upper.children = {node.tokens[: self._block_bytes]: node}
        return upper

    def _shorten(self, node: Node, num_blocks: int) -> None:
        """Cut a leaf's tail off; an empty leaf goes, and its parent may become the next one."""
        self._node_of[node.blocks[num_blocks:]] = -1
        if num_blocks:
            node.tokens = node.tokens[: num_blocks * self._block_bytes]
            node.blocks = node.blocks[:num_blocks].copy()
            self._offer(node)
            return
        parent = node.parent
        if parent is None or parent.children is None:
            raise InvariantError("a root cannot be evicted")
        del parent.children[node.tokens[: self._block_bytes]]
        self._nodes[node.node_id] = None
        self._spare_ids.append(node.node_id)
        if not parent.children:
            parent.children = None
            if isinstance(parent, Root):
                del self._roots[parent.salt]
            else:
                self._offer(parent)

    def _new_node(self, parent: Node, tokens: bytes, blocks: BlockIds) -> Node:
        node = Node(self._spare_ids.pop() if self._spare_ids else len(self._nodes), parent, tokens, blocks, self._stamp)
        if node.node_id == len(self._nodes):
            self._nodes.append(node)
        else:
            self._nodes[node.node_id] = node
        self._node_of[blocks] = node.node_id
        return node

    # -- the heap -----------------------------------------------------------------------------------------------------

    def _offer(self, node: Node) -> None:
        """Put `node` among the candidates if its last block can go."""
        if not self._can_shorten(node):
            return
        heapq.heappush(self._heap, (node.stamp, node.node_id))
        if len(self._heap) > 64 + 2 * len(self._nodes):
            self._heap = [(n.stamp, n.node_id) for n in self._nodes if n is not None and self._can_shorten(n)]
            heapq.heapify(self._heap)

    def _can_shorten(self, node: Node) -> bool:
        return node.children is None and node.parent is not None and not self._pool.refs[node.blocks[-1]]

    def _pop_leaf(self) -> Node:
        while self._heap:
            stamp, node_id = heapq.heappop(self._heap)
            node = self._nodes[node_id]
            # A stale entry: the node went, was used again, has children or an owner since.
            if node is not None and node.stamp == stamp and self._can_shorten(node):
                return node
        raise InvariantError(f"{self.num_evictable} blocks count as evictable, but no leaf can go")

    # -- integrity ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Verify the whole tree.

        Raises:
            InvariantError: it is corrupt (a bug of ours).
        """
        seen = np.zeros(self._pool.num_blocks, bool)
        offered = set(self._heap)
        for node in self._nodes:
            if node is None:
                continue
            refs = self._pool.refs[node.blocks]
            parent = node.parent
            if parent is None or parent.children is None:
                raise InvariantError(f"node {node.node_id} hangs in the air")
            if parent.children.get(node.tokens[: self._block_bytes]) is not node:
                raise InvariantError(f"node {node.node_id} is not where its tokens lead")
            if not len(node.blocks) or len(node.tokens) != len(node.blocks) * self._block_bytes:
                raise InvariantError(
                    f"node {node.node_id} holds {len(node.tokens)} bytes for {len(node.blocks)} blocks"
                )
            if seen[node.blocks].any() or (self._node_of[node.blocks] != node.node_id).any():
                raise InvariantError(f"a block of node {node.node_id} lies in two nodes")
            if (np.diff(refs) > 0).any() or (len(parent.blocks) and refs[0] > self._pool.refs[parent.blocks[-1]]):
                raise InvariantError(f"owners rise along node {node.node_id}: somebody owns no whole path")
            if node.stamp > parent.stamp and parent.parent is not None:
                raise InvariantError(f"node {node.node_id} was used after its parent")
            if self._can_shorten(node) and (node.stamp, node.node_id) not in offered:
                raise InvariantError(f"leaf {node.node_id} can never be evicted")
            seen[node.blocks] = True
        if int(seen.sum()) != self.num_blocks or (seen != (self._node_of >= 0)).any():
            raise InvariantError(f"{int(seen.sum())} blocks in the tree, {self.num_blocks} counted")
        evictable = int((seen & (self._pool.refs == 0)).sum())
        if evictable != self.num_evictable:
            raise InvariantError(f"{evictable} blocks evictable, {self.num_evictable} counted")
