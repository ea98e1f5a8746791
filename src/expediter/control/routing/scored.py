"""Filter, score, pick: what policies that weigh all replicas against each other are put together from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from expediter.control.fleet import Columns, Fleet, Floats
from expediter.control.routing.base import NO_REPLICA, Candidate, Decision, Placement, RouteQuery
from expediter.control.routing.caches import CacheView
from expediter.control.routing.simple import HandsOffToLeastLoaded

Mask = npt.NDArray[np.bool_]
_NUM_SHOWN: Final = 4


@dataclass(slots=True)  # made for every request, and freezing costs more than its fields
class View:
    """A request before the replicas that could compute its prompt; nobody changes it.

    Attributes:
        columns: their loads, one entry per replica; all arrays of a decision have that order.
        cached: leading prompt tokens that each holds, float64.
        new: the others, which it would have to compute.
    """

    query: RouteQuery
    fleet: Fleet
    columns: Columns
    cached: Floats
    new: Floats


class Filter(Protocol):
    """Says who may get a request. If nobody may, everybody may."""

    because: str
    """Why somebody may not, as a clause about it."""

    def keep(self, view: View) -> Mask | None:
        """Return who may, bool; None for everybody."""
        ...

    def placed(self, view: View, place: int) -> None:
        """Hear who gets it."""
        ...


class Scorer(Protocol):
    """Says what it costs to send a request to each replica."""

    def costs(self, view: View) -> Floats:
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

    def pick(self, costs: Floats, view: View) -> int:
        """Return the place of the chosen one; its cost is finite."""
        ...


class Least:
    """The least cost; of equals, who got a request longest ago."""

    def pick(self, costs: Floats, view: View) -> int:
        lowest = costs.min()
        since = np.where(costs <= lowest + 1e-9 * abs(lowest), view.columns.last_dispatch, np.inf)
        return int(since.argmin())


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

    def pick(self, costs: Floats, view: View) -> int:
        usable = costs[np.isfinite(costs)]
        width = usable.max() - usable.min()
        if self._temperature <= 0 or width == 0:
            return self._least.pick(costs, view)
        weights = np.exp((usable.min() - costs) / (width * self._temperature)).cumsum()
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
        columns = fleet.columns("prefill")
        if not len(columns.slots):
            return NO_REPLICA
        cached = self.caches.cached(query, fleet)
        if len(columns.slots) < len(cached):
            cached = cached[columns.slots]
        view = View(query, fleet, columns, cached, query.num_prompt_tokens - cached)
        costs = self._scorer.costs(view)
        allowed, because = self._filtered(costs, view)
        place = self._picker.pick(allowed, view)
        self._scorer.placed(view, place)
        for each in self._filters:
            each.placed(view, place)
        replica_id = fleet.id_at(int(columns.slots[place]))
        self.caches.placed(query, replica_id, fleet)
        return Placement(
            replica_id=replica_id,
            because=self._scorer.because(view, place) + because,
            candidates=shown(view, costs, place),
            num_cached_tokens=int(cached[place]),
        )

    def _filtered(self, costs: Floats, view: View) -> tuple[Floats, str]:
        """Return the costs with those filtered out at infinity, and why the best of all is, if it is."""
        because = ""
        for each in self._filters:
            keep = each.keep(view)
            if keep is None:
                continue
            left = np.where(keep, costs, np.inf)
            if not left.min() < np.inf:
                continue
            if not keep[costs.argmin()]:
                because = f"; a better one {each.because}"
            costs = left
        return costs, because


def shown(view: View, costs: Floats, chosen: int) -> tuple[Candidate, ...]:
    """Return the chosen one and the best others, for who asks why."""
    best = np.argpartition(costs, _NUM_SHOWN - 1)[:_NUM_SHOWN] if len(costs) > _NUM_SHOWN else np.arange(len(costs))
    slots, cached, shown_costs = view.columns.slots[best].tolist(), view.cached[best].tolist(), costs[best].tolist()
    rows = sorted(zip(shown_costs, best.tolist(), slots, cached, strict=True))
    first = float(costs[chosen]), chosen, int(view.columns.slots[chosen]), float(view.cached[chosen])
    rows = [first, *(row for row in rows if row[1] != chosen)]
    return tuple(Candidate(view.fleet.id_at(slot), cost, int(held)) for cost, _, slot, held in rows[:_NUM_SHOWN])
