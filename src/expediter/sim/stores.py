"""Storage tiers below the replicas' caches: host memory and disks of each, and a store that the cluster shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, get_args

from expediter.core.errors import ConfigurationError
from expediter.core.request import Request
from expediter.kvcache.manager import KVCacheManager
from expediter.sim.network import Link, Network, Passage

TierName = Literal["host", "disk", "remote"]
TIERS: Final[tuple[TierName, ...]] = get_args(TierName)
_REMOTE: Final = -2
"""The shared store's number in the network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """A tier that keeps the KV of prompts.

    Args:
        tier: "host" and "disk" are each replica's own, "remote" is one for all, behind the network.
        num_bytes: size, of each replica's or of the whole.
        bandwidth: of reading, byte/s; None for what the tier's hardware has.
        latency_s: until the first byte comes.
    Raises:
        ConfigurationError: there is no such tier, or a figure is out of range.
    """

    tier: TierName
    num_bytes: int
    bandwidth: float | None = None
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if self.tier not in TIERS:
            raise ConfigurationError(f"no store {self.tier!r}; there are: {', '.join(TIERS)}")
        if self.num_bytes < 1:
            raise ConfigurationError(f"store {self.tier}: it cannot hold {self.num_bytes} bytes")
        if self.bandwidth is not None and not self.bandwidth > 0:
            raise ConfigurationError(f"store {self.tier}: bandwidth must be above 0 byte/s, not {self.bandwidth}")
        if not self.latency_s >= 0:
            raise ConfigurationError(f"store {self.tier}: latency must not be negative, not {self.latency_s} s")


class PrefixStore:
    """Which beginnings of prompts a tier holds, in whole blocks, those used longest ago going first.

    A prefix cache that no sequence runs on; what comes in is a landing.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._kv = KVCacheManager(num_blocks=num_blocks, block_size=block_size, max_num_seqs=1, max_model_len=1)

    def num_tokens(self, tokens: bytes, salt: str) -> int:
        """Return how many leading tokens it holds."""
        match = self._kv.landings.match(tokens, salt, len(tokens) // 4)
        return match.num_blocks * self._kv.block_size

    def put(self, tokens: bytes, salt: str, now_s: float) -> None:
        """Take the full blocks of a prompt in, or as many as fit."""
        size = self._kv.block_size
        num_tokens = min(len(tokens) // 4 // size, self._kv.num_blocks) * size
        landings = self._kv.landings
        landing = landings.reserve(tokens, salt, num_tokens, num_reserved=num_tokens, spare_blocks=0, now_s=now_s)
        if landing is not None:
            landings.complete(landing, now_s)
            landings.release(landing, now_s)


class Shelf(NamedTuple):
    """What one tier holds of a prompt, for one replica."""

    tier: TierName
    num_tokens: int
    fetch_s: float


@dataclass(slots=True)
class StoreTotals:
    """What a tier was good for.

    Attributes:
        num_fetches: requests that a beginning was fetched for.
        num_tokens: fetched, beyond what the replica had cached itself.
    """

    num_fetches: int = 0
    num_tokens: int = 0
    num_bytes: int = 0


class Stores:
    """All tiers of a cluster. Writing goes on beside everything else and takes no time; reading queues.

    Args:
        network: between replicas; the shared store is on it too.
        local: each replica's ways to its host memory and disk, by replica.
        block_size: tokens per block.
    Attributes:
        totals: by tier.
    """

    def __init__(
        self,
        tiers: Sequence[StoreConfig],
        network: Network,
        local: Mapping[int, Mapping[TierName, Link]],
        *,
        kv_bytes_per_token: float,
        block_size: int,
    ) -> None:
        self._tiers = {config.tier: config for config in tiers}
        self._network = network
        self._kv_bytes_per_token = kv_bytes_per_token
        self._block_size = block_size
        self._local = {
            tier: Network({replica: links[tier] for replica, links in local.items()}, 1)
            for tier in self._tiers
            if tier != "remote"
        }
        self._shared = None
        if "remote" in self._tiers:
            remote = self._tiers["remote"]
            network.add(_REMOTE, Link(bandwidth=remote.bandwidth or REMOTE_BANDWIDTH, latency_s=remote.latency_s))
            self._shared = self._new_store("remote")
        self._own: dict[tuple[TierName, int], PrefixStore] = {
            (tier, replica): self._new_store(tier) for tier in self._local for replica in local
        }
        self.totals = {tier: StoreTotals() for tier in self._tiers}

    def _new_store(self, tier: TierName) -> PrefixStore:
        num_tokens = self._tiers[tier].num_bytes / max(self._kv_bytes_per_token, 1e-9)
        return PrefixStore(max(1, int(num_tokens / self._block_size)), self._block_size)

    def put(self, request: Request, replica_id: int, now_s: float) -> None:
        """Keep a prompt that a replica has computed."""
        tokens = request.prompt.tobytes()
        for (_, owner), store in self._own.items():
            if owner == replica_id:
                store.put(tokens, request.cache_salt, now_s)
        if self._shared is not None:
            self._shared.put(tokens, request.cache_salt, now_s)

    def find(self, request: Request, replica_id: int, num_cached: int, now_s: float) -> list[Shelf]:
        """Return what each tier holds of a prompt beyond `num_cached` tokens, and when that would be there."""
        tokens, shelves = request.prompt.tobytes(), []
        for tier in self._tiers:
            store = self._shared if tier == "remote" else self._own[tier, replica_id]
            assert store is not None
            num_tokens = min(store.num_tokens(tokens, request.cache_salt), _reusable(request, self._block_size))
            if num_tokens > num_cached:
                network, source = self._way(tier, replica_id)
                num_bytes = self.num_bytes(num_tokens - num_cached)
                fetch_s = network.arrival_s(source, replica_id, num_bytes, now_s) - now_s
                shelves.append(Shelf(tier, num_tokens, fetch_s))
        return shelves

    def num_bytes(self, num_tokens: int) -> int:
        return int(num_tokens * self._kv_bytes_per_token)

    def read(self, tier: TierName, replica_id: int, num_tokens: int, now_s: float) -> Passage:
        """Take a place in the tier's queue for so many tokens."""
        network, source = self._way(tier, replica_id)
        totals = self.totals[tier]
        totals.num_fetches += 1
        totals.num_tokens += num_tokens
        totals.num_bytes += self.num_bytes(num_tokens)
        return network.send(source, replica_id, self.num_bytes(num_tokens), now_s)

    def give_up(self, tier: TierName, passage: Passage, now_s: float) -> None:
        """Stop reading."""
        self._way(tier, passage.target)[0].give_up(passage, now_s)

    def replica_lost(self, replica_id: int) -> None:
        """Forget the host memory of a replica; its disk stays."""
        if "host" in self._tiers:
            self._own["host", replica_id] = self._new_store("host")

    def _way(self, tier: TierName, replica_id: int) -> tuple[Network, int]:
        return (self._network, _REMOTE) if tier == "remote" else (self._local[tier], replica_id)


REMOTE_BANDWIDTH: Final = 25e9
"""byte/s out of a shared store that says nothing of its own: one 200 Gbit/s port."""


def _reusable(request: Request, block_size: int) -> int:
    """Tokens of a prompt that can be reused, in whole blocks: a step must compute at least one."""
    return (request.num_prompt_tokens - 1) // block_size * block_size
