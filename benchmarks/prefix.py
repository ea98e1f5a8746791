"""The prefix cache: match, insert, evict, and bytes per cached token.

The cache holds 10,000 sequences of 768 tokens that share 100 prefixes of 512 (blocks of 16). Measured are a prompt that
lies in one node, one along a chain of 32 nodes, a new prompt, and the first leaf of 256 tokens to go under each policy.
Microseconds of the thread's CPU time.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from benchmarks.report import Row, add_json_option, cpu_us, publish, spread
from expediter.kvcache.pool import BlockPool
from expediter.kvcache.radix import RadixTree
from expediter.scheduling.build import EVICTIONS

_BLOCK_SIZE = 16
_LENGTHS = (1024, 8192, 32768)
_CHAIN = 32

Tokens = npt.NDArray[np.int32]


class Cache:
    """A pool and its tree, filled as the module says."""

    def __init__(self, num_sequences: int, eviction: str = "lru", *, spare_blocks: int = 60_000) -> None:
        self.rng = np.random.default_rng(0)
        self.pool = BlockPool(num_sequences * 16 + 100 * 32 + spare_blocks)
        self.tree = RadixTree(self.pool, _BLOCK_SIZE, EVICTIONS[eviction](self.pool.num_blocks))
        prefixes = [self.new_tokens(512) for _ in range(100)]
        for index in range(num_sequences):
            self.put(np.concatenate((prefixes[index % 100], self.new_tokens(256))))

    def new_tokens(self, count: int) -> Tokens:
        return self.rng.integers(0, 128_000, count, dtype=np.int32)

    def put(self, tokens: Tokens) -> None:
        """Insert a sequence that ends at once."""
        raw, count = tokens.tobytes(), len(tokens) // _BLOCK_SIZE
        match = self.tree.match(raw, "", count)
        self.tree.num_evictable -= self.pool.acquire(match.blocks)
        if match.num_blocks:
            self.tree.hit(int(match.blocks[-1]))
        blocks = np.concatenate((match.blocks, self.pool.pop(count - match.num_blocks)))
        self.tree.insert(raw, "", blocks, match.num_blocks)
        self.tree.num_evictable += len(self.pool.disown(blocks))
        self.tree.touch(int(blocks[-1]))

    def insert_new(self, length: int) -> float:
        """Insert a prompt that nobody shares; return what that took, in microseconds."""
        raw, count = self.new_tokens(length).tobytes(), length // _BLOCK_SIZE
        if self.pool.num_free < count:
            self.pool.push(self.tree.evict(count))
        blocks = self.pool.pop(count)
        taken = cpu_us(lambda: self.tree.insert(raw, "", blocks, 0))
        self.tree.num_evictable += len(self.pool.disown(blocks))
        self.tree.touch(int(blocks[-1]))
        return taken

    def put_chain(self, tokens: Tokens) -> None:
        """Insert a sequence and branches off it, so that it lies along `_CHAIN` nodes."""
        piece = len(tokens) // _CHAIN
        for end in range(piece, len(tokens), piece):
            self.put(np.concatenate((tokens[:end], self.new_tokens(_BLOCK_SIZE))))
        self.put(tokens)


def _repeat(function: Callable[[], object], rounds: int) -> Row:
    function()
    return spread([cpu_us(function) for _ in range(rounds)])


def measure_match(cache: Cache, rounds: int) -> list[Row]:
    rows: list[Row] = []
    for shape in ("1 node", f"{_CHAIN} nodes"):
        for length in _LENGTHS:
            tokens = cache.new_tokens(length)
            (cache.put if shape == "1 node" else cache.put_chain)(tokens)
            raw, count = tokens.tobytes(), length // _BLOCK_SIZE
            if cache.tree.match(raw, "", count).num_blocks != count:
                raise SystemExit("the prompt is not in the cache")
            row = _repeat(lambda raw=raw, count=count: cache.tree.match(raw, "", count), rounds)  # type: ignore[misc] # bound now
            rows.append({"operation": f"match, {shape}", "tokens": length, **row})
    return rows


def measure_insert(cache: Cache, rounds: int) -> list[Row]:
    rows: list[Row] = []
    for length in _LENGTHS:
        samples = [cache.insert_new(length) for _ in range(rounds)]
        rows.append({"operation": "insert, new", "tokens": length, **spread(samples)})
    return rows


def measure_evict(num_sequences: int, rounds: int) -> list[Row]:
    leaf = 256 // _BLOCK_SIZE
    rows: list[Row] = []
    for name in EVICTIONS:
        cache = Cache(num_sequences, name)
        gc.collect()
        samples = [cpu_us(lambda tree=cache.tree: tree.evict(leaf)) for _ in range(rounds)]  # type: ignore[misc] # bound now
        rows.append({"operation": f"evict a leaf, {name}", "tokens": 256, **spread(samples)})
    return rows


def bytes_per_token(cache: Cache) -> float:
    """Return the memory of all nodes (objects, tokens, block ids, child tables, heap) per cached token."""
    tree = cache.tree
    heaps = [holder.heap for holder in tree.candidates._holders.values()]
    total = sys.getsizeof(tree.nodes.by_id) + sum(map(sys.getsizeof, heaps)) + tree.nodes.node_of.nbytes
    total += sum(sys.getsizeof(entry) + 32 for heap in heaps for entry in heap)
    for node in tree.nodes:
        total += sys.getsizeof(node) + sys.getsizeof(node.tokens) + 112 + node.blocks.nbytes
        total += sys.getsizeof(node.used_s) + sys.getsizeof(node.history)
        if node.children is not None:
            keys = sum(sys.getsizeof(key) for key in node.children)
            total += sys.getsizeof(node.children) + keys
    return total / (tree.num_blocks * _BLOCK_SIZE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=300)
    add_json_option(parser)
    args = parser.parse_args()
    cache = Cache(args.sequences)
    density = round(bytes_per_token(cache), 2)
    gc.collect()
    gc.disable()
    rows = (
        measure_evict(args.sequences, args.rounds)
        + measure_match(cache, args.rounds)
        + measure_insert(cache, args.rounds)
    )
    rows.append(
        {"operation": "memory, bytes per token", "tokens": args.sequences * 768, "median_us": density, "min_us": ""}
    )
    publish(f"prefix cache with {args.sequences} sequences of 768 tokens", rows, args.json)


if __name__ == "__main__":
    main()
