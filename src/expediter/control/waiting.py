"""The central queue: requests for which no replica has room, in front of all replicas of a model.

The order is that of a replica's queue, by the same classes (`scheduling/ordering`), with the same bound on how long it
may pass anybody over. What an ordering wants to know of a replica is known here of the fleet: how fast prompts get
away.

The queue is bounded in requests and in tokens. If it is full, somebody is turned away: the newcomer, or, if its tenant
has less in the queue for its weight than another, the newest of the tenant that has most. So a flood fills the queue,
but keeps nobody else out. Source: longest queue drop (Suter et al., INFOCOM 1998).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from expediter.control.draining import Drain, FleetKnowledge, excess_s, is_hopeless
from expediter.core.errors import ConfigurationError
from expediter.core.ranges import require_not_negative
from expediter.core.request import Request, RequestState
from expediter.kvcache.manager import KVCacheManager
from expediter.scheduling.build import ORDERINGS, Surroundings
from expediter.scheduling.config import SchedulerConfig
from expediter.scheduling.lazy_heap import LazyHeap
from expediter.scheduling.ordering.queue import WaitingQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueConfig:
    """A central queue.

    Args:
        ordering: a name as in `PolicyConfig.ordering`; None for fair shares.
        max_requests, max_tokens: most that may wait; one request may wait whatever its size.
    Raises:
        ConfigurationError: a bound is negative, or there is no such ordering.
    """

    ordering: str | None = None
    max_requests: int = 1024
    max_tokens: int = 4 << 20

    def __post_init__(self) -> None:
        if self.ordering is not None and self.ordering not in ORDERINGS:
            raise ConfigurationError(f"no ordering {self.ordering!r}; there are: {', '.join(ORDERINGS)}")
        require_not_negative(self, "max_requests", "max_tokens")

    def or_ordering(self, ordering: str) -> QueueConfig:
        """Return the same queue, in this order if none is named."""
        return self if self.ordering is not None else replace(self, ordering=ordering)


class QueueFull(NamedTuple):
    """A request that was not queued; when there is likely to be room for it."""

    retry_after_s: float


class Cause(enum.Enum):
    """Why somebody leaves the queue without having been served."""

    EXPIRED = "expired"
    """Its deadline has passed."""
    LATE = "late"
    """It would rather be refused than late, and is certain to be."""
    PUSHED_OUT = "pushed_out"
    """The queue was full, and its tenant had most in it."""


class Leaver(NamedTuple):
    """A request that has left without having been served."""

    request: Request
    cause: Cause
    retry_after_s: float


@dataclass(slots=True)
class _Part:
    """What a tenant has in the queue; `members` newest last."""

    num_tokens: int = 0
    members: dict[str, RequestState] = field(default_factory=dict)


class _Expiry(NamedTuple):
    """When somebody who still waits leaves, and why."""

    at_s: float
    cause: Cause


class CentralQueue:
    """Requests that wait for a replica of one model, and what the ordering has to know of those that have got one.

    A request's life here: `offer`, or `start` at once if there is room and nobody waits; `first` says whose turn it is,
    `start` that it has a replica, `prefilled` that its first byte has come, `end` that it is over. `remove` takes out a
    waiting one that has gone. Each costs O(log waiting); a full queue also O(tenants that wait).

    Args:
        weights: share of a tenant relative to others, 1 by default.
    """

    def __init__(self, config: QueueConfig, weights: Mapping[str, float] | None = None) -> None:
        self._config = config
        self._drain = Drain()
        self._clock = 0
        self._next_sequence = 0
        self._waiting: dict[str, RequestState] = {}
        self._started: dict[str, RequestState] = {}
        self._parts: dict[str, _Part] = {}
        self._expiries: LazyHeap[RequestState] = LazyHeap()
        self._causes: dict[int, Cause] = {}
        self._leavers: list[Leaver] = []
        self._num_promised = 0.0
        self._num_promised_tokens = 0.0
        self._arrange(weights or {})

    def _arrange(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        # There is no KV cache here: one empty block answers every question of an ordering with "nothing is cached".
        kv = KVCacheManager(num_blocks=1, block_size=1, max_num_seqs=1, max_model_len=1)
        around = Surroundings(SchedulerConfig(tenant_weights=weights), kv, FleetKnowledge(self._drain))
        self._ordering = ORDERINGS[self._config.ordering or "fair_share"](around)
        self._queue = WaitingQueue(self._ordering)

    def rearrange(self, config: QueueConfig, weights: Mapping[str, float], now_s: float) -> None:
        """Take other bounds, another ordering, other weights.

        Who waits keeps waiting, whatever the bounds. With another ordering or other weights fairness begins anew.
        """
        is_other_order = (config.ordering, weights) != (self._config.ordering, self._weights)
        self._config = config
        if not is_other_order:
            return
        self._arrange(weights)
        for state in self._waiting.values():
            self._queue.push(state, now_s)
        for state in self._started.values():
            self._ordering.admitted(state, 0, self._clock)

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    @property
    def num_tokens(self) -> int:
        """Prompt tokens that wait."""
        return self._queue.num_tokens

    # -- a request's life ----------------------------------------------------------------------------------------------

    def offer(self, request: Request, now_s: float, deadline_s: float = math.inf) -> QueueFull | None:
        """Queue a request, or say when there may be room for it. Others may have to leave for it: see `leavers`.

        Args:
            deadline_s: when it stops making sense, on the same clock as `now_s`; it leaves the queue then.
        """
        self._pass_time(now_s)
        if not self._make_room(request):
            return QueueFull(self._promise_s(request.num_prompt_tokens))
        state = self._state(request)
        part = self._parts.setdefault(request.tenant, _Part())
        part.members[request.request_id] = state
        part.num_tokens += request.num_prompt_tokens
        self._waiting[request.request_id] = state
        self._queue.push(state, now_s)
        expiry = _expiry(request, deadline_s)
        if expiry.at_s < math.inf:
            self._expiries.put(state, (expiry.at_s,))
            self._causes[state.sequence] = expiry.cause
        if request.refuse_late and request.slo.ttft_s is not None:
            self._refuse_if_hopeless(state, now_s)
        return None

    def first(self, now_s: float) -> Request | None:
        """Return whose turn it is, or None if nobody waits. Those whose time is over are never returned."""
        self._pass_time(now_s)
        self._ordering.tick(self._clock)
        self._let_leave(now_s)
        state = self._queue.first(now_s)
        return None if state is None else state.request

    def start(self, request: Request, now_s: float) -> None:
        """A request has got a replica: one that waited, or one that never had to."""
        self._pass_time(now_s)
        state = self._waiting.get(request.request_id)
        if state is None:
            state = self._state(request)
        else:
            self._take_out(state)
            self._drain.started(request.num_prompt_tokens)
            self._num_promised = max(0.0, self._num_promised - 1)
            self._num_promised_tokens = max(0.0, self._num_promised_tokens - request.num_prompt_tokens)
        self._ordering.admitted(state, request.num_prompt_tokens, self._clock)
        self._started[request.request_id] = state

    def prefilled(self, request_id: str) -> None:
        """A started request's first byte has come, so its prompt is done."""
        state = self._started.get(request_id)
        if state is not None:
            state.num_computed_tokens = state.num_known_tokens

    def end(self, request_id: str, num_output_tokens: int) -> None:
        """A started request is over, or goes back to the queue (then with 0 tokens); later calls do nothing."""
        state = self._started.pop(request_id, None)
        if state is None:
            return
        # To the ordering one decodes alone for so many ticks: its service is charged exactly, at its end.
        self._ordering.joined(state, self._clock)
        self._clock += num_output_tokens
        self._ordering.left(state, self._clock)

    def remove(self, request_id: str, now_s: float) -> bool:
        """Take a waiting request out that has gone; return whether it waited."""
        self._pass_time(now_s)
        state = self._waiting.get(request_id)
        if state is None:
            return False
        self._take_out(state)
        return True

    def leavers(self, now_s: float) -> list[Leaver]:
        """Return who has left without having been served since the last call, each once."""
        self._pass_time(now_s)
        self._let_leave(now_s)
        found, self._leavers = self._leavers, []
        return found

    @property
    def next_expiry_s(self) -> float:
        """When the next one leaves because its time is over, at the latest; infinity if nobody will."""
        entry = self._expiries.first()
        return math.inf if entry is None else entry[0][0]

    def _state(self, request: Request) -> RequestState:
        self._next_sequence += 1
        return RequestState(request, self._next_sequence, request.prompt.tobytes())

    def _take_out(self, state: RequestState) -> None:
        request = state.request
        del self._waiting[request.request_id]
        self._queue.remove(state)
        self._expiries.remove(state)
        self._causes.pop(state.sequence, None)
        part = self._parts[request.tenant]
        del part.members[request.request_id]
        part.num_tokens -= request.num_prompt_tokens
        if not part.members:
            del self._parts[request.tenant]
        if not self._waiting:
            self._num_promised = self._num_promised_tokens = 0.0

    def _pass_time(self, now_s: float) -> None:
        self._drain.pass_time(now_s, somebody_waits=bool(self._waiting))

    # -- who has to leave ----------------------------------------------------------------------------------------------

    def _let_leave(self, now_s: float) -> None:
        while (entry := self._expiries.first()) is not None and entry[0][0] <= now_s:
            self._dismiss(entry[1], self._causes[entry[1].sequence])
        for state, _ in self._ordering.newly_late(now_s):
            # An ordering may be out of patience with who has no target: that one is not late.
            if _late_s(state.request) < math.inf and state.request.request_id in self._waiting:
                self._dismiss(state, Cause.LATE)

    def _dismiss(self, state: RequestState, cause: Cause, retry_after_s: float | None = None) -> None:
        self._take_out(state)
        if retry_after_s is None:
            retry_after_s = self._drain.retry_after_s(len(self._waiting), self.num_tokens)
        self._leavers.append(Leaver(state.request, cause, retry_after_s))

    def _refuse_if_hopeless(self, state: RequestState, now_s: float) -> None:
        """Let a newcomer leave at once that wants to be in time and would wait too long. O(waiting)."""
        place = self._queue.place_among(state, self._waiting.values(), now_s)
        num_tokens = int(place["ahead_tokens"]) + state.num_known_tokens
        wait_s = self._drain.time_s(int(place["ahead_requests"]) + 1, num_tokens)
        if wait_s is not None and is_hopeless(state.request, wait_s, now_s):
            self._dismiss(state, Cause.LATE, excess_s(state.request, wait_s, now_s))

    # -- room ----------------------------------------------------------------------------------------------------------

    def _make_room(self, newcomer: Request) -> bool:
        """Dismiss as many as have to go for a newcomer, or nobody; return whether there is room."""
        victims = self._victims(newcomer)
        for victim in victims or ():
            self._dismiss(victim, Cause.PUSHED_OUT, self._promise_s(victim.num_known_tokens))
        return victims is not None

    def _victims(self, newcomer: Request) -> list[RequestState] | None:
        """Return who has to go for a newcomer, or None if that is the newcomer itself."""
        num_requests = len(self._waiting) + 1
        num_tokens = self.num_tokens + newcomer.num_prompt_tokens
        victims: list[RequestState] = []
        if not self._is_over(num_requests, num_tokens):
            return victims
        own = self._parts.get(newcomer.tenant, _Part())
        own_tokens = own.num_tokens + newcomer.num_prompt_tokens
        own_share = self._share(newcomer.tenant, len(own.members) + 1, own_tokens)
        others = {
            tenant: (len(part.members), part.num_tokens) for tenant, part in self._parts.items() if part is not own
        }
        newest = {tenant: reversed(self._parts[tenant].members.values()) for tenant in others}
        while self._is_over(num_requests, num_tokens):
            share, tenant = max(((self._share(name, *has), name) for name, has in others.items()), default=(0.0, ""))
            if share <= own_share:
                return None
            victims.append(next(newest[tenant]))
            size = victims[-1].num_known_tokens
            others[tenant] = (others[tenant][0] - 1, others[tenant][1] - size)
            num_requests, num_tokens = num_requests - 1, num_tokens - size
        return victims

    def _is_over(self, num_requests: int, num_tokens: int) -> bool:
        config = self._config
        return num_requests > config.max_requests or (num_tokens > config.max_tokens and num_requests > 1)

    def _share(self, tenant: str, num_requests: int, num_tokens: int) -> float:
        """Return how much of the queue a tenant has for its weight, by what is scarcer."""
        config = self._config
        used = max(num_requests / max(config.max_requests, 1), num_tokens / max(config.max_tokens, 1))
        return used / self._weights.get(tenant, 1.0)

    def _promise_s(self, num_tokens: int) -> float:
        """Return when somebody who is turned away should come back: after those that were turned away before it.

        If all came back when there is room for one, all but one would be turned away again. It is never longer than
        all that waits takes to get away.
        """
        self._num_promised = min(self._num_promised + 1, max(len(self._waiting), 1))
        self._num_promised_tokens = min(self._num_promised_tokens + num_tokens, max(self.num_tokens, num_tokens))
        return self._drain.retry_after_s(self._num_promised, self._num_promised_tokens)


def _expiry(request: Request, deadline_s: float) -> _Expiry:
    late_s = _late_s(request)
    return _Expiry(late_s, Cause.LATE) if late_s < deadline_s else _Expiry(deadline_s, Cause.EXPIRED)


def _late_s(request: Request) -> float:
    """Return when a request that would rather be refused than late is late even if it gets a replica then."""
    if not request.refuse_late:
        return math.inf
    return request.arrival_s + min(_or_never(request.slo.ttft_s), _or_never(request.slo.e2e_s))


def _or_never(target_s: float | None) -> float:
    return math.inf if target_s is None else target_s
