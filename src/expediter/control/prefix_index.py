"""Who holds which prefix: one tree over the prompts of the whole fleet.

A node stands for a prefix of whole blocks, and knows the replicas that hold it as the bits of one integer. It is found
by a 64-bit number made from all its tokens, so that nothing but numbers is kept and a prompt's path is looked up
without touching its tokens again. Two prefixes with one number would send a request to a replica that holds less than
it was thought to, and nothing worse: what is reused is compared token by token where the blocks are.

What is recorded is what was sent to a replica, so the index says what its cache should hold. It forgets as the replica
does, least recently used first and tail before head, once it has recorded more for it than the replica's cache takes;
and in the same order for everybody once the index itself has reached its bound on memory.

Holding a prefix means holding all shorter ones: every use of a path renews its nodes from the longest to the shortest,
so what is oldest is always the end of some path, for each replica and for the whole.
"""

from __future__ import annotations

import hashlib
import sys
from collections import OrderedDict
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from expediter.core.errors import ConfigurationError, InvariantError
from expediter.core.request import TokenArray

DEFAULT_BLOCK_TOKENS: Final = 64
DEFAULT_MAX_BYTES: Final = 256 << 20

# What CPython takes at most per entry; `tests/control/test_prefix_index.py` holds the account to what is allocated.
_NODE_BYTES: Final = 170
_HOLDING_BYTES: Final = 140

PrefixHolders = list[tuple[int, int]]
"""(tokens, holders) from the shortest prefix to the longest: who has that bit set holds at least so many tokens.

Later holders are a subset of earlier ones. Bit `i` is slot `i`.
"""

PrefixKeys = list[int]
"""A number per prefix of whole blocks of a prompt, the shortest first."""


class PrefixIndex:
    """Which leading blocks of a prompt each replica holds, as far as requests sent to it tell.

    Args:
        block_tokens: tokens per block of the index; a prefix counts in whole ones. Coarse is fast and small.
        max_bytes: bound on its memory, all replicas together.
    Attributes:
        num_bytes: memory that it takes, by an estimate that is not below what is allocated.
    Raises:
        ConfigurationError: a number is too small.
    """

    def __init__(self, *, block_tokens: int = DEFAULT_BLOCK_TOKENS, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        if block_tokens < 1:
            raise ConfigurationError(f"block_tokens must be at least 1, not {block_tokens}")
        if max_bytes < 1 << 16:
            raise ConfigurationError(f"the prefix index needs at least {1 << 16} bytes, not {max_bytes}")
        self.block_tokens = block_tokens
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._holders: OrderedDict[int, int] = OrderedDict()
        self._held: dict[int, OrderedDict[int, None]] = {}
        self._max_blocks: dict[int, int] = {}

    @property
    def num_nodes(self) -> int:
        return len(self._holders)

    def num_held_tokens(self, slot: int) -> int:
        """Return how many tokens a replica is taken to hold; what several prompts share counts once."""
        return len(self._held.get(slot, ())) * self.block_tokens

    def keys(self, tokens: TokenArray, salt: str = "") -> PrefixKeys:
        """Return what `match` and `record` find a prompt's prefixes by.

        Args:
            tokens: int32, shape [num_tokens]; what does not fill a block at the end is left out.
            salt: prompts under different salts never share.
        """
        return prefix_keys(tokens, salt, self.block_tokens)

    def match(self, keys: PrefixKeys) -> PrefixHolders:
        """Return who holds how much of a prompt's beginning. Changes nothing.

        Cost: one look-up per block of the matched part.
        """
        found: PrefixHolders = []
        get, holders, num_blocks = self._holders.get, 0, 0
        for key in keys:
            now = get(key)
            if now is None:
                break
            if now != holders and num_blocks:
                # Who has dropped a block from the middle cannot use what comes behind it.
                now &= holders
                if not now:
                    break
                if now != holders:
                    found.append((num_blocks * self.block_tokens, holders))
            holders = now
            num_blocks += 1
        if num_blocks:
            found.append((num_blocks * self.block_tokens, holders))
        return found

    def record(self, slot: int, keys: PrefixKeys) -> None:
        """Note that a replica will hold a prompt: it was sent there, or its KV was."""
        bit = 1 << slot
        held = self._held.get(slot)
        if held is None:
            held = self._held[slot] = OrderedDict()
        all_holders, own_bytes = self._holders, _NODE_BYTES + sys.getsizeof(bit) + _HOLDING_BYTES
        renew, renew_own, num_new = all_holders.move_to_end, held.move_to_end, 0
        for key in reversed(keys):
            holders = all_holders.get(key)
            if holders is None:
                all_holders[key] = bit
                held[key] = None
                num_new += 1
                continue
            renew(key)
            if holders & bit:
                renew_own(key)
            else:
                all_holders[key] = holders | bit
                held[key] = None
                self.num_bytes += sys.getsizeof(holders | bit) - sys.getsizeof(holders) + _HOLDING_BYTES
        max_blocks = self._max_blocks.get(slot, len(held))
        while len(held) > max_blocks:
            key = held.popitem(last=False)[0]
            if all_holders[key] == bit:
                del all_holders[key]
                num_new -= 1
            else:
                self._let_go(slot, key)
        self.num_bytes += num_new * own_bytes
        while self.num_bytes > self._max_bytes and all_holders:
            key = next(iter(all_holders))
            for holder in _bits(all_holders[key]):
                del self._held[holder][key]
                self._let_go(holder, key)

    def drop(self, slot: int, keys: PrefixKeys) -> None:
        """Note that a replica no longer holds the blocks at the ends of these prefixes; others are left alone."""
        held = self._held.get(slot)
        if held is None:
            return
        for key in keys:
            if key in held:
                del held[key]
                self._let_go(slot, key)

    def limit(self, slot: int, max_tokens: int) -> None:
        """Say how many tokens a replica's cache holds; from then on the index forgets what no longer fits there."""
        self._max_blocks[slot] = max(1, max_tokens // self.block_tokens)

    def remove(self, slot: int) -> None:
        """Forget a replica. Cost: one step per block that it held."""
        for key in self._held.pop(slot, ()):
            self._let_go(slot, key)
        self._max_blocks.pop(slot, None)

    def check(self) -> None:
        """Verify that holders, lists and the account agree.

        Raises:
            InvariantError: they do not (a bug of ours).
        """
        holders = dict.fromkeys(self._holders, 0)
        for slot, held in self._held.items():
            for key in held:
                holders[key] = holders.get(key, 0) | 1 << slot
        if holders != dict(self._holders) or 0 in holders.values():
            raise InvariantError("a block of the prefix index has other holders than it says")
        num_bytes = sum(_NODE_BYTES + sys.getsizeof(bits) for bits in holders.values())
        num_bytes += _HOLDING_BYTES * sum(map(len, self._held.values()))
        if num_bytes != self.num_bytes:
            raise InvariantError(f"the prefix index takes {num_bytes} bytes and says {self.num_bytes}")

    def _let_go(self, slot: int, key: int) -> None:
        """Take a replica off a node that is no longer in its own list; without holders the node goes."""
        holders = self._holders[key]
        rest = holders & ~(1 << slot)
        self.num_bytes -= _HOLDING_BYTES + sys.getsizeof(holders)
        if rest:
            self._holders[key] = rest
            self.num_bytes += sys.getsizeof(rest)
        else:
            del self._holders[key]
            self.num_bytes -= _NODE_BYTES


def cached_tokens(found: PrefixHolders) -> dict[int, int]:
    """Return how many leading tokens each slot holds; who is not in it holds none. Cost: one step per holder."""
    tokens: dict[int, int] = {}
    seen = 0
    for num_tokens, holders in reversed(found):
        for slot in _bits(holders & ~seen):
            tokens[slot] = num_tokens
        seen |= holders
    return tokens


def _odd_numbers(seed: int) -> npt.NDArray[np.uint64]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 1 << 63, 1 << 12, np.uint64) * np.uint64(2) + np.uint64(1)


_ONE: Final = np.uint64(1)
_ALL_BITS: Final = (1 << 64) - 1
# The same in every process: keys of two processes can be compared.
_TOKEN_FACTORS: Final = _odd_numbers(0x5EED)
_PLACE_FACTORS: Final = _odd_numbers(0xF00D)


def prefix_keys(tokens: TokenArray, salt: str, block_tokens: int) -> PrefixKeys:
    """Return a 64-bit number per prefix of whole blocks; equal for equal tokens and salts, in every process.

    A prefix is the sum of its tokens, each times a factor of its place in the block and one of the block's place:
    multilinear hashing modulo 2**64.

    Cost: for a short prompt, that of eight calls of NumPy.
    """
    return continued_keys(tokens, root_key(salt), 0, block_tokens)


def root_key(salt: str) -> int:
    """Return the number of the empty prefix under a salt."""
    return _salt_number(salt) if salt else 0


def continued_keys(tokens: TokenArray, key: int, num_blocks_before: int, block_tokens: int) -> PrefixKeys:
    """Return the numbers of the prefixes that continue another one.

    Args:
        tokens: behind it.
        key: of that prefix; `root_key` for the empty one.
        num_blocks_before: blocks of it.
    """
    num_blocks = len(tokens) // block_tokens
    if not num_blocks:
        return []
    factors = _first(_TOKEN_FACTORS, block_tokens)
    blocks = tokens[: num_blocks * block_tokens].reshape(num_blocks, block_tokens).astype(np.uint64) @ factors
    blocks += _ONE  # a block of zeros is not nothing
    places = _first(_PLACE_FACTORS, num_blocks_before + num_blocks)
    blocks *= places[num_blocks_before:] if num_blocks_before else places
    blocks[0] = (int(blocks[0]) + key) & _ALL_BITS
    keys: PrefixKeys = blocks.cumsum().tolist()
    return keys


def _first(factors: npt.NDArray[np.uint64], number: int) -> npt.NDArray[np.uint64]:
    """Return so many factors; those of long prompts come again, each time three times as large."""
    while number > len(factors):
        factors = np.concatenate((factors, factors[-len(_TOKEN_FACTORS) :] * np.uint64(3)))
    return factors[:number]


@lru_cache(maxsize=1024)
def _salt_number(salt: str) -> int:
    return int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=8).digest(), "little")


def _bits(number: int) -> list[int]:
    slots = []
    while number:
        lowest = number & -number
        slots.append(lowest.bit_length() - 1)
        number ^= lowest
    return slots
