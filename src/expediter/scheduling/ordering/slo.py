"""The SLO policy's order: serve whom it helps, earliest deadline first; who cannot make it steps behind them.

Prompts share one resource, the tokens that a replica prefills per second. If not everybody's first token can be in
time, the most requests (by value) are when the queue is served by deadline without those that cost most and spoil the
rest: Moore and Hodgson's algorithm. Deadline order alone would serve the hopeless first, and shortest-first would give
up long requests that could be in time.

There are three lanes. *Hopeful* requests can all be in time, by deadline. *Spare* ones could be alone, but not with the
hopeful ones; least work first, whenever no hopeful one waits. *Late* ones are certain to miss; oldest first, after
everybody else, but one of `late_share` admissions goes to a late one that waited longer than `max_late_wait_s`, so
nobody starves.

The lanes are dealt anew when a part of the queue has changed: O(log n) per change, amortized.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from expediter.core.explanation import Detail, Reason
from expediter.core.request import RequestState
from expediter.kvcache.manager import KVCacheManager
from expediter.scheduling.knowledge import Knowledge
from expediter.scheduling.lazy_heap import Key, LazyHeap

_DEAL_AFTER_SHARE = 8
_MAX_DEAL_AGE_S = 0.5


@dataclass(slots=True)
class _Job:
    """What the order needs to know of a request.

    Attributes:
        num_tokens: prompt tokens left to compute.
        due_s: when its first token is.
        work: tokens that all of it takes, the expected output included.
    """

    state: RequestState
    num_tokens: int
    due_s: float
    value: float
    work: float


class _Demand:
    """How much work has been arriving lately, and which of it is worth doing if not all can be done.

    In a lasting overload the most requests are served in time by doing what gives most value per work and leaving the
    rest: the greedy solution of the knapsack whose size is the replica's speed.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._arrivals: deque[tuple[float, float, float]] = deque()
        self._work = 0.0
        self.max_work_per_value = math.inf

    def arrive(self, now_s: float, work: float, value: float) -> None:
        self._arrivals.append((now_s, work, value))
        self._work += work

    def update(self, now_s: float, tokens_per_s: float) -> None:
        """Decide anew what is too much work for its value."""
        while self._arrivals and self._arrivals[0][0] < now_s - self._window_s:
            self._work -= self._arrivals.popleft()[1]
        self.max_work_per_value = math.inf
        if not self._arrivals:
            return
        capacity = tokens_per_s * max(now_s - self._arrivals[0][0], self._window_s / 2)
        if self._work <= capacity:
            return
        for density, work in sorted((work / value, work) for _, work, value in self._arrivals):
            capacity -= work
            if capacity < 0:
                self.max_work_per_value = density
                return


class SloOrdering:
    """Order by deadline among those that can be in time.

    Args:
        max_late_wait_s: a late request that waited longer gets a share of the admissions.
        late_share: one of so many admissions.
        window_s: how far back the demand is looked at that decides what is too much work for its value.
        patience_s: when a request without targets is due after its arrival; it is late after that like any other.
    """

    max_wait_s = math.inf
    is_static = False
    displaces = True
    interleaves = True

    def __init__(
        self,
        kv: KVCacheManager,
        knowledge: Knowledge,
        *,
        max_late_wait_s: float = 60.0,
        late_share: int = 20,
        window_s: float = 30.0,
        patience_s: float = 300.0,
    ) -> None:
        self._kv = kv
        self._knowledge = knowledge
        knowledge.ask()
        self._max_late_wait_s = max_late_wait_s
        self._late_share = late_share
        self._patience_s = patience_s
        self._waiting: dict[int, _Job] = {}
        self._tried: dict[int, _Job] = {}  # out of the queue since the last tick
        self._under_way: dict[int, _Job] = {}
        self._hopeful: LazyHeap[RequestState] = LazyHeap()
        self._spare: LazyHeap[RequestState] = LazyHeap()
        self._late: LazyHeap[RequestState] = LazyHeap()
        self._demand = _Demand(window_s)
        self._last_sequence = -1
        self._num_changes = 0
        self._dealt_s = -math.inf
        self._since_late = 0
        self._newly_late: list[tuple[RequestState, float]] = []
        self._num_refusable = 0

    # -- the queue ----------------------------------------------------------------------------------------------------

    def push(self, state: RequestState, now_s: float) -> None:
        match = self._kv.match(state.token_bytes, state.request.cache_salt)
        num_tokens = state.num_known_tokens - self._kv.num_reusable_tokens(state.sequence, match)
        job = self._job(state, num_tokens)
        if state.sequence > self._last_sequence:
            self._last_sequence = state.sequence
            self._demand.arrive(now_s, job.work, job.value)
        self._enter(job, now_s)

    def put_back(self, state: RequestState, now_s: float) -> None:
        self._enter(self._tried.pop(state.sequence), now_s)

    def _enter(self, job: _Job, now_s: float) -> None:
        state = job.state
        self._waiting[state.sequence] = job
        self._num_refusable += _is_refusable(state)
        if self._is_late(job, now_s):
            self._defer(state, now_s)
        elif self._is_too_much(job):
            self._spare.put(state, (float(job.num_tokens),))
        else:
            self._hopeful.put(state, (job.due_s,))
        self._num_changes += 1

    def remove(self, state: RequestState) -> None:
        job = self._waiting.pop(state.sequence, None)
        if job is not None:
            self._tried[state.sequence] = job
            self._num_refusable -= _is_refusable(state)
        for lane in (self._hopeful, self._spare, self._late):
            if lane.remove(state):
                self._num_changes += 1

    def first(self, now_s: float) -> RequestState | None:
        self._deal_if_stale(now_s)
        late = self._late.first()
        has_share = self._since_late >= self._late_share
        if late is not None and has_share and now_s - late[0][0] > self._max_late_wait_s:
            return late[1]
        for lane in (self._hopeful, self._spare):
            head = self._head_in_time(lane, now_s)
            if head is not None:
                return head
        late = self._late.first()
        return None if late is None else late[1]

    def urgency(self, state: RequestState, now_s: float) -> Key:
        if state in self._hopeful:
            return (0.0, self._waiting[state.sequence].due_s)
        if state in self._spare:
            return (1.0, float(self._waiting[state.sequence].num_tokens))
        if state in self._late:
            return (2.0, state.request.arrival_s)
        job = self._under_way[state.sequence]
        job.num_tokens = state.num_known_tokens - state.num_computed_tokens
        if self._is_late(job, now_s):
            return (2.0, state.request.arrival_s)
        return (0.0, job.due_s)

    def outranks(self, waiting: RequestState, running: RequestState) -> bool:
        """Who can be in time may displace who cannot any more."""
        return waiting in self._hopeful and running.has_missed(self._dealt_s)

    # -- who is late --------------------------------------------------------------------------------------------------

    @property
    def num_late(self) -> int:
        return len(self._late)

    @property
    def may_refuse(self) -> bool:
        return self._num_refusable > 0

    def newly_late(self, now_s: float) -> Sequence[tuple[RequestState, float]]:
        if self._num_refusable:
            self._deal_if_stale(now_s)  # who asked for it wants to know soon, even while nobody else is tried
        found, self._newly_late = self._newly_late, []
        return found

    def place(self, state: RequestState) -> tuple[Reason, dict[str, Detail]]:
        """Deferred is who is in the late lane."""
        if state not in self._late:
            return Reason.QUEUED, {}
        job = self._waiting[state.sequence]
        needs_s = job.num_tokens * self._knowledge.prefill_token_s
        return Reason.LATE, {"due_s": job.due_s - state.request.arrival_s, "needs_s": needs_s}

    # -- what is learned ----------------------------------------------------------------------------------------------

    def tick(self, decode_clock: int) -> None:  # noqa: ARG002 - time decides here, not service
        self._tried.clear()

    def admitted(self, state: RequestState, num_new_tokens: int, decode_clock: int) -> None:  # noqa: ARG002
        job = self._job(state, num_new_tokens)
        self._under_way[state.sequence] = job
        self._since_late = 0 if job.due_s < self._dealt_s else self._since_late + 1

    def joined(self, state: RequestState, decode_clock: int) -> None:  # noqa: ARG002 - the protocol's
        self._under_way.pop(state.sequence, None)

    def left(self, state: RequestState, decode_clock: int) -> None:  # noqa: ARG002 - the protocol's
        self._under_way.pop(state.sequence, None)

    # -- the lanes ----------------------------------------------------------------------------------------------------

    def _job(self, state: RequestState, num_tokens: int) -> _Job:
        num_output = len(state.output)
        expected = self._knowledge.lengths.predict(state.request, num_output) - num_output
        return _Job(state, num_tokens, self._due_s(state), state.request.value, num_tokens + expected)

    def _is_too_much(self, job: _Job) -> bool:
        return job.work > self._demand.max_work_per_value * job.value

    def _due_s(self, state: RequestState) -> float:
        if state.first_token_s is not None:
            # Preempted while decoding: its next token is due at its pace.
            return state.first_token_s + len(state.output) * state.pace_s
        due_s = self._knowledge.first_token_deadline_s(state.request)
        return due_s if due_s < math.inf else state.request.arrival_s + self._patience_s

    def _is_late(self, job: _Job, now_s: float) -> bool:
        return now_s + job.num_tokens * self._knowledge.prefill_token_s > job.due_s

    def _head_in_time(self, lane: LazyHeap[RequestState], now_s: float) -> RequestState | None:
        """Return a lane's head, moving those that have become late to their lane."""
        while (entry := lane.first()) is not None:
            state = entry[1]
            if not self._is_late(self._waiting[state.sequence], now_s):
                return state
            lane.remove(state)
            self._defer(state, now_s)
        return None

    def _defer(self, state: RequestState, now_s: float) -> None:
        self._late.put(state, (state.request.arrival_s,))
        self._newly_late.append((state, now_s))

    def _deal_if_stale(self, now_s: float) -> None:
        num_in_time = len(self._hopeful) + len(self._spare)
        changed = self._num_changes * _DEAL_AFTER_SHARE > num_in_time
        if num_in_time and (changed or now_s - self._dealt_s > _MAX_DEAL_AGE_S):
            self._deal(now_s)
            self._num_changes = 0
        self._dealt_s = max(self._dealt_s, now_s)

    def _deal(self, now_s: float) -> None:
        """Moore and Hodgson: by deadline, and whenever one is late, without the one that costs most per value."""
        token_s = self._knowledge.prefill_token_s
        self._demand.update(now_s, self._knowledge.busy_tokens_per_s)
        in_time = [job for job in self._waiting.values() if job.state not in self._late]
        for job in self._under_way.values():
            job.num_tokens = job.state.num_known_tokens - job.state.num_computed_tokens
        worthy = [job for job in in_time if not self._is_too_much(job)]
        jobs = sorted([*worthy, *self._under_way.values()], key=_by_deadline)
        kept: list[tuple[float, int, _Job]] = []
        clock_s = now_s
        for job in jobs:
            clock_s += job.num_tokens * token_s
            heapq.heappush(kept, (-job.num_tokens / job.value, job.state.sequence, job))
            while kept and clock_s > job.due_s:
                dropped = heapq.heappop(kept)[2]
                clock_s -= dropped.num_tokens * token_s
        hopeful = {job.state.sequence for _, _, job in kept}
        self._hopeful, self._spare = LazyHeap(), LazyHeap()
        for job in in_time:
            state = job.state
            if state.sequence in hopeful:
                self._hopeful.put(state, (job.due_s,))
            elif self._is_late(job, now_s):
                self._defer(state, now_s)
            else:
                self._spare.put(state, (float(job.num_tokens),))


def _is_refusable(state: RequestState) -> bool:
    # Who has started once may have been answered in part.
    return state.request.refuse_late and state.first_scheduled_s is None


def _by_deadline(job: _Job) -> tuple[float, int]:
    return job.due_s, job.state.sequence
