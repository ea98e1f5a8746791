"""The process of a replica: `python -m expediter.assembly.replica`, started by the supervisor only."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from expediter.core.errors import ConfigurationError
from expediter.core.ports import Executor, ExecutorLimits
from expediter.runtime.process import BuiltReplica, replica_main
from expediter.runtime.spec import ReplicaSpec
from expediter.scheduling.build import CacheConfig, build_scheduler, limits_with_budget
from expediter.telemetry.logging_setup import setup_logging


def build_replica(spec: ReplicaSpec) -> BuiltReplica:
    """Load the model and put the replica together.

    Raises:
        ConfigurationError: the model, a limit or the size of the KV pool does not work.
    """
    from expediter.engine.model import EngineConfig, load_executor  # noqa: PLC0415 - torch: not for other executors

    setup_logging(f"replica-{spec.replica_id}", log_format=spec.log_format)
    executor = load_executor(
        EngineConfig(
            model=Path(spec.model),
            dtype=spec.dtype,
            device=spec.device,
            block_size=spec.block_size,
            num_blocks=spec.num_blocks,
            kv_cache_bytes=spec.kv_cache_memory_bytes,
            swap_space_bytes=spec.swap_space_bytes,
            max_num_seqs=spec.scheduler.max_num_seqs,
            max_model_len=spec.max_model_len,
            num_threads=spec.num_threads,
        )
    )
    return assemble_replica(spec, executor)


def assemble_replica(spec: ReplicaSpec, executor: Executor) -> BuiltReplica:
    """Put a scheduler in front of an executor, with limits that both can keep.

    Raises:
        ConfigurationError: the operator asked for longer sequences than the KV pool holds, or for a budget that does
            not hold a prompt that is to be computed whole.
    """
    limits = executor.limits
    max_model_len = fitting_model_len(limits, spec.max_model_len)
    scheduler = build_scheduler(
        config=limits_with_budget(
            replace(spec.scheduler, max_model_len=max_model_len), spec.policy, spec.max_num_batched_tokens
        ),
        cache=CacheConfig(
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            prefix_caching=spec.prefix_caching,
            num_host_blocks=limits.num_host_blocks,
            block_swap_s=limits.block_swap_s,
        ),
        policy=spec.policy,
    )
    return BuiltReplica(scheduler, executor, max_model_len)


def fitting_model_len(limits: ExecutorLimits, asked: int | None) -> int:
    """Return the longest sequence to accept, in tokens: what was asked for, or what model and KV pool can hold.

    Raises:
        ConfigurationError: more was asked for than the pool holds.
    """
    num_kv_tokens = limits.num_blocks * limits.block_size
    if asked is None:
        return min(limits.max_model_len, num_kv_tokens)
    if asked > num_kv_tokens:
        raise ConfigurationError(
            f"max_model_len {asked} exceeds the KV cache: {limits.num_blocks} blocks of {limits.block_size} tokens "
            f"hold {num_kv_tokens}"
        )
    return min(asked, limits.max_model_len)


if __name__ == "__main__":
    sys.exit(replica_main(build_replica))
