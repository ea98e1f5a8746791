"""Policy parts by name, and a scheduler put together from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from expediter.core.errors import ConfigurationError
from expediter.kvcache.manager import KVCacheManager
from expediter.scheduling.batching import Batching, IterationLevel, PromptsFirst, StallFree, StaticBatches
from expediter.scheduling.budget import BudgetRule, FixedBudget
from expediter.scheduling.config import SchedulerConfig
from expediter.scheduling.draft import Rules
from expediter.scheduling.memory import FullReservation, MemoryRule, PagedMemory
from expediter.scheduling.ordering.base import Ordering
from expediter.scheduling.ordering.simple import EarliestDeadline, Fcfs, Lifo, PriorityOrder
from expediter.scheduling.preemption import LastInFirstOut, LowestPriority, VictimRule
from expediter.scheduling.scheduler import Policy, Scheduler

_Part = TypeVar("_Part")

ORDERINGS: Mapping[str, Callable[[], Ordering]] = {
    "fcfs": Fcfs,
    "lifo": Lifo,
    "priority": PriorityOrder,
    "earliest_deadline": EarliestDeadline,
}
BATCHINGS: Mapping[str, Callable[[], Batching]] = {
    "stall_free": StallFree,
    "iteration_level": IterationLevel,
    "prompts_first": PromptsFirst,
    "static": StaticBatches,
}
MEMORY_RULES: Mapping[str, Callable[[SchedulerConfig], MemoryRule]] = {
    "paged": lambda config: PagedMemory(config.max_preemptions, config.watermark_blocks),
    "full": lambda _: FullReservation(),
}
BUDGET_RULES: Mapping[str, Callable[[SchedulerConfig], BudgetRule]] = {
    "fixed": lambda config: FixedBudget(config.max_num_batched_tokens),
}
VICTIM_RULES: Mapping[str, Callable[[SchedulerConfig], VictimRule]] = {
    "lowest_priority": lambda config: LowestPriority(config.max_preemptions),
    "last_in": lambda config: LastInFirstOut(config.max_preemptions),
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

    def __post_init__(self) -> None:
        _named(ORDERINGS, self.ordering, "ordering")
        _named(BATCHINGS, self.batching, "batching")
        _named(MEMORY_RULES, self.memory, "memory rule")
        _named(BUDGET_RULES, self.budget, "budget rule")
        _named(VICTIM_RULES, self.victims, "victim rule")


def _named(parts: Mapping[str, _Part], name: str, kind: str) -> _Part:
    if name not in parts:
        raise ConfigurationError(f"no {kind} {name!r}; there are: {', '.join(parts)}")
    return parts[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The KV cache of a replica.

    Args:
        num_blocks: size of the pool.
        block_size: tokens per block.
        prefix_caching: whether ended requests leave their KV for reuse.
    """

    num_blocks: int
    block_size: int = 16
    prefix_caching: bool = True


def build_scheduler(
    *,
    config: SchedulerConfig,
    cache: CacheConfig,
    policy: PolicyConfig = PolicyConfig(),
    ordering: Ordering | None = None,
) -> Scheduler:
    """Return a scheduler over an empty KV cache.

    Args:
        ordering: an object of one's own instead of the policy's; it serves this scheduler only.
    Raises:
        ConfigurationError: a limit or a name is wrong.
    """
    kv = KVCacheManager(
        num_blocks=cache.num_blocks,
        block_size=cache.block_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        prefix_caching=cache.prefix_caching,
    )
    rules = Rules(
        ordering=ORDERINGS[policy.ordering]() if ordering is None else ordering,
        memory=MEMORY_RULES[policy.memory](config),
        budget=BUDGET_RULES[policy.budget](config),
        victims=VICTIM_RULES[policy.victims](config),
    )
    return Scheduler(config, kv, Policy(batching=BATCHINGS[policy.batching](), rules=rules))
