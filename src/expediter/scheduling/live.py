"""The requests on one replica that have not ended, and the step in flight."""

from __future__ import annotations

from collections.abc import Mapping

from expediter.core.errors import InvariantError
from expediter.core.events import Event, Queued, Rejected, RejectReason
from expediter.core.explanation import Detail, Reason
from expediter.core.request import RequestState, Status
from expediter.scheduling.explanations import Explanations
from expediter.scheduling.in_flight import InFlight
from expediter.scheduling.ordering.base import Ordering
from expediter.scheduling.ordering.queue import WaitingQueue
from expediter.scheduling.running import RunningSet


class LiveRequests:
    """What the scheduler, its passage and its runs have in common.

    Attributes:
        by_id: all live requests.
        waiting: those without a slot, by the leaders of their groups.
        running: those with one.
        explanations: what held each of them.
        step: in flight; None between `apply` and the next `plan`.
        queue_is_stuck: who waits would meet the same refusals again. Whoever lets a request or blocks come or go sets
            this back.
        num_refused: waiting requests that were tried in vain when the last step was planned, by reason.
        next_sequence: sequence number of the next request.
    """

    def __init__(self, running: RunningSet, ordering: Ordering, max_explanations: int) -> None:
        self.by_id: dict[str, RequestState] = {}
        self.waiting = WaitingQueue(ordering)
        self.running = running
        self.explanations = Explanations(max_explanations)
        self.step: InFlight | None = None
        self.queue_is_stuck = False
        self.num_refused: dict[Reason, int] = {}
        self.next_sequence = 0
        self._ordering = ordering

    @property
    def num_waiting(self) -> int:
        """Requests without a slot, each of a group counted."""
        return len(self.by_id) - len(self.running)

    def queued(self) -> list[RequestState]:
        """Return those without a slot, in the order in which they came."""
        return [state for state in self.by_id.values() if state.status is not Status.RUNNING]

    # -- coming and going ---------------------------------------------------------------------------------------------

    def enqueue(self, leader: RequestState, now_s: float) -> list[Event]:
        """Let a request wait with its followers; they are new here, and can run."""
        requests = [state.request for state in leader.members]
        waiting = self.num_waiting, self.waiting.num_tokens
        self.next_sequence += len(requests)
        self.by_id.update((state.request_id, state) for state in leader.members)
        self._ordering.tick(self.running.decode_clock)
        self.waiting.push(leader, now_s)
        self.queue_is_stuck = False
        reason, details = self._ordering.place(leader)
        for request in requests:
            self.explanations.queued(request.request_id, now_s, (reason, dict(details)), waiting)
        return [Queued(r.request_id, now_s, r.tenant, r.slo_class, r.slo) for r in requests]

    def reject(self, leader: RequestState, refusal: tuple[RejectReason, str], now_s: float) -> list[Event]:
        """Turn a request away with its followers; they are live no more, or never were."""
        events: list[Event] = []
        for member in leader.members:
            if self.by_id.get(member.request_id) is member:
                self.remove(member)
            self.explanations.ended(member.request_id, now_s, Reason.REJECTED, {"cause": refusal[1]})
            events.append(Rejected(member.request_id, now_s, *refusal))
        return events

    def end(self, state: RequestState, now_s: float, details: Mapping[str, Detail]) -> None:
        """Let a request go that ends, or goes on elsewhere; it has no slot any more and is not in the queue."""
        self.remove(state)
        self.queue_is_stuck = False
        self.explanations.ended(state.request_id, now_s, Reason.ENDED, dict(details))

    def remove(self, state: RequestState) -> None:
        state.move(Status.FINISHED)
        del self.by_id[state.request_id]

    # -- integrity ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Verify blocks, slots and queues against each other.

        Raises:
            InvariantError: they disagree (a bug of ours).
        """
        self.running.check()
        queued = self.queued()
        if len(queued) + len(self.running) != len(self.by_id):
            raise InvariantError(
                f"{len(self.by_id)} live requests, {len(self.running)} running and {len(queued)} waiting"
            )
        if sum(state.leader is None for state in queued) != len(self.waiting):
            raise InvariantError(f"{len(self.waiting)} groups are queued, {len(queued)} requests wait")
        for state in self.by_id.values():
            leader = state.leader
            if leader is not None and (state not in leader.followers or state.status is not leader.status):
                raise InvariantError(f"{state.request_id} is {state.status.value} apart from its leader")
