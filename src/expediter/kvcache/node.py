"""A node of the prefix cache, and what eviction knows of its past."""

from __future__ import annotations

import numpy as np

from expediter.kvcache.pool import BlockIds

NO_BLOCKS: BlockIds = np.zeros(0, np.int32)


class Node:
    """A run of blocks below its parent's. Whoever reuses a part of it splits it: its blocks have one past.

    Attributes:
        tokens: int32 bytes of the run.
        blocks: its block ids; `len(tokens) == len(blocks) * block_size * 4`.
        children: by the bytes of their first block; None while there are none, which most nodes keep.
        stamp: logical time of the last use; a node's is never older than its children's.
        used_s: time of the last use, in the driver's clock.
        num_hits: requests that reused its blocks; who computed them does not count.
        history: a number that the eviction policy keeps; nobody else reads it.
        pinned_until_s: a client's pin; 0 without one.
    """

    __slots__ = (
        "blocks",
        "children",
        "history",
        "node_id",
        "num_hits",
        "parent",
        "pinned_until_s",
        "stamp",
        "tokens",
        "used_s",
    )

    def __init__(
        self, node_id: int, parent: Node | None, tokens: bytes, blocks: BlockIds, stamp: int, used_s: float
    ) -> None:
        self.node_id = node_id
        self.parent = parent
        self.tokens = tokens
        self.blocks = blocks
        self.children: dict[bytes, Node] | None = None
        self.stamp = stamp
        self.used_s = used_s
        self.num_hits = 0
        self.history = 0.0
        self.pinned_until_s = 0.0


class Root(Node):
    """The empty run above all prompts of one salt."""

    __slots__ = ("salt",)

    def __init__(self, salt: str) -> None:
        super().__init__(-1, None, b"", NO_BLOCKS, 0, 0.0)
        self.salt = salt
