"""What a replica process is told at its start, through standard input: nothing of it shows in a process list."""

from __future__ import annotations

import msgspec

from expediter.core.errors import ReplicaError
from expediter.scheduling.build import PolicyConfig
from expediter.scheduling.config import SchedulerConfig
from expediter.telemetry.logging_setup import LogFormat


class ReplicaSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One replica.

    Attributes:
        replica_id: stable number; a restarted replica keeps it.
        model: folder of the model.
        dtype, device: as torch names them; "auto" leaves the choice to the executor.
        num_threads: CPU threads of the executor.
        block_size: tokens per KV block.
        num_blocks: size of the KV pool; None to derive it from memory.
        kv_cache_memory_bytes: memory of the KV pool; None to derive it from what is free.
        swap_space_bytes: host memory for the KV of preempted requests.
        scheduler: limits; its max_model_len is replaced by `max_model_len` or by what model and pool can hold.
        max_model_len: asked for by the operator, in tokens: refused if the pool cannot hold it. None: as long as fits.
        max_num_batched_tokens: asked for by the operator. None: that of `scheduler`, or what the batching needs.
        policy, prefix_caching: of the preset.
        log_format: of the lines that the replica logs.
        socket_fd: inherited end of the socket pair to the gateway.
        parent_pid: the gateway; the replica exits when it is gone.
    """

    replica_id: int
    model: str
    dtype: str
    device: str
    num_threads: int
    block_size: int
    num_blocks: int | None
    kv_cache_memory_bytes: int | None
    swap_space_bytes: int = 0
    scheduler: SchedulerConfig
    max_model_len: int | None
    max_num_batched_tokens: int | None = None
    policy: PolicyConfig
    prefix_caching: bool
    log_format: LogFormat = "text"
    socket_fd: int = -1
    parent_pid: int = -1


def encode_spec(spec: ReplicaSpec) -> bytes:
    """Return the spec as JSON."""
    return msgspec.json.encode(spec)


def decode_spec(raw: bytes) -> ReplicaSpec:
    """Return the spec.

    Raises:
        ReplicaError: it is malformed.
    """
    try:
        return msgspec.json.decode(raw, type=ReplicaSpec)
    except msgspec.MsgspecError as error:
        raise ReplicaError(f"malformed replica spec: {error}") from error
