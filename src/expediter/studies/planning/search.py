"""The least number of replicas of each set-up, for as few simulations as it takes to know the cheapest ones.

More replicas are taken to meet targets at least as well (monotone), so a set-up's least size lies between the largest
that failed and the smallest that passed, and one failed simulation at the size that would just be cheap enough rules a
set-up out. Set-ups are looked at in rounds, always those first whose cheapest size that may still pass costs least: no
simulation is spent on a set-up whose cheapest open size costs more than `top` found ones.

Shorter traces come first (successive halving): they cost less and tell which set-ups to look at on longer ones, and
about what size they need. What is dropped there comes back if the whole trace asks more of the others than that: only
what costs more on a short trace than the cheapest do on the whole one stays out, and is counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from expediter.studies.planning.setups import Setup

_ROUND: Final = 8
"""Simulations of one round, whatever the number of workers: the answer must not depend on the machine."""
_GROWTH: Final = 2
_SLACK: Final = 1.25
"""On short traces sizes are estimates: set-ups within this factor of the cost of the `top` cheapest stay in."""


class Size(NamedTuple):
    """A set-up of so many replicas."""

    setup: Setup
    replicas: int

    @property
    def cost_per_hour(self) -> float:
        return self.setup.cost_per_hour(self.replicas)


Try = Callable[[Sequence[Size], int | None], Sequence[bool]]
"""Simulates sizes on the first so many requests (None: all) and says which meet the targets, in order."""


@dataclass(slots=True)
class Budget:
    """How much may be spent; the clock makes an answer depend on the machine, the number of simulations does not.

    Args:
        max_simulations: in all.
        max_s: real time from now on; None for no limit.
    Attributes:
        num_spent: simulations so far.
    """

    max_simulations: int
    max_s: float | None = None
    num_spent: int = 0
    _started_s: float = field(default_factory=time.monotonic)

    @property
    def num_left(self) -> int:
        """Simulations that may still begin."""
        if self.max_s is not None and time.monotonic() - self._started_s >= self.max_s:
            return 0
        return max(self.max_simulations - self.num_spent, 0)


@dataclass(slots=True, eq=False)
class Bracket:
    """What is known of a set-up on one trace.

    Attributes:
        failed: largest size that cannot pass, by a bound or a simulation.
        passed: smallest size that passed; None if none has.
        guess: size to try first.
    """

    setup: Setup
    failed: int
    passed: int | None = None
    guess: int | None = None

    @property
    def is_done(self) -> bool:
        return self.passed == self.failed + 1

    @property
    def least_cost(self) -> float:
        """Cost of the smallest size that may pass."""
        return self.setup.cost_per_hour(self.failed + 1)

    @property
    def found_cost(self) -> float:
        return math.inf if self.passed is None else self.setup.cost_per_hour(self.passed)

    def next_size(self, largest: int, *, decides: bool) -> int | None:
        """Return the size to try next; None if the set-up is done or cannot pass within `largest`.

        Args:
            largest: of the sizes of interest.
            decides: whether a failure at `largest` says all there is to know, as others are cheaper than more.
        """
        low = self.failed + 1
        if self.is_done or low > largest:
            return None
        if self.passed is not None:
            return (low + min(self.passed - 1, largest)) // 2
        if self.guess is not None:
            return min(max(self.guess, low), largest)
        return largest if decides else min(max(low, self.failed * _GROWTH), largest)

    def learn(self, size: int, passes: bool) -> None:
        """Take a simulation's result in."""
        self.guess = None
        if passes:
            self.passed = size if self.passed is None else min(self.passed, size)
        else:
            self.failed = max(self.failed, size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What a search found.

    Attributes:
        brackets: of the set-ups that were looked at on the whole trace, cheapest first.
        num_dropped: set-ups that a shorter trace ruled out.
        is_complete: False if the budget ran out before it was certain which set-ups are the cheapest.
    """

    brackets: Sequence[Bracket]
    num_dropped: int
    is_complete: bool


def search(
    least_sizes: Mapping[Setup, int],
    rungs: Sequence[int | None],
    attempt: Try,
    *,
    max_gpus: int,
    top: int,
    budget: Budget,
) -> Search:
    """Find the cheapest set-ups.

    Args:
        least_sizes: set-ups that may pass, with the least size that may.
        rungs: lengths of the traces to go through, shortest first; the last is the whole trace, None.
        attempt: simulates.
        max_gpus: most GPUs of a set-up.
        top: set-ups whose cost is to be certain.
        budget: is spent.
    """
    brackets = [Bracket(setup, size - 1) for setup, size in least_sizes.items()]
    dropped: dict[Bracket, float] = {}

    def climb(rung: int | None, slack: float) -> bool:
        return _climb(brackets, rung, attempt, max_gpus=max_gpus, top=top, budget=budget, slack=slack)

    for rung in rungs[:-1]:
        climb(rung, _SLACK)
        limit = _SLACK * _nth_cost(brackets, top)
        costs = {b: b.found_cost if b.is_done else b.least_cost for b in brackets}
        dropped |= {_again(b, least_sizes): cost for b, cost in costs.items() if limit < cost}
        brackets = [_again(b, least_sizes) for b in brackets if costs[b] <= limit]
    while climb(None, 1.0):
        limit = _nth_cost(brackets, top)
        back = [bracket for bracket, cost in dropped.items() if cost <= limit]
        if not back:
            return Search(brackets=sorted(brackets, key=_by_cost), num_dropped=len(dropped), is_complete=True)
        brackets += back
        for bracket in back:
            del dropped[bracket]
    return Search(brackets=sorted(brackets, key=_by_cost), num_dropped=len(dropped), is_complete=False)


def _again(bracket: Bracket, least_sizes: Mapping[Setup, int]) -> Bracket:
    """Return what another trace needs to know: the bound still holds, the rest is a guess."""
    guess = bracket.failed + 1 if bracket.passed is None else bracket.passed
    return Bracket(bracket.setup, least_sizes[bracket.setup] - 1, guess=guess)


def _climb(
    brackets: Sequence[Bracket],
    rung: int | None,
    attempt: Try,
    *,
    max_gpus: int,
    top: int,
    budget: Budget,
    slack: float,
) -> bool:
    """Narrow the brackets until the cheapest set-ups are certain; return False if the budget ended it."""
    while True:
        limit = slack * _nth_cost(brackets, top)
        wanted = []
        for bracket in sorted(brackets, key=_by_promise):
            # Set-ups of equal cost all stay in: they differ in what they bear.
            largest = bracket.setup.largest_size(max_gpus, limit)
            size = bracket.next_size(largest, decides=limit < math.inf)
            if size is not None:
                wanted.append((bracket, size))
        wanted = wanted[:_ROUND]
        if not wanted:
            return True
        chosen = wanted[: budget.num_left]
        if not chosen:
            return False
        budget.num_spent += len(chosen)
        results = attempt([Size(bracket.setup, size) for bracket, size in chosen], rung)
        for (bracket, size), passes in zip(chosen, results, strict=True):
            bracket.learn(size, passes)


def _nth_cost(brackets: Iterable[Bracket], top: int) -> float:
    """Return the cost of the `top`-th cheapest set-up that passed; infinite if fewer have."""
    costs = sorted(bracket.found_cost for bracket in brackets)
    return costs[top - 1] if len(costs) >= top else math.inf


def _by_cost(bracket: Bracket) -> tuple[float, float]:
    return bracket.found_cost, bracket.least_cost


def _by_promise(bracket: Bracket) -> tuple[float, float]:
    return bracket.least_cost, bracket.found_cost


def rungs_of(num_requests: int, *, shortest: int = 250, factor: int = 4) -> Iterator[int | None]:
    """Yield the lengths of the traces to search on: the whole one last, before it quarters down to `shortest`."""
    lengths = []
    while (num_requests := num_requests // factor) >= shortest:
        lengths.append(num_requests)
    yield from reversed(lengths[:2])
    yield None
