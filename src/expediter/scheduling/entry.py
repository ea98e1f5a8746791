"""Who may enter the queue at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from expediter.core.errors import InvariantError
from expediter.core.events import RejectReason
from expediter.core.request import Request, RequestState
from expediter.scheduling.config import SchedulerConfig
from expediter.scheduling.memory import MemoryRule
from expediter.scheduling.running import RunningSet

_EQUAL_IN_A_GROUP: Final = (
    *("max_tokens", "cache_salt", "priority", "tenant", "slo", "slo_class", "value", "refuse_late", "arrival_s"),
    "cache_hint",
)


def check_group(requests: Sequence[Request], live: Mapping[str, RequestState]) -> None:
    """Verify that requests can be the sequences of one group.

    Raises:
        InvariantError: an id is in use or there twice, or they differ in more than what sequences may differ in.
    """
    first = requests[0]
    for request in requests:
        if request.request_id in live:
            raise InvariantError(f"request id {request.request_id!r} is in use")
        if request is first:
            continue
        is_like_it = all(getattr(request, name) == getattr(first, name) for name in _EQUAL_IN_A_GROUP)
        same_prompt = request.prompt is first.prompt or np.array_equal(request.prompt, first.prompt)
        if not (is_like_it and same_prompt):
            raise InvariantError(f"requests {first.request_id} and {request.request_id} cannot be one group")
    if len(requests) > 1 and len({request.request_id for request in requests}) < len(requests):
        raise InvariantError("two requests of a group have one id")


def refusal_of(
    leader: RequestState, config: SchedulerConfig, memory: MemoryRule, running: RunningSet
) -> tuple[RejectReason, str] | None:
    """Return why a request, or a group by its leader, can never run here, or None if it can."""
    kv = running.kv
    total, limit = leader.request.max_total_tokens, config.max_model_len
    num_seqs = len(leader.members)
    if total > limit:
        return RejectReason.TOO_LONG, f"prompt and max_tokens are {total} tokens, max_model_len is {limit}"
    # The last output token is never fed back, so its KV is never stored.
    if kv.blocks_for(total - 1) > kv.num_blocks:
        capacity = kv.num_blocks * kv.block_size
        return RejectReason.UNSERVABLE, f"{total - 1} tokens of KV exceed the cache's {capacity}"
    if num_seqs > config.max_num_seqs:
        return (
            RejectReason.TOO_MANY_SEQUENCES,
            f"{num_seqs} sequences of one request exceed max_num_seqs ({config.max_num_seqs})",
        )
    num_tokens = memory.reserve_tokens(leader)
    needed = kv.blocks_for(num_tokens) + running.blocks_beside(leader, num_tokens)
    if needed > kv.num_blocks:
        return (
            RejectReason.UNSERVABLE,
            f"{num_seqs} sequences of one request need {needed} blocks to start, the cache has {kv.num_blocks}",
        )
    return None
