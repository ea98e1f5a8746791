"""The nodes of the prefix cache by number, and in which of them each block lies."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from expediter.core.errors import InvariantError
from expediter.kvcache.node import Node
from expediter.kvcache.pool import BlockIds


class NodeTable:
    """Finds nodes by their number and by their blocks. A number is given out again when its node has gone.

    Args:
        num_blocks: size of the pool.
    Attributes:
        by_id: the nodes; None at the numbers of those that have gone.
        node_of: number of the node that holds each block, -1 if none does; int32, shape [num_blocks].
    """

    def __init__(self, num_blocks: int) -> None:
        self.by_id: list[Node | None] = []
        self.node_of: npt.NDArray[np.int32] = np.full(num_blocks, -1, np.int32)
        self._spare_ids: list[int] = []

    def __len__(self) -> int:
        return len(self.by_id) - len(self._spare_ids)

    def __iter__(self) -> Iterator[Node]:
        """Iterate in the order of their numbers."""
        return (node for node in self.by_id if node is not None)

    def holds(self, blocks: BlockIds) -> npt.NDArray[np.bool_]:
        """Return which of `blocks` lie in a node."""
        return self.node_of[blocks] >= 0

    def holding(self, block: int) -> Node:
        """Return the node that holds `block`.

        Raises:
            InvariantError: none does.
        """
        node_id = int(self.node_of[block])
        node = self.by_id[node_id] if node_id >= 0 else None
        if node is None:
            raise InvariantError(f"block {block} is not in the tree")
        return node

    def add(self, parent: Node, tokens: bytes, blocks: BlockIds, stamp: int, used_s: float) -> Node:
        """Make a node of a run below `parent`, whose holder it has; linking it there is the caller's."""
        node_id = self._spare_ids.pop() if self._spare_ids else len(self.by_id)
        node = Node(node_id, parent, parent.holder, tokens, blocks, stamp, used_s)
        if node_id == len(self.by_id):
            self.by_id.append(node)
        else:
            self.by_id[node_id] = node
        self.node_of[blocks] = node_id
        return node

    def remove(self, node: Node) -> None:
        """Forget a node that has no blocks any more."""
        self.by_id[node.node_id] = None
        self._spare_ids.append(node.node_id)
