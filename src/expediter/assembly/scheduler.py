"""Put a scheduler together."""

from __future__ import annotations

from dataclasses import dataclass

from expediter.core.ports import StepTimeModel
from expediter.kvcache.manager import KVCacheManager
from expediter.scheduling.config import SchedulerConfig
from expediter.scheduling.knowledge import Knowledge
from expediter.scheduling.ordering.base import Ordering
from expediter.scheduling.policies import PolicyConfig, Surroundings, make_policy
from expediter.scheduling.scheduler import Scheduler


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
    kv = KVCacheManager(
        num_blocks=cache.num_blocks,
        block_size=cache.block_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        prefix_caching=cache.prefix_caching,
    )
    knowledge = Knowledge(prior)
    parts = make_policy(policy or PolicyConfig(), Surroundings(config, kv, knowledge), ordering)
    return Scheduler(config, kv, parts, knowledge)
