"""Fair shares between tenants, measured in tokens served."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from expediter.core.explanation import Detail, Reason
from expediter.core.request import RequestState
from expediter.kvcache.manager import KVCacheManager
from expediter.scheduling.lazy_heap import Key, LazyHeap
from expediter.scheduling.ordering.base import WithoutTargets
from expediter.scheduling.ordering.prefix import LongestPrefix

PROMPT_TOKEN_COST = 1.0
OUTPUT_TOKEN_COST = 2.0
"""What a token counts for in service; the VTC paper's choice."""


@dataclass(slots=True)
class _Account:
    """Service of one tenant: settled up to `clock`, `num_decoding` output tokens per tick since."""

    service: float = 0.0
    clock: int = 0
    num_decoding: int = 0
    waiting: LazyHeap = field(default_factory=LazyHeap)


class _Meter:
    """Counts weighted service per tenant without looking at steps."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self.accounts: dict[str, _Account] = {}
        self._clock = 0

    def account(self, state: RequestState) -> _Account:
        return self.accounts.setdefault(state.request.tenant, _Account())

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def charge_prompt(self, state: RequestState, num_tokens: int) -> None:
        """Charge a start; what a preemption makes to be computed again is nobody's service."""
        if not state.num_preemptions:
            cost = PROMPT_TOKEN_COST * num_tokens / self.weight(state.request.tenant)
            self.account(state).service += cost

    def change_decoding(self, state: RequestState, change: int, clock: int) -> None:
        """Settle a tenant's account; from now on it gets that many more (or fewer) tokens per tick."""
        self._clock = max(self._clock, clock)
        self.settle(state.request.tenant)
        self.account(state).num_decoding += change

    def settle(self, tenant: str) -> float:
        """Bring an account up to the latest known tick and return its service."""
        account = self.accounts[tenant]
        ticks = self._clock - account.clock
        account.service += OUTPUT_TOKEN_COST * ticks * account.num_decoding / self.weight(tenant)
        account.clock = self._clock
        return account.service


class FairShare(WithoutTargets):
    """The oldest request of the tenant that got least: virtual token counters.

    A tenant that comes back after idling is lifted to the least counter of those that wait: nobody saves up service.
    The gap between two tenants that both always wait stays within 2 * max(cost of the longest prompt, cost of all
    tokens that fit the KV cache). Source: VTC (2401.00588).

    Args:
        weights: share of a tenant relative to others, 1 by default.
    """

    max_wait_s = math.inf
    is_static = False
    displaces = False
    interleaves = False

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._meter = _Meter(weights or {})
        self._heap: list[tuple[float, str]] = []
        self._decoding: set[int] = set()

    def push(self, state: RequestState, now_s: float) -> None:  # noqa: ARG002 - the protocol's
        tenant, account = state.request.tenant, self._meter.account(state)
        if not account.waiting:
            if not account.num_decoding:
                account.service = max(self._meter.settle(tenant), self._least_waiting())
            heapq.heappush(self._heap, (self._meter.settle(tenant), tenant))
        account.waiting.put(state, (state.request.arrival_s,))

    def remove(self, state: RequestState) -> None:
        self._meter.account(state).waiting.remove(state)

    def first(self, now_s: float) -> RequestState | None:  # noqa: ARG002 - the protocol's
        while self._heap:
            service, tenant = self._heap[0]
            account = self._meter.accounts[tenant]
            current = self._meter.settle(tenant)
            head = account.waiting.first()
            if head is None:
                heapq.heappop(self._heap)
            elif current > service:  # counters only rise, so a stale entry is too early, never too late
                heapq.heapreplace(self._heap, (current, tenant))
            else:
                return head[1]
        return None

    def _least_waiting(self) -> float:
        services = [s for s, tenant in self._heap if self._meter.accounts[tenant].waiting]
        return min(services, default=0.0)

    def outranks(self, waiting: RequestState, running: RequestState) -> bool:  # noqa: ARG002 - the protocol's
        return False

    def urgency(self, state: RequestState, now_s: float) -> Key:  # noqa: ARG002 - the protocol's
        return (self._meter.settle(state.request.tenant), state.request.arrival_s)

    def place(self, state: RequestState) -> tuple[Reason, dict[str, Detail]]:
        """Behind in fairness is whose tenant has had more than another one that waits."""
        service, least = self._meter.settle(state.request.tenant), self._least_waiting()
        if service > least:
            return Reason.FAIRNESS, {"service": service, "least_service": least}
        return Reason.QUEUED, {}

    def service(self, tenant: str) -> float:
        """Return the weighted tokens that a tenant has got, as of the last change in the running set."""
        return self._meter.settle(tenant)

    def admitted(self, state: RequestState, num_new_tokens: int, decode_clock: int) -> None:  # noqa: ARG002
        self._meter.charge_prompt(state, num_new_tokens)

    def joined(self, state: RequestState, decode_clock: int) -> None:
        self._decoding.add(state.sequence)
        self._meter.change_decoding(state, 1, decode_clock)

    def left(self, state: RequestState, decode_clock: int) -> None:
        if state.sequence in self._decoding:
            self._decoding.remove(state.sequence)
            self._meter.change_decoding(state, -1, decode_clock)


class DeficitPrefix(WithoutTargets):
    """Longest cached prefix among the tenants that have service left in this round.

    Every tenant that waits gets a quantum of service per round; when none with any left waits, a new round begins. Fair
    within a quantum, and the cache keeps its locality, which virtual counters destroy. Source: DLPM (2501.14312).

    Args:
        quantum: weighted tokens per round.
    """

    max_wait_s = math.inf
    is_static = False
    displaces = False
    interleaves = False

    def __init__(
        self, kv: KVCacheManager, weights: Mapping[str, float] | None = None, quantum: float = 20_000.0
    ) -> None:
        self._kv = kv
        self._meter = _Meter(weights or {})
        self._quantum = quantum
        self._granted: dict[str, float] = {}
        self._queues: dict[str, LongestPrefix] = {}
        self._num_waiting: dict[str, int] = {}
        self._decoding: set[int] = set()

    def push(self, state: RequestState, now_s: float) -> None:
        tenant = state.request.tenant
        self._meter.account(state)
        if not self._num_waiting.get(tenant):
            # Who comes back starts with one quantum, whatever it had left.
            self._granted[tenant] = self._meter.settle(tenant) + self._quantum
        self._queue(tenant).push(state, now_s)
        self._num_waiting[tenant] = self._num_waiting.get(tenant, 0) + 1

    def remove(self, state: RequestState) -> None:
        tenant = state.request.tenant
        self._queue(tenant).remove(state)
        self._num_waiting[tenant] -= 1

    def first(self, now_s: float) -> RequestState | None:
        waiting = [tenant for tenant, count in self._num_waiting.items() if count]
        if not waiting:
            return None
        left = {tenant: self._granted[tenant] - self._meter.settle(tenant) for tenant in waiting}
        if max(left.values()) <= 0:
            rounds = math.floor(-max(left.values()) / self._quantum) + 1
            for tenant in waiting:
                self._granted[tenant] += rounds * self._quantum
                left[tenant] += rounds * self._quantum
        heads = [self._queue(tenant).first(now_s) for tenant in waiting if left[tenant] > 0]
        return min(
            (state for state in heads if state is not None),
            key=lambda state: (self._queue(state.request.tenant).urgency(state, now_s), state.sequence),
        )

    def place(self, state: RequestState) -> tuple[Reason, dict[str, Detail]]:
        """Behind in fairness is whose tenant has used up its grant of this round."""
        tenant = state.request.tenant
        service = self._meter.settle(tenant)
        if service < self._granted[tenant]:
            return Reason.QUEUED, {}
        others = [self._meter.settle(other) for other, count in self._num_waiting.items() if count]
        return Reason.FAIRNESS, {"service": service, "least_service": min(others, default=service)}

    def _queue(self, tenant: str) -> LongestPrefix:
        if tenant not in self._queues:
            self._queues[tenant] = LongestPrefix(self._kv)
        return self._queues[tenant]

    def outranks(self, waiting: RequestState, running: RequestState) -> bool:  # noqa: ARG002 - the protocol's
        return False

    def urgency(self, state: RequestState, now_s: float) -> Key:
        tenant = state.request.tenant
        has_none_left = self._granted[tenant] <= self._meter.settle(tenant)
        return (float(has_none_left), *self._queue(tenant).urgency(state, now_s))

    def admitted(self, state: RequestState, num_new_tokens: int, decode_clock: int) -> None:
        self._meter.charge_prompt(state, num_new_tokens)
        self._queue(state.request.tenant).admitted(state, num_new_tokens, decode_clock)

    def joined(self, state: RequestState, decode_clock: int) -> None:
        self._decoding.add(state.sequence)
        self._meter.change_decoding(state, 1, decode_clock)

    def left(self, state: RequestState, decode_clock: int) -> None:
        if state.sequence in self._decoding:
            self._decoding.remove(state.sequence)
            self._meter.change_decoding(state, -1, decode_clock)
        self._queue(state.request.tenant).left(state, decode_clock)
