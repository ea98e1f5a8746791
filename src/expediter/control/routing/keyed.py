"""Policies by a key of the request: the same key goes to the same replica as long as that is not overloaded."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left, insort
from collections import OrderedDict
from typing import Final

import numpy as np

from expediter.control.fleet import Fleet, pending_tokens, requests
from expediter.control.routing.base import NO_REPLICA, Candidate, Decision, Placement, RouteQuery
from expediter.control.routing.simple import HandsOffToLeastLoaded

_MAX_SESSIONS: Final = 1 << 17
_HEAD_TOKENS: Final = 64


class Random(HandsOffToLeastLoaded):
    """Anybody.

    Args:
        rng: draws; nobody else uses it.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def route(self, query: RouteQuery, fleet: Fleet) -> Decision:  # noqa: ARG002 - this policy looks at no request
        members = fleet.members("prefill")
        if not members:
            return NO_REPLICA
        drawn = members[int(self._rng.integers(len(members)))]
        return Placement(replica_id=drawn.replica_id, because="it was drawn")


class PowerOfTwo(HandsOffToLeastLoaded):
    """The less loaded of two drawn at random: nearly as even as the least of all, and no herd after old news.

    Args:
        rng: draws; nobody else uses it.
    Source: Mitzenmacher, The Power of Two Choices in Randomized Load Balancing (2001).
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def route(self, query: RouteQuery, fleet: Fleet) -> Decision:  # noqa: ARG002 - this policy looks at no request
        members = fleet.members("prefill")
        num = len(members)
        if not num:
            return NO_REPLICA
        first = int(self._rng.integers(num))
        second = (first + 1 + int(self._rng.integers(num - 1))) % num if num > 1 else first
        drawn = [members[place].snapshot for place in (first, second)]
        drawn.sort(key=pending_tokens)
        return Placement(
            replica_id=drawn[0].replica_id,
            because="it has fewer prompt tokens left to compute than the other one that was drawn",
            candidates=tuple(Candidate(each.replica_id, each.num_pending_tokens) for each in drawn),
        )


class Sessions(HandsOffToLeastLoaded):
    """A session stays where its first request went, which is where the least is left to compute.

    It moves when its replica is gone, or has more requests than `relative` times the mean and `slack` on top. A request
    without a session goes where the least is left to compute.
    """

    def __init__(self, relative: float = 1.5, slack: float = 2.0) -> None:
        self._relative = relative
        self._slack = slack
        self._places: OrderedDict[tuple[str, str], tuple[int, int]] = OrderedDict()

    def route(self, query: RouteQuery, fleet: Fleet) -> Decision:
        least = fleet.least(pending_tokens, "prefill")
        if least is None:
            return NO_REPLICA
        session = query.request.tenant, query.request.session
        if not session[1]:
            return Placement(replica_id=least.replica_id, because="it has the least to compute; there is no session")
        replica_id, because = self._place(session, query, fleet)
        if replica_id is None:
            replica_id, because = least.replica_id, f"{because}, and there is the least to compute"
        self._places[session] = replica_id, fleet.stay_at(fleet.slot_of(replica_id))
        self._places.move_to_end(session)
        if len(self._places) > _MAX_SESSIONS:
            self._places.popitem(last=False)
        return Placement(replica_id=replica_id, because=because)

    def _place(self, session: tuple[str, str], query: RouteQuery, fleet: Fleet) -> tuple[int | None, str]:
        """Return where a session is, or None if it has to go elsewhere, and why."""
        replica_id, stay = self._places.get(session, (-1, 0))
        if not stay:
            return None, "its session begins"
        if not fleet.can(replica_id, "prefill") or fleet.stay_at(fleet.slot_of(replica_id)) != stay:
            return None, "the replica of its session is gone"
        mean = (fleet.num_requests("prefill") + query.num_sequences) / len(fleet.members("prefill"))
        if fleet.snapshot(replica_id).num_requests + query.num_sequences > self._relative * mean + self._slack:
            return None, "the replica of its session has more than its share"
        return replica_id, "its session is there"


class ConsistentHash(HandsOffToLeastLoaded):
    """The next replica on a ring behind the key's place, unless it has more than `relative` times the mean of requests.

    The key is the session, or the first 64 tokens of the prompt where there is none. When a replica comes or goes, only
    keys that go to it, or went to it, move. Needs no memory of requests: several routers agree.

    Args:
        relative: bound on a replica's requests, as a multiple of the mean; rounded up to whole requests.
        num_points: places of each replica on the ring.
    Source: Mirrokni, Thorup and Zadimoghaddam, Consistent Hashing with Bounded Loads (2016).
    """

    def __init__(self, relative: float = 1.5, num_points: int = 64) -> None:
        self._relative = relative
        self._num_points = num_points
        self._ring: list[tuple[int, int]] = []
        self._on_ring: set[int] = set()
        self._generation = 0

    def route(self, query: RouteQuery, fleet: Fleet) -> Decision:
        self._follow(fleet)
        if not self._ring:
            return NO_REPLICA
        total = fleet.num_requests("prefill") + query.num_sequences
        most = max(math.ceil(self._relative * total / len(self._on_ring)), query.num_sequences)
        place = bisect_left(self._ring, (_key_of(query), -1))
        passed: dict[int, None] = {}
        for step in range(len(self._ring)):
            replica_id = self._ring[(place + step) % len(self._ring)][1]
            if replica_id in passed:
                continue
            if fleet.snapshot(replica_id).num_requests + query.num_sequences <= most:
                skipped = f", the {len(passed)} before it have more than their share" if passed else ""
                return Placement(replica_id=replica_id, because=f"it is next on the ring{skipped}")
            passed[replica_id] = None
        # Requests with several sequences may find no room for all of them anywhere.
        least = fleet.least(requests, "prefill")
        assert least is not None
        return Placement(
            replica_id=least.replica_id, because="everybody has a full share, and it has the fewest requests"
        )

    def _follow(self, fleet: Fleet) -> None:
        if fleet.generation == self._generation:
            return
        self._generation = fleet.generation
        ids = set(fleet.ids("prefill"))
        gone = self._on_ring - ids
        if gone:
            self._ring = [point for point in self._ring if point[1] not in gone]
        for replica_id in sorted(ids - self._on_ring):
            for number in range(self._num_points):
                insort(self._ring, (_hash(f"{replica_id}/{number}".encode()), replica_id))
        self._on_ring = ids


def _key_of(query: RouteQuery) -> int:
    request = query.request
    if request.session:
        return _hash(f"{request.tenant}\0{request.session}".encode())
    return _hash(request.cache_salt.encode() + b"\0" + request.prompt[:_HEAD_TOKENS].tobytes())


def _hash(raw: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")
