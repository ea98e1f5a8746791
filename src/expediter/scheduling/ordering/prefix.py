"""Longest cached prefix first, and requests that share a prefix together."""

from __future__ import annotations

from dataclasses import dataclass, field

from expediter.core.request import RequestState
from expediter.kvcache.manager import KVCacheManager
from expediter.scheduling.lazy_heap import Key, LazyHeap
from expediter.scheduling.ordering.base import WithoutTargets

_TOKEN_BYTES = 4
_GroupKey = tuple[str, bytes, int]
"""Salt, first tokens, and the request itself where these are too few to make a group."""
_MAX_REFRESHES = 4
"""Heads whose match is looked up again per question; the cache moves on meanwhile, so no order is ever quite exact."""


@dataclass(slots=True)
class _Group:
    """Waiting requests with the same beginning, most cached first, and how many of their like are running."""

    waiting: LazyHeap[RequestState] = field(default_factory=LazyHeap)
    num_running: int = 0


class LongestPrefix(WithoutTargets):
    """Most cached tokens first; of a group that shares its first `min_prefix_tokens`, one after the other.

    While a member of a group runs, the others go before everybody else: its prefix is in use now, and may be evicted
    later. Bound: a request that arrived 30 s ago goes ahead of all prefixes, oldest first (the published policy has no
    bound, and starves who shares nothing). Source: RadixAttention (SGLang, 2312.07104), and prefix groups as batches.

    Args:
        min_prefix_tokens: tokens that make a group.
    """

    max_wait_s = 30.0
    is_static = False
    displaces = False
    interleaves = False

    def __init__(self, kv: KVCacheManager, min_prefix_tokens: int = 16) -> None:
        self._kv = kv
        self._group_bytes = min_prefix_tokens * _TOKEN_BYTES
        self._groups: dict[_GroupKey, _Group] = {}
        self._heads: LazyHeap[RequestState] = LazyHeap()
        self._num_cached: dict[int, int] = {}

    def push(self, state: RequestState, now_s: float) -> None:  # noqa: ARG002 - the protocol's
        group = self._groups.setdefault(self._group_key(state), _Group())
        self._withdraw_head(group)
        self._rate(group, state)
        self._offer_head(group)

    def put_back(self, state: RequestState, now_s: float) -> None:
        self.push(state, now_s)

    def remove(self, state: RequestState) -> None:
        key = self._group_key(state)
        group = self._groups[key]
        self._withdraw_head(group)
        group.waiting.remove(state)
        self._num_cached.pop(state.sequence, None)
        self._offer_head(group)
        self._drop_if_idle(key, group)

    def first(self, now_s: float) -> RequestState | None:  # noqa: ARG002 - the protocol's
        for _ in range(_MAX_REFRESHES):
            entry = self._heads.first()
            if entry is None:
                return None
            state = entry[1]
            known = self._num_cached[state.sequence]
            group = self._groups[self._group_key(state)]
            self._withdraw_head(group)
            self._rate(group, state)
            self._offer_head(group)
            if self._num_cached[state.sequence] == known:
                return state
        entry = self._heads.first()
        return None if entry is None else entry[1]

    def outranks(self, waiting: RequestState, running: RequestState) -> bool:  # noqa: ARG002 - the protocol's
        return False

    def urgency(self, state: RequestState, now_s: float) -> Key:  # noqa: ARG002 - the protocol's
        return self._head_key(self._groups[self._group_key(state)], state)

    def tick(self, decode_clock: int) -> None:
        """Groups do not care for service."""

    def admitted(self, state: RequestState, num_new_tokens: int, decode_clock: int) -> None:  # noqa: ARG002
        self._count_running(state, 1)

    def joined(self, state: RequestState, decode_clock: int) -> None:
        """Groups do not care for phases."""

    def left(self, state: RequestState, decode_clock: int) -> None:  # noqa: ARG002 - the protocol's
        self._count_running(state, -1)

    # -- groups -------------------------------------------------------------------------------------------------------

    def _group_key(self, state: RequestState) -> _GroupKey:
        """Return the same key in all of a request's life; a prompt too short to share enough is a group of its own."""
        num_bytes = state.request.num_prompt_tokens * _TOKEN_BYTES
        if num_bytes < self._group_bytes:
            return state.request.cache_salt, b"", state.sequence
        return state.request.cache_salt, state.token_bytes[: self._group_bytes], -1

    def _rate(self, group: _Group, state: RequestState) -> None:
        """Look up how much of a member is cached now, and place it accordingly."""
        match = self._kv.match(state.token_bytes, state.request.cache_salt)
        self._num_cached[state.sequence] = match.num_blocks * self._kv.block_size
        group.waiting.put(state, self._member_key(state))

    def _count_running(self, state: RequestState, change: int) -> None:
        key = self._group_key(state)
        group = self._groups.setdefault(key, _Group())
        self._withdraw_head(group)
        group.num_running += change
        self._offer_head(group)
        self._drop_if_idle(key, group)

    def _member_key(self, state: RequestState) -> Key:
        return (-self._num_cached.get(state.sequence, 0), state.request.arrival_s)

    def _head_key(self, group: _Group, state: RequestState) -> Key:
        return (0.0 if group.num_running else 1.0, *self._member_key(state))

    def _withdraw_head(self, group: _Group) -> None:
        head = group.waiting.first()
        if head is not None:
            self._heads.remove(head[1])

    def _offer_head(self, group: _Group) -> None:
        head = group.waiting.first()
        if head is not None:
            self._heads.put(head[1], self._head_key(group, head[1]))

    def _drop_if_idle(self, key: _GroupKey, group: _Group) -> None:
        if not group.waiting and not group.num_running:
            del self._groups[key]
