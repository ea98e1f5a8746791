"""The replicas as a router sees them, kept up to date one change at a time.

Whoever drives a replica lets it join, and marks it whenever its load may have changed. Only marked replicas are looked
at again when the next request comes: an arrival costs what has changed since the last one, not a walk over everybody.
The least loaded is found in heaps, O(log n) per change; policies that weigh all replicas against each other get the
loads as arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from expediter.core.errors import InvariantError
from expediter.scheduling.lazy_heap import LazyHeap

Role = Literal["prefill", "decode", "mixed"]
"""What a replica does: compute prompts, yield tokens, or both."""
ROLES: Final[tuple[Role, ...]] = get_args(Role)
Side = Literal["prefill", "decode"]
"""What somebody is wanted for; a mixed replica can do either."""
_ROLES_OF: Final[dict[Side, tuple[Role, Role]]] = {"prefill": ("prefill", "mixed"), "decode": ("decode", "mixed")}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSnapshot:
    """What a router sees of one replica at one moment.

    Attributes:
        replica_id: stable number of the replica.
        num_requests: requests dispatched to it that have not ended, counted at dispatch.
        num_pending_tokens: prompt tokens dispatched to it whose KV has not been computed yet.
        num_context_tokens: prompt tokens of all those requests, computed or not.
        num_running: requests in its running batch when it last said so.
    """

    replica_id: int
    num_requests: int
    num_pending_tokens: int
    num_context_tokens: int = 0
    num_running: int = 0


Load = Callable[[ReplicaSnapshot], tuple[float, ...]]
"""How loaded a replica is; less comes first. Pass the same function each time: heaps are kept per function."""


def pending_tokens(snapshot: ReplicaSnapshot) -> tuple[float, ...]:
    """Prompt tokens left to compute, then requests."""
    return snapshot.num_pending_tokens, snapshot.num_requests


def requests(snapshot: ReplicaSnapshot) -> tuple[float, ...]:
    """Requests, then the tokens of their prompts."""
    return snapshot.num_requests, snapshot.num_context_tokens


@dataclass(slots=True, eq=False)
class _Member:
    """A replica in the fleet. `sequence` is unique to this stay: one that comes back is another member."""

    sequence: int
    slot: int
    role: Role
    look: Callable[[], ReplicaSnapshot]
    snapshot: ReplicaSnapshot
    last_dispatch: int = 0


def _key(load: Load, member: _Member) -> tuple[float, ...]:
    return (*load(member.snapshot), member.last_dispatch, member.snapshot.replica_id)


class Fleet:
    """The replicas that take requests.

    Attributes:
        generation: rises whenever a replica joins or leaves; who keeps something per replica compares it.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._members: dict[int, _Member] = {}
        self._by_slot: list[_Member] = []
        self._marked: dict[int, None] = {}
        self._heaps: dict[tuple[Load, Role], LazyHeap[_Member]] = {}
        self._loads: dict[Load, None] = {}
        self._num_dispatched = 0
        self._columns: npt.NDArray[np.float64] = np.zeros((4, 8))

    # ---- who is in it

    def join(self, replica_id: int, look: Callable[[], ReplicaSnapshot], *, role: Role = "mixed") -> None:
        """Let a replica take requests; its caches are taken to be empty.

        Args:
            look: returns its load; called after it was marked.
        Raises:
            InvariantError: it is in the fleet already.
        """
        if replica_id in self._members:
            raise InvariantError(f"replica {replica_id} is in the fleet already")
        self.generation += 1
        member = _Member(self.generation, len(self._by_slot), role, look, look())
        self._members[replica_id] = member
        self._by_slot.append(member)
        if len(self._by_slot) > self._columns.shape[1]:
            self._columns = np.concatenate((self._columns, np.zeros_like(self._columns)), axis=1)
        self._take(member)

    def leave(self, replica_id: int) -> None:
        """Send a replica no more requests; one that is not in the fleet is none the less gone."""
        member = self._members.pop(replica_id, None)
        if member is None:
            return
        self.generation += 1
        self._marked.pop(replica_id, None)
        for load in self._loads:
            self._heaps[load, member.role].remove(member)
        last = self._by_slot.pop()
        if last is not member:
            self._by_slot[member.slot] = last
            self._columns[:, member.slot] = self._columns[:, last.slot]
            last.slot = member.slot

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, replica_id: int) -> bool:
        return replica_id in self._members

    def __iter__(self) -> Iterator[int]:
        """Iterate over the ids, in the order in which they joined."""
        return iter(self._members)

    def can(self, replica_id: int, side: Side) -> bool:
        """Return whether a replica is in the fleet and does that."""
        member = self._members.get(replica_id)
        return member is not None and member.role in _ROLES_OF[side]

    # ---- their load

    def mark(self, replica_id: int) -> None:
        """Say that a replica's load may have changed; one that is not in the fleet is left alone."""
        if replica_id in self._members:
            self._marked[replica_id] = None

    def dispatched(self, replica_id: int) -> None:
        """Say that a request was just sent to a replica, so that others of equal load come before it from now on."""
        self._num_dispatched += 1
        self._members[replica_id].last_dispatch = self._num_dispatched
        self._marked[replica_id] = None

    def snapshot(self, replica_id: int) -> ReplicaSnapshot:
        """Return the load of a replica."""
        self._refresh()
        return self._members[replica_id].snapshot

    def least(self, load: Load, side: Side) -> ReplicaSnapshot | None:
        """Return who has the least load, of equals the one dispatched to longest ago; None if nobody does that."""
        self._refresh()
        if load not in self._loads:
            self._keep_heaps(load)
        firsts = (self._heaps[load, role].first() for role in _ROLES_OF[side])
        found = [(key, member.sequence, member) for key, member in filter(None, firsts)]
        return min(found)[2].snapshot if found else None

    def _refresh(self) -> None:
        if not self._marked:
            return
        for replica_id in self._marked:
            member = self._members[replica_id]
            member.snapshot = member.look()
            self._take(member)
        self._marked.clear()

    def _take(self, member: _Member) -> None:
        snapshot = member.snapshot
        self._columns[:, member.slot] = (
            snapshot.num_requests,
            snapshot.num_pending_tokens,
            snapshot.num_context_tokens,
            snapshot.num_running,
        )
        for load in self._loads:
            self._heaps[load, member.role].put(member, _key(load, member))

    def _keep_heaps(self, load: Load) -> None:
        self._loads[load] = None
        for role in ROLES:
            self._heaps[load, role] = LazyHeap()
        for member in self._by_slot:
            self._heaps[load, member.role].put(member, _key(load, member))
