"""Policy parts by name, and a scheduler put together from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from expediter.core.errors import ConfigurationError
from expediter.core.ports import StepTimeModel
from expediter.kvcache.eviction import EvictionPolicy, HintedLru, Lfu, Lru, SegmentedLru
from expediter.kvcache.manager import KVCacheManager
from expediter.scheduling.batching import Batching, IterationLevel, PromptsFirst, StallFree, StaticBatches
from expediter.scheduling.budget import BudgetRule, FixedBudget, SlackBudget
from expediter.scheduling.config import SchedulerConfig
from expediter.scheduling.draft import Rules
from expediter.scheduling.knowledge import Knowledge
from expediter.scheduling.memory import FullReservation, MemoryRule, PagedMemory, PredictedPeak
from expediter.scheduling.ordering.base import Ordering
from expediter.scheduling.ordering.fair import DeficitPrefix, FairShare
from expediter.scheduling.ordering.feedback import FeedbackQueue
from expediter.scheduling.ordering.prefix import LongestPrefix
from expediter.scheduling.ordering.simple import EarliestDeadline, Fcfs, Lifo, PriorityOrder, ShortestPredicted
from expediter.scheduling.ordering.slo import SloOrdering
from expediter.scheduling.preemption import (
    Cheaper,
    LastInFirstOut,
    LeastValue,
    LowestPriority,
    PreemptionMode,
    Recompute,
    Swap,
    VictimRule,
)
from expediter.scheduling.scheduler import Policy, Scheduler

_Part = TypeVar("_Part")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a part may look at: limits, the replica's KV blocks, and what has been learned of it."""

    config: SchedulerConfig
    kv: KVCacheManager
    knowledge: Knowledge


ORDERINGS: Mapping[str, Callable[[Surroundings], Ordering]] = {
    "fcfs": lambda _: Fcfs(),
    "lifo": lambda _: Lifo(),
    "priority": lambda _: PriorityOrder(),
    "earliest_deadline": lambda around: EarliestDeadline(around.knowledge),
    "shortest_predicted": lambda around: ShortestPredicted(around.knowledge),
    "longest_prefix": lambda around: LongestPrefix(around.kv),
    "fair_share": lambda around: FairShare(around.config.tenant_weights),
    "deficit_prefix": lambda around: DeficitPrefix(around.kv, around.config.tenant_weights),
    "feedback": lambda _: FeedbackQueue(),
    "slo": lambda around: SloOrdering(around.kv, around.knowledge),
}
BATCHINGS: Mapping[str, type[Batching]] = {
    "stall_free": StallFree,
    "iteration_level": IterationLevel,
    "prompts_first": PromptsFirst,
    "static": StaticBatches,
}
MEMORY_RULES: Mapping[str, Callable[[Surroundings], MemoryRule]] = {
    "paged": lambda around: PagedMemory(around.config.max_preemptions, around.config.watermark_blocks),
    "full": lambda _: FullReservation(),
    "predicted_peak": lambda around: PredictedPeak(
        around.config.max_preemptions, around.config.max_num_batched_tokens, around.knowledge
    ),
}
BUDGET_RULES: Mapping[str, Callable[[Surroundings], BudgetRule]] = {
    "fixed": lambda around: FixedBudget(around.config.max_num_batched_tokens),
    "slack": lambda around: SlackBudget(around.config.max_num_batched_tokens, around.knowledge),
}
EVICTIONS: Mapping[str, Callable[[int], EvictionPolicy]] = {
    "lru": lambda _: Lru(),
    "lfu": Lfu,
    "segmented_lru": SegmentedLru,
    "lru_with_hint": lambda _: HintedLru(),
}
"""Each is made for a pool of so many blocks."""
VICTIM_RULES: Mapping[str, Callable[[Surroundings], VictimRule]] = {
    "lowest_priority": lambda around: LowestPriority(around.config.max_preemptions),
    "last_in": lambda around: LastInFirstOut(around.config.max_preemptions),
    "least_value": lambda around: LeastValue(around.config.max_preemptions),
}
PREEMPTION_MODES: Mapping[str, Callable[[Surroundings], PreemptionMode]] = {
    "recompute": lambda _: Recompute(),
    "swap": lambda _: Swap(),
    "cheaper": lambda around: Cheaper(around.kv, around.knowledge),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """Names of the parts, as a preset gives them.

    Raises:
        ConfigurationError: there is no part of that name; the message lists those that exist.
    """

    ordering: str = "fcfs"
    batching: str = "stall_free"
    memory: str = "paged"
    budget: str = "fixed"
    victims: str = "lowest_priority"
    preemption_mode: str = "cheaper"
    eviction: str = "lru"

    def __post_init__(self) -> None:
        _named(ORDERINGS, self.ordering, "ordering")
        _named(BATCHINGS, self.batching, "batching")
        _named(MEMORY_RULES, self.memory, "memory rule")
        _named(BUDGET_RULES, self.budget, "budget rule")
        _named(VICTIM_RULES, self.victims, "victim rule")
        _named(PREEMPTION_MODES, self.preemption_mode, "preemption mode")
        _named(EVICTIONS, self.eviction, "eviction policy")


def _named(parts: Mapping[str, _Part], name: str, kind: str) -> _Part:
    if name not in parts:
        raise ConfigurationError(f"no {kind} {name!r}; there are: {', '.join(parts)}")
    return parts[name]


def make_policy(names: PolicyConfig, around: Surroundings, ordering: Ordering | None = None) -> Policy:
    """Return fresh parts for one scheduler.

    Args:
        ordering: an object of one's own instead of the named one; it serves this scheduler only.
    """
    rules = Rules(
        ordering=ORDERINGS[names.ordering](around) if ordering is None else ordering,
        memory=MEMORY_RULES[names.memory](around),
        budget=BUDGET_RULES[names.budget](around),
        victims=VICTIM_RULES[names.victims](around),
        preemption=PREEMPTION_MODES[names.preemption_mode](around),
    )
    return Policy(batching=BATCHINGS[names.batching](), rules=rules)


def limits_with_budget(
    limits: SchedulerConfig, policy: PolicyConfig, max_num_batched_tokens: int | None
) -> SchedulerConfig:
    """Return the limits with the token budget that was asked for, or, if none was, one that suits the batching.

    A batching that computes prompts whole needs a budget that holds the longest of them, beside everybody's decode.

    Raises:
        ConfigurationError: the budget that was asked for is too small.
    """
    if max_num_batched_tokens is None:
        if not BATCHINGS[policy.batching].whole_prompts:
            return limits
        least = limits.max_model_len + limits.max_num_seqs
        return replace(limits, max_num_batched_tokens=max(limits.max_num_batched_tokens, least))
    if BATCHINGS[policy.batching].whole_prompts and max_num_batched_tokens < limits.max_model_len:
        raise ConfigurationError(
            f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least max_model_len "
            f"({limits.max_model_len}): the batching {policy.batching!r} computes a prompt in one step; leave it out "
            f"to have it set, or lower max_model_len"
        )
    return replace(limits, max_num_batched_tokens=max_num_batched_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The KV cache of a replica.

    Args:
        num_blocks: size of the pool.
        block_size: tokens per block.
        prefix_caching: whether ended requests leave their KV for reuse.
        num_host_blocks: blocks in host memory for the KV of preempted requests.
        block_swap_s: time to move one block there or back; None if it is not known.
        max_pinned_share: most of the pool that clients' pins may hold, in [0, 1].
    """

    num_blocks: int
    block_size: int = 16
    prefix_caching: bool = True
    num_host_blocks: int = 0
    block_swap_s: float | None = None
    max_pinned_share: float = 0.25


def build_scheduler(
    *,
    config: SchedulerConfig,
    cache: CacheConfig,
    policy: PolicyConfig | None = None,
    ordering: Ordering | None = None,
    prior: StepTimeModel | None = None,
) -> Scheduler:
    """Return a scheduler over an empty KV cache.

    Args:
        policy: names of the parts; None for those of `PolicyConfig`.
        ordering: an object of one's own instead of the policy's; it serves this scheduler only.
        prior: analytic step-time model that the policy starts from, if there is one.
    Raises:
        ConfigurationError: a limit or a name is wrong.
    """
    policy = policy or PolicyConfig()
    kv = KVCacheManager(
        num_blocks=cache.num_blocks,
        block_size=cache.block_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        prefix_caching=cache.prefix_caching,
        eviction=EVICTIONS[policy.eviction](cache.num_blocks),
        max_pinned_share=cache.max_pinned_share,
        num_host_blocks=cache.num_host_blocks,
    )
    knowledge = Knowledge(prior, cache.block_swap_s)
    parts = make_policy(policy, Surroundings(config, kv, knowledge), ordering)
    return Scheduler(config, kv, parts, knowledge)
