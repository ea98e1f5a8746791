"""How far tokens go along the nodes of the prefix cache. Reads nodes and changes nothing."""

from __future__ import annotations

from typing import Final

import numpy as np

from expediter.kvcache.node import Node
from expediter.kvcache.pool import BlockIds

TOKEN_BYTES: Final = 4


def descend(
    node: Node, offset: int, tokens: bytes, pos: int, end: int, block_bytes: int
) -> tuple[Node, int, int, list[BlockIds]]:
    """Follow `tokens[pos:end]` (whole blocks) from block `offset` of `node` as far as the tree goes.

    Args:
        tokens: int32 bytes, of which a block has `block_bytes`.
    Returns:
        The node in which the walk stopped, and the block in it, behind its last one if all of it was passed; the
        position reached in `tokens`; and the block ids passed, a run per node.
    Cost: O(matched tokens) compared in C, O(nodes on the path) in Python.
    """
    runs: list[BlockIds] = []
    if offset < len(node.blocks):
        same = _common_blocks(node.tokens[offset * block_bytes :], tokens, pos, end, block_bytes)
        runs.append(node.blocks[offset : offset + same])
        offset += same
        pos += same * block_bytes
        if offset < len(node.blocks):
            return node, offset, pos, runs
    while pos < end and node.children is not None:
        child = node.children.get(tokens[pos : pos + block_bytes])
        if child is None:
            break
        node = child
        run = node.settled
        if run is None:
            run = node.tokens
        if not tokens.startswith(run, pos, end):
            offset = _common_blocks(run, tokens, pos, end, block_bytes)
            runs.append(node.blocks[:offset])
            return node, offset, pos + offset * block_bytes, runs
        runs.append(node.blocks)
        pos += len(run)
    return node, len(node.blocks), pos, runs


def joined(runs: list[BlockIds]) -> BlockIds:
    """Return the runs of a walk as one, read-only. Of many short ones this is faster than `np.concatenate`."""
    return np.frombuffer(b"".join(runs), np.int32)  # type: ignore[arg-type] # typeshed calls arrays buffers from 3.12 on


def _common_blocks(run: bytes, tokens: bytes, pos: int, end: int, block_bytes: int) -> int:
    """Return how many whole leading blocks of `run` equal `tokens[pos:end]`."""
    count = min(len(run), end - pos) // TOKEN_BYTES
    if count <= 0:
        return 0
    differ = np.frombuffer(run, np.int32, count) != np.frombuffer(tokens, np.int32, count, pos)
    first = int(differ.argmax())
    return (first if differ[first] else count) * TOKEN_BYTES // block_bytes
