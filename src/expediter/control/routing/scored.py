"""Filter, score, pick: what policies that weigh all replicas against each other are put together from."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Final, Protocol, overload

import numpy as np

from expediter.control.fleet import Fleet, Lineup
from expediter.control.routing.base import NO_REPLICA, Candidate, Decision, Placement, RouteQuery
from expediter.control.routing.caches import CacheView
from expediter.control.routing.simple import HandsOffToLeastLoaded

_NUM_SHOWN: Final = 4


class View:
    """A request before the replicas that could compute its prompt; nobody changes it.

    Lists over all replicas are made when a policy asks for them.

    Args:
        held: leading prompt tokens by slot, of those who hold some.
    Attributes:
        members: those replicas, at least one; all lists of a decision have that order.
        holders: leading prompt tokens by place, of those who hold some.
    """

    __slots__ = ("_cached", "_new", "_prefill_s", "fleet", "holders", "lineup", "members", "num_tokens", "query")

    def __init__(self, query: RouteQuery, fleet: Fleet, lineup: Lineup, held: Mapping[int, int]) -> None:
        self.query = query
        self.fleet = fleet
        self.lineup = lineup
        self.members = lineup.members
        self.num_tokens = len(query.request.prompt)
        places = lineup.places
        self.holders = {places[slot]: tokens for slot, tokens in held.items() if slot in places}
        self._cached: list[int] | None = None
        self._new: list[int] | None = None
        self._prefill_s: list[float] | None = None

    @classmethod
    def of(cls, query: RouteQuery, fleet: Fleet, caches: CacheView) -> View | None:
        """Return a request before a fleet; None if nobody there computes prompts."""
        lineup = fleet.lineup("prefill")
        return cls(query, fleet, lineup, caches.cached(query, fleet)) if lineup.members else None

    def cached_at(self, place: int) -> int:
        """Return how many leading prompt tokens a replica holds."""
        return self.holders.get(place, 0)

    @property
    def cached(self) -> list[int]:
        """Leading prompt tokens that each holds."""
        if self._cached is None:
            self._cached = [0] * len(self.members)
            for place, tokens in self.holders.items():
                self._cached[place] = tokens
        return self._cached

    @property
    def new(self) -> list[int]:
        """The others, which each would have to compute."""
        if self._new is None:
            self._new = [self.num_tokens] * len(self.members)
            for place, tokens in self.holders.items():
                self._new[place] -= tokens
        return self._new

    def prefill_s(self) -> list[float]:
        """Return how long each computes what it lacks of the prompt, if it does nothing else."""
        if self._prefill_s is None:
            speed, speeds, num_tokens = self.lineup.speed, self.lineup.speeds, self.num_tokens
            if speed is None:
                found = [each.prefill_s(num_tokens, 0) for each in speeds]
                for place, cached in self.holders.items():
                    found[place] = speeds[place].prefill_s(num_tokens - cached, cached)
            else:
                found = [speed.prefill_s(num_tokens, 0)] * len(speeds)
                times_s = {
                    cached: speed.prefill_s(num_tokens - cached, cached) for cached in set(self.holders.values())
                }
                for place, cached in self.holders.items():
                    found[place] = times_s[cached]
            self._prefill_s = found
        return self._prefill_s


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
        if costs.count(lowest) == 1:
            return costs.index(lowest)
        places = [place for place, cost in enumerate(costs) if cost == lowest]
        return min(places, key=lambda place: view.members[place].last_dispatch)


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
            num_cached_tokens=view.cached_at(place),
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

    __slots__ = ("_chosen", "_costs", "_holders", "_members", "_ranked")

    def __init__(self, view: View, costs: list[float], chosen: int) -> None:
        self._members = view.members
        self._holders = view.holders
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
            self._ranked = tuple(
                Candidate(self._members[p].replica_id, costs[p], self._holders.get(p, 0)) for p in places
            )
        return self._ranked[place]
