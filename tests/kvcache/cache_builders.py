"""A cache to fill, and the eviction policies."""

import copy

import numpy as np

from expediter.core.request import CacheHint
from expediter.kvcache.eviction import HintedLru, Lfu, Lru, SegmentedLru
from expediter.kvcache.manager import KVCacheManager

DROP = CacheHint(drop=True)


def raw(*tokens: int) -> bytes:
    return np.array(tokens, np.int32).tobytes()


class Cache:
    """A manager with blocks of one token; each call is a moment later than the last."""

    def __init__(self, policy, num_blocks=12, max_pinned_share=0.5) -> None:
        self.kv = KVCacheManager(
            num_blocks=num_blocks,
            block_size=1,
            max_num_seqs=8,
            max_model_len=num_blocks,
            eviction=policy,
            max_pinned_share=max_pinned_share,
        )
        self.now_s = 0.0
        self.slots = list(range(8))

    def hold(self, *tokens: int, salt: str = "") -> int | None:
        """Start a sequence and compute all of it; return its slot, None if it finds no room."""
        self.now_s += 1
        match = self.kv.match(raw(*tokens), salt)
        if not self.slots or not self.kv.admit(self.slots[-1], match, len(tokens), 0, self.now_s):
            return None
        slot = self.slots.pop()
        self.kv.commit(slot, raw(*tokens), salt, len(tokens))
        self.kv.check()
        return slot

    def release(self, slot: int, hint: CacheHint | None = None) -> None:
        self.now_s += 1
        self.kv.release(slot, self.now_s, hint)
        self.slots.append(slot)
        self.kv.check()

    def put(self, *tokens: int, hint: CacheHint | None = None) -> None:
        slot = self.hold(*tokens)
        assert slot is not None
        self.release(slot, hint)

    def evict(self, count: int) -> list[int]:
        """Evict `count` blocks, all at once as well as one by one, and return their ids."""
        twin = copy.deepcopy(self.kv)
        one_by_one = [int(twin.tree.evict(1)[0]) for _ in range(count)]
        evicted = self.kv.tree.evict(count)
        assert evicted.tolist() == one_by_one
        assert [entry_of(node) for node in self.kv.tree.nodes.by_id] == [
            entry_of(node) for node in twin.tree.nodes.by_id
        ]
        self.kv.pool.push(evicted)
        self.kv.check()
        return one_by_one

    def evict_tokens(self, count: int) -> list[int]:
        """Evict `count` blocks and return the tokens that lay in them."""
        held = {
            block: token
            for node in self.kv.tree.nodes
            for block, token in zip(node.blocks.tolist(), np.frombuffer(node.tokens, np.int32).tolist(), strict=True)
        }
        return [held[block] for block in self.evict(count)]


def entry_of(node):
    return None if node is None else (node.tokens, node.blocks.tolist(), node.history, node.stamp, node.used_s)


def policies(num_blocks=12):
    return {
        "lru": Lru(),
        "lfu": Lfu(num_blocks),
        "segmented_lru": SegmentedLru(num_blocks, 0.5),
        "lru_with_hint": HintedLru(),
    }
