"""Requests that come from other replicas, or go there, with what they have so far."""

from __future__ import annotations

from typing import NamedTuple

from expediter.core.errors import InvariantError
from expediter.core.events import Event
from expediter.core.explanation import Reason
from expediter.core.request import CacheHint, Carried, Request, RequestState, Status
from expediter.kvcache.landing import Landing
from expediter.scheduling.config import SchedulerConfig
from expediter.scheduling.decoding import DecodingBatch
from expediter.scheduling.entry import check_group, refusal_of
from expediter.scheduling.knowledge import Knowledge
from expediter.scheduling.live import LiveRequests
from expediter.scheduling.memory import MemoryRule


class Departure(NamedTuple):
    """A request that has left a scheduler to go on elsewhere.

    Attributes:
        landing: its KV, kept until it is released; None if none is.
    """

    request: Request
    carried: Carried
    landing: Landing | None


class Movable(NamedTuple):
    """A request that decodes.

    Attributes:
        num_tokens: whose KV it has.
    """

    request_id: str
    priority: int
    num_tokens: int


class Passage:
    """Takes requests over from other replicas and gives them away, with their KV as landings.

    Attributes:
        departures: of requests that ended with their KV kept, until somebody collects them.
    """

    def __init__(self, config: SchedulerConfig, live: LiveRequests, memory: MemoryRule, knowledge: Knowledge) -> None:
        self.departures: dict[str, Departure] = {}
        self._config = config
        self._live = live
        self._kv = live.running.kv
        self._memory = memory
        self._knowledge = knowledge

    # -- coming -------------------------------------------------------------------------------------------------------

    def reserve(self, request: Request, carried: Carried | None, num_tokens: int, now_s: float) -> Landing | None:
        """Take blocks for the first `num_tokens` tokens of a request, whose KV is about to come, and for one more.

        Everybody who runs keeps a block to grow into. Without the look at the queue a stream of landings could starve
        a request that was preempted.

        Args:
            carried: what it has so far; None if it has not run yet.
        Returns:
            None if there is no room at present, or somebody older waits for it.
        Raises:
            InvariantError: a step is in flight: blocks that it still writes to may be among the free ones.
        """
        live = self._live
        if live.step is not None:
            raise InvariantError(f"blocks are reserved while step {live.step.plan.step_id} is in flight")
        state = self._state_of(request, carried)
        oldest = live.waiting.oldest
        is_first = oldest is None or oldest.request.arrival_s >= request.arrival_s
        is_short = bool(live.num_refused.get(Reason.NO_BLOCKS))
        if is_short and oldest is not None and not is_first and self._kv.landings.find(oldest.sequence) is None:
            return None
        return self._kv.landings.reserve(
            state.token_bytes,
            request.cache_salt,
            num_tokens,
            num_reserved=max(self._memory.reserve_tokens(state), num_tokens + 1),
            spare_blocks=self._memory.spare_blocks(state, live.running) + len(live.running),
            now_s=now_s,
        )

    def land(self, landing: Landing, now_s: float) -> bool:
        """Record that the KV of a landing is here; False if it does not wait for any (any more)."""
        self._live.queue_is_stuck = False
        return self._kv.landings.complete(landing, now_s)

    def release(
        self,
        landing: Landing,
        now_s: float,
        *,
        writes_until_s: float | None = None,
        hint: CacheHint | None = None,
    ) -> None:
        """Give a landing up, as `Landings.release`: others may have its blocks."""
        self._live.queue_is_stuck = False
        self._kv.landings.release(landing, now_s, writes_until_s=writes_until_s, hint=hint)

    def end_quarantine(self, now_s: float) -> None:
        """Free the blocks that nobody can write to any more."""
        if self._kv.landings.expire(now_s):
            self._live.queue_is_stuck = False

    def resume(
        self,
        request: Request,
        carried: Carried | None,
        now_s: float,
        *,
        landing: Landing | None = None,
        keep: bool = False,
    ) -> list[Event]:
        """Queue a request that ran elsewhere, or whose KV was fetched; as `Scheduler.add`, but it goes on.

        Its output so far counts as known: what of its KV has landed is taken over, the rest is computed again. With all
        of it there, it decodes from its first step here on. A replica that drains takes it as well.

        Args:
            landing: of its KV, landed; it is the request's from now on.
            keep: as in `Scheduler.add_group`.
        Raises:
            InvariantError: a live request has the same id, or it has all of its output.
        """
        check_group((request,), self._live.by_id)
        state = self._state_of(request, carried)
        state.is_kept = keep
        if landing is not None:
            self._kv.landings.assign(landing, state.sequence)
        refusal = refusal_of(state, self._config, self._memory, self._live.running)
        if refusal is None:
            return self._live.enqueue(state, now_s)
        self.drop(state, now_s)
        return self._live.reject(state, refusal, now_s)

    def _state_of(self, request: Request, carried: Carried | None) -> RequestState:
        """Return the state of a request that goes on here with what it carries.

        Raises:
            InvariantError: its output is as long already as it may get.
        """
        state = RequestState(request, self._live.next_sequence, request.prompt.tobytes())
        if carried is None:
            return state
        if len(carried.output) >= request.max_tokens:
            raise InvariantError(f"request {request.request_id} has all of its output and cannot go on")
        for token in carried.output:
            state.append(token)
        if carried.first_scheduled_s is not None:
            state.status = Status.PREEMPTED  # it ran before, elsewhere
        state.first_scheduled_s = carried.first_scheduled_s
        state.num_cached_tokens = carried.num_cached_tokens
        state.num_preemptions = carried.num_preemptions
        if carried.first_token_s is not None:
            state.first_token_s = carried.first_token_s
            state.pace_s = self._knowledge.pace_s(state, carried.first_token_s)
        return state

    # -- going --------------------------------------------------------------------------------------------------------

    def extract(self, request_id: str, now_s: float, *, keep: bool = False) -> tuple[Departure, ...]:
        """Take a live request out, with its group as long as that has not forked, to go on elsewhere.

        No event says so: it has not ended.

        Args:
            keep: keep its computed KV for a transfer; not that of a group.
        Returns:
            What each sequence takes along; nothing if the id is not known (any more).
        Raises:
            InvariantError: a step is in flight.
        """
        live = self._live
        state = live.by_id.get(request_id)
        if state is None:
            return ()
        if live.step is not None:
            raise InvariantError(f"{request_id} is extracted while step {live.step.plan.step_id} is in flight")
        leader = state.leader or state
        members = leader.members
        leader.is_kept = keep and len(members) == 1
        if leader.status is Status.RUNNING:
            live.running.depart(leader, now_s)
        else:
            live.waiting.remove(leader)
            self._kv.host.drop(leader.sequence)
            if not leader.is_kept:
                self.drop(leader, now_s)
        for member in members:
            live.end(member, now_s, {"cause": "moved"})
        return tuple(self._departure_of(member, self._kv.landings.find(member.sequence)) for member in members)

    def evacuate(self, now_s: float) -> list[tuple[Departure, ...]]:
        """Take every request out, group by group: the replica is lost, the step in flight with it."""
        self._live.step = None
        found = (self.extract(request_id, now_s) for request_id in list(self._live.by_id))
        return [departures for departures in found if departures]

    def note(self, state: RequestState) -> None:
        """Remember a request that ended with its KV kept."""
        landing = self._kv.landings.find(state.sequence)
        if landing is not None:
            self.departures[state.request_id] = self._departure_of(state, landing)

    def collect(self, request_id: str) -> Departure | None:
        """Return once what a request left behind that was added with `keep` and has ended by itself.

        Who collects it releases its landing, when the KV has been sent or will not be.
        """
        return self.departures.pop(request_id, None)

    def _departure_of(self, state: RequestState, landing: Landing | None) -> Departure:
        """Return what a request takes along; it runs no more."""
        if landing is not None:
            self._kv.landings.unassign(landing)
        return Departure(state.request, _carried_of(state, state.output), landing)

    # -- who might move; asked between two steps ----------------------------------------------------------------------

    def movable(self) -> list[Movable]:
        """Return the requests that decode, in the order in which they joined."""
        decoding = self._live.running.decoding
        computed = decoding.counters[DecodingBatch.COMPUTED, : decoding.size].tolist()
        states = decoding.states[: decoding.size].tolist()
        return [Movable(s.request_id, s.request.priority, n) for s, n in zip(states, computed, strict=True)]

    def peek(self, request_id: str) -> Carried | None:
        """Return what a request has that decodes, without taking it out; None if it does not (any more)."""
        decoding = self._live.running.decoding
        for state in decoding.states[: decoding.size].tolist():
            if state.request_id == request_id:
                return _carried_of(state, decoding.output_of(state))
        return None

    def queue_demand_blocks(self, now_s: float) -> int:
        """Return the blocks that the head of the queue asks for; 0 if nobody waits or it has them already."""
        head = self._live.waiting.first(now_s)
        if head is None or self._kv.landings.find(head.sequence) is not None:
            return 0
        return self._kv.blocks_for(self._memory.reserve_tokens(head))

    # -- landings of who waits ----------------------------------------------------------------------------------------

    def let_go(self, now_s: float) -> bool:
        """Give up the landing of the youngest waiting request, so that somebody can run; False if there is none.

        Its full blocks stay cached as long as nobody needs the room.
        """
        self._live.queue_is_stuck = False
        landed = [state for state in self._live.queued() if self._kv.landings.find(state.sequence) is not None]
        if not landed:
            return False
        youngest = max(landed, key=lambda state: (state.request.arrival_s, state.sequence))
        self.drop(youngest, now_s)
        return True

    def drop(self, state: RequestState, now_s: float) -> None:
        """Release the landing of a request, if it has one."""
        landing = self._kv.landings.find(state.sequence)
        if landing is not None:
            self._kv.landings.release(landing, now_s)


def _carried_of(state: RequestState, output: list[int]) -> Carried:
    """Return what a request has, with its output so far."""
    return Carried(
        output=tuple(output),
        first_scheduled_s=state.first_scheduled_s,
        first_token_s=state.first_token_s,
        num_cached_tokens=state.num_cached_tokens,
        num_preemptions=state.num_preemptions,
    )
