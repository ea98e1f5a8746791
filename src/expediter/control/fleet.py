"""The replicas as a router sees them, kept up to date one change at a time.

Whoever drives a replica lets it join, and marks it whenever its load may have changed. Only marked replicas are looked
at again when the next request comes: an arrival costs what has changed since the last one, not a walk over everybody.
The least loaded is found in heaps, O(log n) per change; policies that weigh all replicas against each other get them
all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NamedTuple, get_args

from expediter.control.speed import Speed
from expediter.core.errors import InvariantError
from expediter.core.request import Request
from expediter.scheduling.lazy_heap import LazyHeap

Role = Literal["prefill", "decode", "mixed"]
"""What a replica does: compute prompts, yield tokens, or both."""
ROLES: Final[tuple[Role, ...]] = get_args(Role)
Side = Literal["prefill", "decode"]
"""What somebody is wanted for; a mixed replica can do either."""
_ROLES_OF: Final[dict[Side, tuple[Role, Role]]] = {"prefill": ("prefill", "mixed"), "decode": ("decode", "mixed")}


class ReplicaSnapshot(NamedTuple):
    """What a router sees of one replica at one moment.

    Attributes:
        replica_id: stable number of the replica.
        num_requests: requests dispatched to it that have not ended, counted at dispatch.
        num_pending_tokens: prompt tokens dispatched to it whose KV has not been computed yet, as far as it is not
            expected to be cached there.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaProfile:
    """What does not change while a replica is in the fleet.

    Attributes:
        role: what it does.
        speed: how fast it computes.
        max_kv_tokens: tokens that its KV cache holds; None if that is not known.
        caches_prefixes: whether it keeps prompts for others.
        cached_tokens: asks its cache how many leading tokens of a request's prompt it holds; None where nobody can.
    """

    role: Role = "mixed"
    speed: Speed = field(default_factory=Speed)
    max_kv_tokens: int | None = None
    caches_prefixes: bool = True
    cached_tokens: Callable[[Request], int] | None = None


MIXED: Final = ReplicaProfile()


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLink:
    """Time to copy KV between two replicas that do nothing else on the wire: latency + tokens * time per token."""

    latency_s: float
    token_s: float

    def transfer_s(self, num_tokens: float) -> float:
        return self.latency_s + num_tokens * self.token_s if num_tokens > 0 else 0.0


@dataclass(slots=True, eq=False)
class Member:
    """A replica in the fleet. Only the fleet writes to it.

    Attributes:
        sequence: unique to this stay: one that comes back is another member.
        slot: its place in arrays over the fleet.
        snapshot: its load when it was last looked at.
        queue_s: how long what was sent to it keeps it busy before a new prompt's turn comes.
        last_dispatch: number of the last request that was sent there.
        is_paused: it gets nothing.
    """

    sequence: int
    slot: int
    profile: ReplicaProfile
    look: Callable[[], ReplicaSnapshot]
    snapshot: ReplicaSnapshot
    queue_s: float = 0.0
    last_dispatch: int = 0
    is_paused: bool = False

    @property
    def replica_id(self) -> int:
        return self.snapshot.replica_id


class Lineup:
    """Who does one side's work and is not paused, by slot, and what routers compare of them: lists in that order.

    A router that weighs everybody walks over these lists, not over members: an element takes a tenth of the time.

    Attributes:
        members: they are.
        places: of each in the lists, by slot.
        speeds: of each.
        speed: of all of them; None if they differ, or there is nobody.
        queue_s: `Member.queue_s` of each.
        num_requests: of each.
    """

    __slots__ = ("members", "num_requests", "places", "queue_s", "speed", "speeds")

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = tuple(members)
        self.places = {member.slot: place for place, member in enumerate(self.members)}
        self.speeds = [member.profile.speed for member in self.members]
        self.speed = self.speeds[0] if self.speeds and self.speeds.count(self.speeds[0]) == len(self.speeds) else None
        self.queue_s = [member.queue_s for member in self.members]
        self.num_requests = [member.snapshot.num_requests for member in self.members]

    def took(self, member: Member) -> None:
        """Hear that a member's load has changed, if it is one of these."""
        place = self.places.get(member.slot)
        if place is not None:
            self.queue_s[place] = member.queue_s
            self.num_requests[place] = member.snapshot.num_requests


def _key(load: Load, member: Member) -> tuple[float, ...]:
    return (*load(member.snapshot), member.last_dispatch, member.snapshot.replica_id)


class Fleet:
    """The replicas that take requests.

    Each has a slot while it stays, a small number that is its place in arrays; a slot that is left may be taken again.

    Args:
        link: between any two of them; None if KV cannot be copied.
    Attributes:
        generation: rises whenever a replica joins, leaves, pauses or resumes; who keeps something per replica compares
            it.
    """

    def __init__(self, link: KvLink | None = None) -> None:
        self.generation = 0
        self.link = link
        self._members: dict[int, Member] = {}
        self._by_slot: list[Member | None] = []
        self._marked: dict[int, None] = {}
        self._heaps: dict[tuple[Load, Role], LazyHeap[Member]] = {}
        self._loads: dict[Load, None] = {}
        self._num_dispatched = 0
        self._lineups: dict[Side, Lineup] = {}
        self._num_requests: dict[Role, int] = dict.fromkeys(ROLES, 0)

    # ---- who is in it

    def join(
        self,
        replica_id: int,
        look: Callable[[], ReplicaSnapshot],
        profile: ReplicaProfile = MIXED,
        slot: int | None = None,
    ) -> None:
        """Let a replica take requests; its caches are taken to be empty.

        Args:
            look: returns its load; called after it was marked.
            slot: that it shall have, so that fleets which share replicas can share an index; None for the first free.
        Raises:
            InvariantError: it is in the fleet already, or somebody else has the slot.
        """
        if replica_id in self._members:
            raise InvariantError(f"replica {replica_id} is in the fleet already")
        if slot is None:
            slot = next((slot for slot, member in enumerate(self._by_slot) if member is None), len(self._by_slot))
        self._by_slot.extend([None] * (slot + 1 - len(self._by_slot)))
        if self._by_slot[slot] is not None:
            raise InvariantError(f"slot {slot} is taken")
        self._changed()
        snapshot = look()
        member = self._by_slot[slot] = Member(self.generation, slot, profile, look, snapshot)
        self._members[replica_id] = member
        self._num_requests[profile.role] += snapshot.num_requests
        self._take(member)

    def leave(self, replica_id: int) -> None:
        """Send a replica no more requests; one that is not in the fleet is none the less gone."""
        member = self._members.pop(replica_id, None)
        if member is None:
            return
        self._changed()
        self._marked.pop(replica_id, None)
        if not member.is_paused:
            self._withdraw(member)
        self._by_slot[member.slot] = None

    def pause(self, replica_id: int) -> None:
        """Send a replica nothing for a while; it keeps its slot, and what is known of its caches stays.

        One that is paused already, or is not in the fleet, is left alone.
        """
        member = self._members.get(replica_id)
        if member is not None and not member.is_paused:
            member.is_paused = True
            self._changed()
            self._withdraw(member)

    def resume(self, replica_id: int) -> None:
        """End a pause; one that is not paused is left alone."""
        member = self._members.get(replica_id)
        if member is not None and member.is_paused:
            member.is_paused = False
            self._changed()
            member.snapshot = member.look()
            self._num_requests[member.profile.role] += member.snapshot.num_requests
            self._take(member)

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, replica_id: int) -> bool:
        return replica_id in self._members

    def ids(self, side: Side) -> list[int]:
        """Return who does that, by slot."""
        return [member.replica_id for member in self.members(side)]

    def can(self, replica_id: int, side: Side) -> bool:
        """Return whether a replica is in the fleet, not paused, and does that."""
        member = self._members.get(replica_id)
        return member is not None and not member.is_paused and member.profile.role in _ROLES_OF[side]

    @property
    def num_slots(self) -> int:
        """Slots are [0, num_slots); some may be empty."""
        return len(self._by_slot)

    def members(self, side: Side) -> Sequence[Member]:
        """Return who does that and is not paused, by slot, with their loads as they are now."""
        return self.lineup(side).members

    def lineup(self, side: Side) -> Lineup:
        """Return who does that and is not paused, with their loads as they are now; good until the next change."""
        if self._marked:
            self._refresh()
        found = self._lineups.get(side)
        if found is None:
            roles = _ROLES_OF[side]
            found = self._lineups[side] = Lineup(
                [m for m in self._by_slot if m is not None and not m.is_paused and m.profile.role in roles]
            )
        return found

    def slot_of(self, replica_id: int) -> int:
        return self._members[replica_id].slot

    def id_at(self, slot: int) -> int:
        """Return who has a slot that is not empty."""
        member = self._by_slot[slot]
        assert member is not None
        return member.snapshot.replica_id

    def stay_at(self, slot: int) -> int:
        """Return a number for the stay of whoever has a slot, unlike that of anybody before; 0 if nobody has it."""
        member = self._by_slot[slot]
        return 0 if member is None else member.sequence

    def profile(self, replica_id: int) -> ReplicaProfile:
        return self._members[replica_id].profile

    def learned(self, replica_id: int, speed: Speed) -> None:
        """Say how fast a replica is, where that is found out while it serves."""
        member = self._members.get(replica_id)
        if member is not None:
            member.profile = replace(member.profile, speed=speed)
            self._marked[replica_id] = None
            self._lineups.clear()

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

    def queue_s(self, replica_id: int) -> float:
        """Return how long what was sent to a replica keeps it busy before a new prompt's turn comes."""
        self._refresh()
        return self._members[replica_id].queue_s

    def num_requests(self, side: Side) -> int:
        """Return the requests of all who do that."""
        self._refresh()
        own, mixed = _ROLES_OF[side]
        return self._num_requests[own] + self._num_requests[mixed]

    def least(self, load: Load, side: Side) -> ReplicaSnapshot | None:
        """Return who has the least load, of equals the one dispatched to longest ago; None if nobody does that.

        Cost: O(log n) per replica that has changed.
        """
        return self.least_of(load, _ROLES_OF[side])

    def least_of(self, load: Load, roles: Sequence[Role]) -> ReplicaSnapshot | None:
        """Return who of these roles has the least load; see `least`."""
        self._refresh()
        if load not in self._loads:
            self._keep_heaps(load)
        firsts = (self._heaps[load, role].first() for role in roles)
        found = [(key, member.sequence, member) for key, member in filter(None, firsts)]
        return min(found)[2].snapshot if found else None

    def _refresh(self) -> None:
        if not self._marked:
            return
        for replica_id in self._marked:
            member = self._members[replica_id]
            before, member.snapshot = member.snapshot, member.look()
            if not member.is_paused:
                self._num_requests[member.profile.role] += member.snapshot.num_requests - before.num_requests
                self._take(member)
                for lineup in self._lineups.values():
                    lineup.took(member)
        self._marked.clear()

    def _changed(self) -> None:
        self.generation += 1
        self._lineups.clear()

    def _withdraw(self, member: Member) -> None:
        for load in self._loads:
            self._heaps[load, member.profile.role].remove(member)
        self._num_requests[member.profile.role] -= member.snapshot.num_requests

    def _take(self, member: Member) -> None:
        snapshot = member.snapshot
        running = min(snapshot.num_running, snapshot.num_requests)
        member.queue_s = member.profile.speed.queue_s(
            snapshot.num_pending_tokens,
            snapshot.num_requests - running,
            running,
            max(0, snapshot.num_context_tokens - snapshot.num_pending_tokens),
        )
        for load in self._loads:
            self._heaps[load, member.profile.role].put(member, _key(load, member))

    def _keep_heaps(self, load: Load) -> None:
        self._loads[load] = None
        for role in ROLES:
            self._heaps[load, role] = LazyHeap()
        for member in self._members.values():
            if not member.is_paused:
                self._heaps[load, member.profile.role].put(member, _key(load, member))
