"""Fleets whose loads a test sets by hand."""

import numpy as np

from expediter.control.fleet import Fleet, ReplicaSnapshot
from expediter.control.routing.base import RouteQuery
from expediter.core.request import Request


class HandFleet:
    """A fleet of replicas with loads that are set, and that count what is sent to them."""

    def __init__(self, *pending_tokens, roles=()):
        self.fleet = Fleet()
        self.loads = {}
        for number, pending in enumerate(pending_tokens):
            self.join(number, roles[number] if roles else "mixed", num_pending_tokens=pending)

    def join(self, replica_id, role="mixed", **load):
        self.loads[replica_id] = {"num_requests": 0, "num_pending_tokens": 0, **load}
        self.fleet.join(replica_id, lambda: ReplicaSnapshot(replica_id=replica_id, **self.loads[replica_id]), role=role)

    def set(self, replica_id, **load):
        self.loads[replica_id].update(load)
        self.fleet.mark(replica_id)

    def send(self, router, request):
        """Route a request, count it where it goes, and return the decision."""
        decision = router.route(query(request), self.fleet)
        load = self.loads[decision.replica_id]
        load["num_requests"] += 1
        load["num_pending_tokens"] += request.num_prompt_tokens
        self.fleet.dispatched(decision.replica_id)
        return decision


def query(request, now_s=0.0):
    return RouteQuery.of((request,), now_s)


def request_of(num_tokens, request_id="r", **fields):
    """Return a request whose prompt is its own."""
    return Request(request_id=request_id, prompt=np.arange(num_tokens, dtype=np.int32), max_tokens=8, **fields)
