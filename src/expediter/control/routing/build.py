"""Routing policies by name, and their thresholds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np

from expediter.control.prefix_index import DEFAULT_BLOCK_TOKENS, DEFAULT_MAX_BYTES, PrefixIndex
from expediter.control.routing.base import Router
from expediter.control.routing.caches import AskedCaches, CacheView, IndexedCaches
from expediter.control.routing.conductor import EARLY_REJECTIONS, Conductor, EarlyRejection
from expediter.control.routing.keyed import ConsistentHash, PowerOfTwo, Random, Sessions
from expediter.control.routing.parts import (
    BlocksOfWork,
    BoundedShare,
    ExploitOrExplore,
    FullestThatMeets,
    PredictedTtft,
    SessionHome,
    TenantShare,
    TokensToCompute,
)
from expediter.control.routing.scored import Filter, Scored, Softmax
from expediter.control.routing.simple import LeastLoad, RoundRobin
from expediter.control.routing.splitwise import Splitwise
from expediter.core.errors import ConfigurationError
from expediter.core.ranges import require_above_zero, require_at_least, require_not_negative

PrefixKnowledge = Literal["dispatched", "exact"]
"""Where a router learns what caches hold: from what it sent there, or by asking (replicas of a simulation only)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingConfig:
    """A routing policy and its thresholds; each policy reads those that concern it.

    Args:
        name: of the policy, one of `ROUTINGS`.
        seed: of the policies that draw.
        prefix_knowledge: see `PrefixKnowledge`.
        index_block_tokens, index_max_bytes: of the prefix index.
        max_relative_load: most requests of a replica as a multiple of the mean: `cache_aware`, `predicted_ttft`,
            `session`, `consistent_hash`.
        max_extra_requests: on top of that, but for `consistent_hash`.
        keep_sessions: whether a session stays on its replica as long as that has no more than its share:
            `cache_aware`, `predicted_ttft`.
        tenant_quantum_tokens: how far a tenant's work on one replica may be ahead of the others: `predicted_ttft`.
        prefill_weight, temperature: of `dynamo`.
        fetch_ratio: Mooncake's threshold for copying a prefix: the best hit as a multiple of a replica's own.
        early_rejection, decode_time_s: of `mooncake`; None for the time that explains how many decode now.
        lend_above_tokens, lend_above_kv: when pools lend replicas to each other: `splitwise`.
    Raises:
        ConfigurationError: there is no policy of that name (the message lists those that exist), or a number is out of
            range.
    """

    name: str = "least_load"
    seed: int = 0
    prefix_knowledge: PrefixKnowledge = "dispatched"
    index_block_tokens: int = DEFAULT_BLOCK_TOKENS
    index_max_bytes: int = DEFAULT_MAX_BYTES
    max_relative_load: float = 1.5
    max_extra_requests: float = 2.0
    keep_sessions: bool = False
    tenant_quantum_tokens: int = 65_536
    prefill_weight: float = 1.0
    temperature: float = 0.0
    fetch_ratio: float = 4.0
    early_rejection: EarlyRejection = "none"
    decode_time_s: float | None = None
    lend_above_tokens: int = 8192
    lend_above_kv: float = 0.9

    def __post_init__(self) -> None:
        if self.name not in ROUTINGS:
            raise ConfigurationError(f"no routing policy {self.name!r}; there are: {', '.join(ROUTINGS)}")
        for field, names in (("prefix_knowledge", get_args(PrefixKnowledge)), ("early_rejection", EARLY_REJECTIONS)):
            if getattr(self, field) not in names:
                raise ConfigurationError(f"no {field} {getattr(self, field)!r}; there are: {', '.join(names)}")
        require_at_least(1, self, "max_relative_load", "fetch_ratio")
        require_not_negative(self, "max_extra_requests", "temperature")
        require_above_zero(self, "tenant_quantum_tokens", "prefill_weight", "decode_time_s")
        require_above_zero(self, "lend_above_tokens", "lend_above_kv")
        self.index()

    def caches(self) -> CacheView:
        """Return fresh knowledge of prefixes."""
        return AskedCaches() if self.prefix_knowledge == "exact" else IndexedCaches(self.index())

    def index(self) -> PrefixIndex:
        """Return an empty index of prefixes."""
        return PrefixIndex(block_tokens=self.index_block_tokens, max_bytes=self.index_max_bytes)

    def rng(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)

    def filters(self) -> list[Filter]:
        """Return what bounds a replica's share, and keeps a session where it is inside of that."""
        bound = BoundedShare(self.max_relative_load, self.max_extra_requests)
        return [bound, SessionHome()] if self.keep_sessions else [bound]


ROUTINGS: Final[Mapping[str, Callable[[RoutingConfig, CacheView], Router]]] = {
    "round_robin": lambda *_: RoundRobin(),
    "random": lambda config, _: Random(config.rng()),
    "least_load": lambda *_: LeastLoad(),
    "power_of_two": lambda config, _: PowerOfTwo(config.rng()),
    "session": lambda config, _: Sessions(config.max_relative_load, config.max_extra_requests),
    "consistent_hash": lambda config, _: ConsistentHash(config.max_relative_load),
    "cache_aware": lambda config, caches: Scored(caches, TokensToCompute(), config.filters()),
    "predicted_ttft": lambda config, caches: Scored(
        caches, PredictedTtft(), [*config.filters(), TenantShare(config.tenant_quantum_tokens)]
    ),
    "preble": lambda _, caches: Scored(caches, ExploitOrExplore()),
    "dynamo": lambda config, caches: Scored(
        caches, BlocksOfWork(config.prefill_weight), picker=Softmax(config.temperature, config.rng())
    ),
    "polyserve": lambda _, caches: Scored(caches, FullestThatMeets()),
    "splitwise": lambda config, _: Splitwise(config.lend_above_tokens, config.lend_above_kv),
    "mooncake": lambda config, caches: Conductor(
        caches,
        theta=config.fetch_ratio,
        early_rejection=config.early_rejection,
        decode_time_s=config.decode_time_s,
    ),
}
COPYING_ROUTINGS: Final = frozenset({"mooncake"})
"""Policies that ask for copies of prefixes."""
SESSION_ROUTINGS: Final = frozenset({"session", "consistent_hash"})
"""Those that look at a request's session, whatever the thresholds."""


def make_router(config: RoutingConfig, caches: CacheView | None = None) -> Router:
    """Return a fresh router.

    Args:
        caches: what it shall know of prefixes; None to find out for itself, as `config` says.
    """
    return ROUTINGS[config.name](config, config.caches() if caches is None else caches)
