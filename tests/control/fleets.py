"""Fleets whose loads a test sets by hand."""

from collections import deque

import numpy as np

from expediter.control.fleet import Fleet, ReplicaProfile, ReplicaSnapshot
from expediter.control.routing.base import Placement, RouteQuery
from expediter.core.request import Request


class HandFleet:
    """A fleet of replicas with loads that are set, and that count what is sent to them."""

    def __init__(self, *pending_tokens, roles=(), link=None, **profile):
        self.fleet = Fleet(link)
        self.loads = {}
        for number, pending in enumerate(pending_tokens):
            role = roles[number] if roles else "mixed"
            self.join(number, ReplicaProfile(role=role, **profile), num_pending_tokens=pending)

    def join(self, replica_id, profile=None, **load):
        self.loads[replica_id] = {
            "num_requests": 0,
            "num_pending_tokens": 0,
            "num_context_tokens": 0,
            "num_running": 0,
            **load,
        }
        self.fleet.join(
            replica_id,
            lambda: ReplicaSnapshot(replica_id=replica_id, **self.loads[replica_id]),
            profile or ReplicaProfile(),
        )

    def set(self, replica_id, **load):
        self.loads[replica_id].update(load)
        self.fleet.mark(replica_id)

    def add(self, replica_id, **more):
        self.set(replica_id, **{name: self.loads[replica_id][name] + by for name, by in more.items()})

    def send(self, router, request, now_s=0.0):
        """Route a request, count it where it goes, and return the decision."""
        decision = router.route(query(request, now_s), self.fleet)
        if isinstance(decision, Placement):
            tokens = request.num_prompt_tokens
            new = tokens - decision.num_cached_tokens
            self.add(decision.replica_id, num_requests=1, num_pending_tokens=new, num_context_tokens=tokens)
            self.fleet.dispatched(decision.replica_id)
        return decision


class ClosedLoop:
    """So many clients, each sending its next request when its last one has ended; replicas hold what they were sent.

    A prompt is computed as soon as the next request has been sent; requests end in the order in which they came.

    Attributes:
        sent: requests by replica.
        num_tokens, num_hits: prompt tokens, and those of them that the replica held already, by exact count.
    """

    def __init__(self, hand, router, num_clients):
        self.hand, self.router, self.num_clients = hand, router, num_clients
        self.sent = dict.fromkeys(hand.loads, 0)
        self.num_tokens = self.num_hits = 0
        self.decisions = []
        self._held = {replica_id: [] for replica_id in hand.loads}
        self._in_flight = deque()
        self._now_s = 0.0

    def run(self, requests):
        for request in requests:
            self._now_s += 0.01
            if len(self._in_flight) == self.num_clients:
                replica_id, tokens = self._in_flight.popleft()
                self.hand.add(replica_id, num_requests=-1, num_context_tokens=-tokens, num_running=-1)
            decision = self.hand.send(self.router, request, self._now_s)
            self.decisions.append(decision)
            self._count(decision.replica_id, request)
            self._in_flight.append((decision.replica_id, request.num_prompt_tokens))
            self.hand.add(decision.replica_id, num_running=1)
            self.hand.set(decision.replica_id, num_pending_tokens=0)
        return self

    @property
    def hit_rate(self):
        return self.num_hits / self.num_tokens

    def _count(self, replica_id, request):
        self.sent[replica_id] += 1
        prompt = request.prompt
        shared = (int((np.append(prompt[: len(h)] != h[: len(prompt)], True)).argmax()) for h in self._held[replica_id])
        self.num_hits += max(shared, default=0)
        self.num_tokens += len(prompt)
        self._held[replica_id].append(prompt)


def query(request, now_s=0.0):
    return RouteQuery.of((request,), now_s)


def request_of(num_tokens, request_id="r", **fields):
    """Return a request whose prompt counts up from 0."""
    return Request(request_id=request_id, prompt=np.arange(num_tokens, dtype=np.int32), max_tokens=8, **fields)


def requests_sharing(num_requests, num_shared, num_own, *, first_token=0, name="r", **fields):
    """Return requests that begin alike and end each in its own way."""
    shared = np.arange(num_shared, dtype=np.int32) + first_token
    return [
        Request(
            request_id=f"{name}{number}",
            prompt=np.concatenate((shared, np.full(num_own, 1_000_000 + first_token + number, np.int32))),
            max_tokens=8,
            **fields,
        )
        for number in range(num_requests)
    ]
