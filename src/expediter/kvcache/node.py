"""A node of the prefix cache, and what eviction knows of its past."""

from __future__ import annotations

import numpy as np

from expediter.kvcache.pool import BlockIds

NO_BLOCKS: BlockIds = np.zeros(0, np.int32)


Entry = tuple[bool, float, int, int]
"""Where a leaf stands among those that can be evicted: pinned, the policy's key, last use, node."""


class Holder:
    """Whose prompts the nodes below some roots are.

    Attributes:
        num_blocks: in the tree.
        heap: its leaves in the order in which they go, among entries that are out of date.
    """

    __slots__ = ("heap", "name", "num_blocks")

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_blocks = 0
        self.heap: list[Entry] = []


class Node:
    """A run of blocks below its parent's. Whoever reuses a part of it splits it: its blocks have one past.

    A leaf grows by a chunk of a prompt and shrinks by an evicted block at a time. Its tokens, of which there may be
    hundreds of kilobytes, are put in order when somebody reads them, not with each change.

    Attributes:
        settled: what `tokens` returns, None if the run has changed since it was last read.
        blocks: block ids of the run; `len(tokens) == len(blocks) * block_size * 4`.
        children: by the bytes of their first block; None while there are none, which most nodes keep.
        stamp: logical time of the last use; a node's is never older than its children's.
        used_s: time of the last use, in the driver's clock.
        num_hits: requests that reused its blocks; who computed them does not count.
        holder: whose it is.
        history: a number that the eviction policy keeps; nobody else reads it.
        pinned_until_s: a client's pin; 0 without one.
    """

    __slots__ = (
        "_end",
        "_pieces",
        "blocks",
        "children",
        "history",
        "holder",
        "node_id",
        "num_hits",
        "parent",
        "pinned_until_s",
        "settled",
        "stamp",
        "used_s",
    )

    def __init__(
        self,
        node_id: int,
        parent: Node | None,
        holder: Holder,
        tokens: bytes,
        blocks: BlockIds,
        stamp: int,
        used_s: float,
    ) -> None:
        self.node_id = node_id
        self.parent = parent
        self.holder = holder
        self.settled: bytes | None = tokens
        self._pieces: list[bytes] | None = None
        self._end: int | None = None  # of the bytes in the pieces, where it was cut off
        self.blocks = blocks
        self.children: dict[bytes, Node] | None = None
        self.stamp = stamp
        self.used_s = used_s
        self.num_hits = 0
        self.history = 0.0
        self.pinned_until_s = 0.0

    @property
    def tokens(self) -> bytes:
        """int32 bytes of the run."""
        if self.settled is None:
            assert self._pieces is not None
            self.settled = b"".join(self._pieces)[: self._end]
            self._pieces = self._end = None
        return self.settled

    def lengthen(self, tokens: bytes, blocks: BlockIds) -> None:
        """Add whole blocks at the end."""
        if self._pieces is None or self._end is not None:
            self._pieces, self._end = [self.tokens], None
        self._pieces.append(tokens)
        self.settled = None
        self.blocks = np.concatenate((self.blocks, blocks))

    def shorten(self, num_bytes: int, num_blocks: int) -> None:
        """Cut the end off; that many bytes and blocks stay."""
        if self._end is None:
            self._pieces = [self.tokens]
        self._end, self.settled = num_bytes, None
        self.blocks = self.blocks[:num_blocks]


class Root(Node):
    """The empty run above all prompts of one salt."""

    __slots__ = ("salt",)

    def __init__(self, salt: str, holder: Holder) -> None:
        super().__init__(-1, None, holder, b"", NO_BLOCKS, 0, 0.0)
        self.salt = salt
