"""Policies that look at no more than the load, or not even at that."""

from __future__ import annotations

from bisect import bisect_right

from expediter.control.fleet import Fleet, pending_tokens, requests
from expediter.control.routing.base import NO_REPLICA, Candidate, Decision, Placement, RouteQuery


class HandsOffToLeastLoaded:
    """What a policy does about handoffs if it says nothing else: fewest requests among those that decode."""

    def hand_off(self, query: RouteQuery, fleet: Fleet) -> Decision:  # noqa: ARG002 - the protocol's argument
        least = fleet.least(requests, "decode")
        if least is None:
            return NO_REPLICA
        return Placement(
            replica_id=least.replica_id,
            because="it has the fewest requests of those that decode",
            candidates=(Candidate(least.replica_id, least.num_requests),),
        )


class RoundRobin(HandsOffToLeastLoaded):
    """Each replica in turn, by ascending id; one that is away is passed over, not waited for."""

    def __init__(self) -> None:
        self._last = -1
        self._generation = -1
        self._ids: list[int] = []

    def route(self, query: RouteQuery, fleet: Fleet) -> Decision:  # noqa: ARG002 - this policy looks at no request
        if fleet.generation != self._generation:
            self._generation = fleet.generation
            self._ids = sorted(fleet.ids("prefill"))
        if not self._ids:
            return NO_REPLICA
        place = bisect_right(self._ids, self._last)
        self._last = self._ids[place if place < len(self._ids) else 0]
        return Placement(replica_id=self._last, because="it is its turn")


class LeastLoad(HandsOffToLeastLoaded):
    """Fewest pending prompt tokens, then fewest requests, then in turn: ties never pile up on the first replica."""

    def route(self, query: RouteQuery, fleet: Fleet) -> Decision:  # noqa: ARG002 - this policy looks at no request
        least = fleet.least(pending_tokens, "prefill")
        if least is None:
            return NO_REPLICA
        return Placement(
            replica_id=least.replica_id,
            because="it has the fewest prompt tokens left to compute",
            candidates=(Candidate(least.replica_id, least.num_pending_tokens),),
        )
