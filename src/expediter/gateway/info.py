"""What a server says of its own set-up, so that a client can simulate it."""

from __future__ import annotations

import msgspec

from expediter.scheduling.build import PolicyConfig


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/server_info`; limits are those of each replica."""

    preset: str
    policy: PolicyConfig
    prefix_caching: bool
    routing: str
    replicas: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_host_blocks: int = 0
    block_swap_s: float | None = None
