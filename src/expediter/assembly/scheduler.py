"""Put a scheduler together."""

from __future__ import annotations

from expediter.kvcache.manager import KVCacheManager
from expediter.scheduling.config import SchedulerConfig
from expediter.scheduling.ordering import Ordering, make_ordering
from expediter.scheduling.scheduler import Scheduler


def build_scheduler(
    *,
    config: SchedulerConfig,
    ordering: str | Ordering = "fcfs",
    prefix_caching: bool = True,
    num_blocks: int,
    block_size: int,
) -> Scheduler:
    """Return a scheduler over an empty KV cache of `num_blocks` blocks of `block_size` tokens.

    Args:
        ordering: a name, or an object of one's own with the `Ordering` protocol.
    Raises:
        ConfigurationError: a limit or a name is wrong.
    """
    kv = KVCacheManager(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        prefix_caching=prefix_caching,
    )
    return Scheduler(config, kv, make_ordering(ordering) if isinstance(ordering, str) else ordering)
