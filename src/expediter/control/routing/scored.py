"""Filter, score, pick: what policies that weigh all replicas against each other are put together from."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, overload

import numpy as np

from expediter.control.fleet import Fleet, Member
from expediter.control.routing.base import NO_REPLICA, Candidate, Decision, Placement, RouteQuery
from expediter.control.routing.caches import CacheView
from expediter.control.routing.simple import HandsOffToLeastLoaded

_NUM_SHOWN: Final = 4


@dataclass(slots=True)  # made for every request, and freezing costs more than its fields
class View:
    """A request before the replicas that could compute its prompt; nobody changes it.

    Attributes:
        members: those replicas, at least one; all lists of a decision have that order.
        cached: leading prompt tokens that each holds.
        new: the others, which it would have to compute.
    """

    query: RouteQuery
    fleet: Fleet
    members: Sequence[Member]
    cached: list[int]
    new: list[int]

    @classmethod
    def of(cls, query: RouteQuery, fleet: Fleet, caches: CacheView) -> View | None:
        """Return a request before a fleet; None if nobody there computes prompts."""
        members, num_tokens = fleet.members("prefill"), len(query.request.prompt)
        if not members:
            return None
        held = caches.cached(query, fleet)
        if not held:
            return cls(query, fleet, members, [0] * len(members), [num_tokens] * len(members))
        cached = [held.get(member.slot, 0) for member in members]
        return cls(query, fleet, members, cached, [num_tokens - each for each in cached])

    def prefill_s(self) -> list[float]:
        """Return how long each computes what it lacks of the prompt, if it does nothing else."""
        return [
            member.profile.speed.prefill_s(new, cached)
            for member, new, cached in zip(self.members, self.new, self.cached, strict=True)
        ]


class Filter(Protocol):
    """Says who may get a request. If nobody may, everybody may."""

    because: str
    """Why somebody may not, as a clause about it."""

    def keep(self, view: View) -> list[bool] | None:
        """Return who may; None for everybody."""
        ...

    def placed(self, view: View, place: int) -> None:
        """Hear who gets it."""
        ...


class Scorer(Protocol):
    """Says what it costs to send a request to each replica."""

    def costs(self, view: View) -> list[float]:
        """Return costs, the least is best; infinite for who must not get it."""
        ...

    def because(self, view: View, place: int) -> str:
        """Return what speaks for a replica, as a clause about it."""
        ...

    def placed(self, view: View, place: int) -> None:
        """Hear who gets it."""
        ...


class Picker(Protocol):
    """Chooses by cost."""

    def pick(self, costs: list[float], view: View) -> int:
        """Return the place of the chosen one; its cost is finite."""
        ...


class Least:
    """The least cost; of equals, who got a request longest ago."""

    def pick(self, costs: list[float], view: View) -> int:
        lowest = min(costs)
        most = lowest + 1e-9 * abs(lowest)
        places = [place for place, cost in enumerate(costs) if cost <= most]
        return places[0] if len(places) == 1 else min(places, key=lambda place: view.members[place].last_dispatch)


class Softmax:
    """At random, the more likely the less it costs: no herd of routers that all see the same best replica.

    Costs are scaled to [0, 1] first.

    Args:
        temperature: 0 is the least cost.
        rng: draws; nobody else uses it.
    Source: NVIDIA Dynamo's KV router.
    """

    def __init__(self, temperature: float, rng: np.random.Generator) -> None:
        self._temperature = temperature
        self._rng = rng
        self._least = Least()

    def pick(self, costs: list[float], view: View) -> int:
        usable = [cost for cost in costs if cost < math.inf]
        lowest, width = min(usable), max(usable) - min(usable)
        if self._temperature <= 0 or width == 0:
            return self._least.pick(costs, view)
        weights = np.exp((lowest - np.array(costs)) / (width * self._temperature)).cumsum()
        return int(weights.searchsorted(self._rng.random() * weights[-1], side="right"))


class Scored(HandsOffToLeastLoaded):
    """A policy made of the three parts.

    Args:
        caches: what is known of prefixes; every placement is told to it.
    """

    def __init__(
        self, caches: CacheView, scorer: Scorer, filters: Sequence[Filter] = (), picker: Picker | None = None
    ) -> None:
        self.caches = caches
        self._filters = tuple(filters)
        self._scorer = scorer
        self._picker = Least() if picker is None else picker

    def route(self, query: RouteQuery, fleet: Fleet) -> Decision:
        view = View.of(query, fleet, self.caches)
        if view is None:
            return NO_REPLICA
        costs = self._scorer.costs(view)
        allowed, because = self._filtered(costs, view)
        place = self._picker.pick(allowed, view)
        self._scorer.placed(view, place)
        for each in self._filters:
            each.placed(view, place)
        member = view.members[place]
        self.caches.placed(query, member)
        return Placement(
            replica_id=member.snapshot.replica_id,
            because=self._scorer.because(view, place) + because,
            is_held_back=bool(because),
            candidates=Weighed(view, costs, place),
            num_cached_tokens=view.cached[place],
        )

    def _filtered(self, costs: list[float], view: View) -> tuple[list[float], str]:
        """Return the costs with those filtered out at infinity, and why the best of all is, if it is."""
        because = ""
        for each in self._filters:
            keep = each.keep(view)
            if keep is None:
                continue
            left = [cost if kept else math.inf for cost, kept in zip(costs, keep, strict=True)]
            if not min(left) < math.inf:
                continue
            if not keep[costs.index(min(costs))]:
                because = f"; a better one {each.because}"
            costs = left
        return costs, because


class Weighed(Sequence[Candidate]):
    """The chosen one and the best others, for who asks why; ranked when somebody does."""

    __slots__ = ("_cached", "_chosen", "_costs", "_members", "_ranked")

    def __init__(self, view: View, costs: list[float], chosen: int) -> None:
        self._members = view.members
        self._cached = view.cached
        self._costs = costs
        self._chosen = chosen
        self._ranked: tuple[Candidate, ...] | None = None

    def __len__(self) -> int:
        return min(len(self._costs), _NUM_SHOWN)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    @overload
    def __getitem__(self, place: int) -> Candidate: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Candidate, ...]: ...
    def __getitem__(self, place: int | slice) -> Candidate | tuple[Candidate, ...]:
        if self._ranked is None:
            costs = self._costs
            best = heapq.nsmallest(_NUM_SHOWN, range(len(costs)), key=costs.__getitem__)
            places = [self._chosen, *(each for each in best if each != self._chosen)][:_NUM_SHOWN]
            self._ranked = tuple(Candidate(self._members[p].replica_id, costs[p], self._cached[p]) for p in places)
        return self._ranked[place]
