"""Fair shares between tenants, measured in tokens served."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from expediter.core.explanation import Detail, Reason
from expediter.core.request import RequestState
from expediter.kvcache.manager import KVCacheManager
from expediter.scheduling.lazy_heap import Key, LazyHeap
from expediter.scheduling.ordering.base import Ordering, WithoutTargets
from expediter.scheduling.ordering.prefix import LongestPrefix
from expediter.scheduling.ordering.queue import WaitingQueue
from expediter.scheduling.ordering.simple import Fcfs

PROMPT_TOKEN_COST = 1.0
OUTPUT_TOKEN_COST = 2.0
"""What a token counts for in service; the VTC paper's choice."""

_MANY_ACCOUNTS = 1024
_MAX_REFRESHES = 4


class _Account:
    """A tenant: its queue, and its service up to `clock`, with `num_decoding` more output tokens per tick since."""

    __slots__ = ("clock", "num_decoding", "ordering", "queue", "sequence", "service", "tenant", "weight")

    def __init__(self, tenant: str, weight: float, sequence: int, ordering: Ordering) -> None:
        self.tenant = tenant
        self.weight = weight
        self.sequence = sequence
        self.ordering = ordering
        self.queue = WaitingQueue(ordering)
        self.service = 0.0
        self.clock = 0
        self.num_decoding = 0


class _Ledger:
    """Counts weighted service per tenant without looking at steps.

    Args:
        make_ordering: of the requests within a tenant.
    Attributes:
        floor: who comes back is lifted at least to here, so idle tenants below it need no account.
    """

    def __init__(self, weights: Mapping[str, float], make_ordering: Callable[[], Ordering]) -> None:
        self._weights = weights
        self._make_ordering = make_ordering
        self._accounts: dict[str, _Account] = {}
        self._decoding: set[int] = set()
        self._next_sequence = 0
        self._limit = _MANY_ACCOUNTS
        self.clock = 0
        self.floor = 0.0

    def account(self, tenant: str) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            if len(self._accounts) >= self._limit:
                self._forget_idle()
            account = _Account(tenant, self._weights.get(tenant, 1.0), self._next_sequence, self._make_ordering())
            self._next_sequence += 1
            self._accounts[tenant] = account
        return account

    def _forget_idle(self) -> None:
        self._accounts = {
            tenant: account
            for tenant, account in self._accounts.items()
            if len(account.queue) or account.num_decoding or account.service > self.floor
        }
        self._limit = max(_MANY_ACCOUNTS, 2 * len(self._accounts))

    def service(self, account: _Account) -> float:
        """Bring an account up to the clock and return its service."""
        ticks = self.clock - account.clock
        if ticks:
            account.service += OUTPUT_TOKEN_COST * ticks * account.num_decoding / account.weight
            account.clock = self.clock
        return account.service

    def lift(self, account: _Account, least: float) -> None:
        """Let a tenant that comes back start no lower than `least`."""
        account.service = max(self.service(account), least)
        self.floor = max(self.floor, least)

    def charge_start(self, state: RequestState, num_new_tokens: int) -> None:
        """Charge the prompt, cached tokens for free, and the token that it yields.

        What a preemption makes to be computed again is nobody's service.
        """
        account = self.account(state.request.tenant)
        cost = OUTPUT_TOKEN_COST + (0.0 if state.num_preemptions else PROMPT_TOKEN_COST * num_new_tokens)
        account.service = self.service(account) + cost / account.weight

    def joined(self, state: RequestState, clock: int) -> None:
        self._decoding.add(state.sequence)
        self._change_decoding(state, 1, clock)

    def left(self, state: RequestState, clock: int) -> None:
        if state.sequence in self._decoding:
            self._decoding.remove(state.sequence)
            self._change_decoding(state, -1, clock)

    def _change_decoding(self, state: RequestState, change: int, clock: int) -> None:
        self.clock = clock
        account = self.account(state.request.tenant)
        self.service(account)
        account.num_decoding += change


class _FairOrdering(WithoutTargets):
    """What the two fair orderings share: accounts, and that nothing but service counts."""

    max_wait_s = math.inf  # their bounds are in service, not in seconds
    is_static = False
    displaces = False
    interleaves = False

    def __init__(self, weights: Mapping[str, float] | None, make_ordering: Callable[[], Ordering]) -> None:
        self._ledger = _Ledger(weights or {}, make_ordering)

    def push(self, state: RequestState, now_s: float) -> None:
        account = self._ledger.account(state.request.tenant)
        if not len(account.queue):
            self._ledger.lift(account, self._least())
        account.queue.push(state, now_s)
        self._place(account, now_s)

    def put_back(self, state: RequestState, now_s: float) -> None:
        account = self._ledger.account(state.request.tenant)
        account.queue.put_back(state, now_s)
        self._place(account, now_s)

    def _least(self) -> float:
        """Return the service that a tenant which comes back is lifted to."""
        raise NotImplementedError

    def _place(self, account: _Account, now_s: float) -> None:
        """File a tenant, whose queue or service has changed, where it belongs."""
        raise NotImplementedError

    def outranks(self, waiting: RequestState, running: RequestState) -> bool:  # noqa: ARG002 - nobody is displaced
        return False

    def place(self, state: RequestState) -> tuple[Reason, dict[str, Detail]]:
        """Behind in fairness is whose tenant has had more than others that wait."""
        service, least = self.service(state.request.tenant), self._least()
        if self._is_behind(service, least):
            return Reason.FAIRNESS, {"service": service, "least_service": least}
        return Reason.QUEUED, {}

    def _is_behind(self, service: float, least: float) -> bool:
        return service > least

    def service(self, tenant: str) -> float:
        """Return the weighted tokens that a tenant has got, lifts included, as of the clock."""
        return self._ledger.service(self._ledger.account(tenant))

    def tick(self, decode_clock: int) -> None:
        self._ledger.clock = decode_clock

    def admitted(self, state: RequestState, num_new_tokens: int, decode_clock: int) -> None:
        self._ledger.clock = decode_clock
        self._ledger.charge_start(state, num_new_tokens)
        self._ledger.account(state.request.tenant).ordering.admitted(state, num_new_tokens, decode_clock)

    def joined(self, state: RequestState, decode_clock: int) -> None:
        self._ledger.joined(state, decode_clock)

    def left(self, state: RequestState, decode_clock: int) -> None:
        self._ledger.left(state, decode_clock)
        self._ledger.account(state.request.tenant).ordering.left(state, decode_clock)


class FairShare(_FairOrdering):
    """The oldest request of the tenant that got least: virtual token counters.

    A tenant that comes back is lifted to the least counter of those that wait, or, if nobody waits, to the counter of
    the one that waited last: nobody saves up service. Bound: between two tenants that both always wait, weighted
    service differs by at most 2 * max(cost of the longest prompt, cost of all tokens that fit the KV cache as output);
    so a request is behind no more of another tenant's service than that and what goes to its own tenant before it.
    Source: VTC (2401.00588).

    Args:
        weights: share of a tenant relative to others, 1 by default.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        super().__init__(weights, Fcfs)
        self._tenants: LazyHeap[_Account] = LazyHeap()
        self._waited_last: _Account | None = None

    def remove(self, state: RequestState) -> None:
        account = self._ledger.account(state.request.tenant)
        account.queue.remove(state)
        if not len(account.queue):
            self._tenants.remove(account)
            self._waited_last = account
        else:
            self._place(account, -math.inf)

    def first(self, now_s: float) -> RequestState | None:
        account = self._first_tenant(now_s)
        return None if account is None else account.queue.first(now_s)

    def _first_tenant(self, now_s: float) -> _Account | None:
        while (entry := self._tenants.first()) is not None:
            (service, _), account = entry
            if self._ledger.service(account) == service:
                return account
            self._place(account, now_s)  # counters only rise, so a stale entry is too early, never too late
        return None

    def _least(self) -> float:
        account = self._first_tenant(-math.inf) or self._waited_last
        return 0.0 if account is None else self._ledger.service(account)

    def _place(self, account: _Account, now_s: float) -> None:
        head = account.queue.first(now_s)
        if head is not None:
            self._tenants.put(account, (self._ledger.service(account), head.request.arrival_s))

    def urgency(self, state: RequestState, now_s: float) -> Key:  # noqa: ARG002 - service is what counts
        return (self.service(state.request.tenant), state.request.arrival_s)


class DeficitPrefix(_FairOrdering):
    """Longest cached prefix among the tenants that have service left in this round.

    Every tenant gets a quantum of service per round; when no tenant that waits has any left, a new round begins. Who
    was away catches up with the rounds it missed, but never has more than one quantum. So the cache keeps its
    locality, which virtual counters destroy. In counters: round r ends for a tenant when its service reaches r times
    the quantum. Bound: between two tenants that both always wait, weighted service differs by at most the quantum and
    twice what one of them gets after its last quantum is used up (as for `FairShare`); within a tenant, a request that
    waited 30 s goes ahead of prefixes. Source: DLPM (2501.14312).

    Args:
        weights: share of a tenant relative to others, 1 by default.
        quantum: weighted tokens per round.
    """

    def __init__(
        self, kv: KVCacheManager, weights: Mapping[str, float] | None = None, quantum: float = 20_000.0
    ) -> None:
        super().__init__(weights, lambda: LongestPrefix(kv))
        self._quantum = quantum
        self._round = 1
        self._in_credit: LazyHeap[_Account] = LazyHeap()
        self._spent: LazyHeap[_Account] = LazyHeap()
        self._asked_s = -math.inf

    def _least(self) -> float:
        return (self._round - 1) * self._quantum

    def remove(self, state: RequestState) -> None:
        account = self._ledger.account(state.request.tenant)
        account.queue.remove(state)
        if not len(account.queue):
            self._in_credit.remove(account)
            self._spent.remove(account)

    def admitted(self, state: RequestState, num_new_tokens: int, decode_clock: int) -> None:
        super().admitted(state, num_new_tokens, decode_clock)
        # Its group runs now, so the others of its kind have come closer.
        self._place(self._ledger.account(state.request.tenant), self._asked_s)

    def first(self, now_s: float) -> RequestState | None:
        self._asked_s = now_s
        num_refreshes = 0
        while True:
            entry = self._in_credit.first()
            if entry is None:
                if not self._begin_round(now_s):
                    return None
                continue
            key, account = entry
            head = account.queue.first(now_s)
            assert head is not None
            if not self._has_credit(account):
                self._place(account, now_s)
            elif num_refreshes < _MAX_REFRESHES and account.queue.urgency(head, now_s) != key:
                num_refreshes += 1
                self._place(account, now_s)
            else:
                return head

    def _is_behind(self, service: float, least: float) -> bool:  # noqa: ARG002 - a round is what counts here
        return service >= self._round * self._quantum

    def _has_credit(self, account: _Account) -> bool:
        return self._ledger.service(account) < self._round * self._quantum

    def _place(self, account: _Account, now_s: float) -> None:
        """Each move from credit to debt and back stands for a quantum that was served: O(log n) amortized."""
        self._in_credit.remove(account)
        self._spent.remove(account)
        head = account.queue.first(now_s)
        if head is None:
            return
        if self._has_credit(account):
            self._in_credit.put(account, account.queue.urgency(head, now_s))
        else:
            self._spent.put(account, (self._ledger.service(account),))

    def _begin_round(self, now_s: float) -> bool:
        """Begin the first round in which somebody who waits has credit; return whether anybody waits."""
        while (entry := self._spent.first()) is not None:
            (service,), account = entry
            current = self._ledger.service(account)
            if current == service:
                self._round = math.floor(service / self._quantum) + 1
                break
            self._spent.put(account, (current,))
        while (entry := self._spent.first()) is not None and entry[0][0] < self._round * self._quantum:
            self._place(entry[1], now_s)
        return self._in_credit.first() is not None

    def urgency(self, state: RequestState, now_s: float) -> Key:
        account = self._ledger.account(state.request.tenant)
        return (float(not self._has_credit(account)), *account.queue.urgency(state, now_s))
