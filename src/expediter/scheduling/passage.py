"""Requests that come from other replicas, or go there, with what they have so far."""

from __future__ import annotations

from typing import NamedTuple

from expediter.core.errors import InvariantError
from expediter.core.request import Carried, Request, RequestState, Status
from expediter.kvcache.landing import Landing
from expediter.kvcache.manager import KVCacheManager
from expediter.scheduling.decoding import DecodingBatch
from expediter.scheduling.knowledge import Knowledge
from expediter.scheduling.memory import MemoryRule
from expediter.scheduling.ordering.queue import WaitingQueue
from expediter.scheduling.running import RunningSet


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
    """What a scheduler does for requests on their way; it shares the scheduler's parts.

    Attributes:
        departures: of requests that ended with their KV kept, until somebody collects them.
    """

    def __init__(
        self, kv: KVCacheManager, memory: MemoryRule, running: RunningSet, waiting: WaitingQueue, knowledge: Knowledge
    ) -> None:
        self.departures: dict[str, Departure] = {}
        self._kv = kv
        self._memory = memory
        self._running = running
        self._waiting = waiting
        self._knowledge = knowledge

    def state_of(self, request: Request, carried: Carried | None, sequence: int) -> RequestState:
        """Return the state of a request that goes on here with what it carries.

        Raises:
            InvariantError: its output is as long already as it may get.
        """
        known = request.prompt.tobytes()
        if carried is None:
            return RequestState(request, sequence, known)
        if len(carried.output) >= request.max_tokens:
            raise InvariantError(f"request {request.request_id} has all of its output and cannot go on")
        state = RequestState(request, sequence, known)
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

    def reserve(self, state: RequestState, num_tokens: int, now_s: float, *, is_short: bool) -> Landing | None:
        """Take blocks for the first `num_tokens` tokens of a request and for one more, if nobody older waits for room.

        Everybody who runs keeps a block to grow into. Without the look at the queue a stream of landings could starve
        a request that was preempted.

        Args:
            is_short: somebody did not find room when the last step was planned.
        """
        oldest = self._waiting.oldest
        is_first = oldest is None or oldest.request.arrival_s >= state.request.arrival_s
        if is_short and oldest is not None and not is_first and self._kv.landings.find(oldest.sequence) is None:
            return None
        return self._kv.landings.reserve(
            state.token_bytes,
            state.request.cache_salt,
            num_tokens,
            num_reserved=max(self._memory.reserve_tokens(state), num_tokens + 1),
            spare_blocks=self._memory.spare_blocks(state, self._running) + len(self._running),
            now_s=now_s,
        )

    # -- who might move; asked between two steps ----------------------------------------------------------------------

    def movable(self) -> list[Movable]:
        """Return the requests that decode, in the order in which they joined."""
        decoding = self._running.decoding
        computed = decoding.counters[DecodingBatch.COMPUTED, : decoding.size].tolist()
        states = decoding.states[: decoding.size].tolist()
        return [Movable(s.request_id, s.request.priority, n) for s, n in zip(states, computed, strict=True)]

    def peek(self, request_id: str) -> Carried | None:
        """Return what a request has that decodes, without taking it out; None if it does not (any more)."""
        decoding = self._running.decoding
        for state in decoding.states[: decoding.size].tolist():
            if state.request_id == request_id:
                return self.carried_of(state, decoding.output_of(state))
        return None

    def queue_demand_blocks(self, now_s: float) -> int:
        """Return the blocks that the head of the queue asks for; 0 if nobody waits or it has them already."""
        head = self._waiting.first(now_s)
        if head is None or self._kv.landings.find(head.sequence) is not None:
            return 0
        return self._kv.blocks_for(self._memory.reserve_tokens(head))

    # -- landings of who waits ----------------------------------------------------------------------------------------

    def let_go(self, waiting: list[RequestState], now_s: float) -> bool:
        """Give up the landing of the youngest waiting request, so that somebody can run; False if there is none.

        Its full blocks stay cached as long as nobody needs the room.
        """
        landed = [state for state in waiting if self._kv.landings.find(state.sequence) is not None]
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

    def note(self, state: RequestState) -> None:
        """Remember a request that ended with its KV kept."""
        landing = self._kv.landings.find(state.sequence)
        if landing is not None:
            self.departures[state.request_id] = self.departure_of(state, landing)

    def departure_of(self, state: RequestState, landing: Landing | None) -> Departure:
        """Return what a request takes along; it runs no more."""
        if landing is not None:
            self._kv.landings.unassign(landing)
        return Departure(state.request, self.carried_of(state, state.output), landing)

    @staticmethod
    def carried_of(state: RequestState, output: list[int]) -> Carried:
        """Return what a request has, with its output so far."""
        return Carried(
            output=tuple(output),
            first_scheduled_s=state.first_scheduled_s,
            first_token_s=state.first_token_s,
            num_cached_tokens=state.num_cached_tokens,
            num_preemptions=state.num_preemptions,
        )
