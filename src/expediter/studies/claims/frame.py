"""What a claim is: a published figure, the simulations that should give it again, and what came out."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TOLERANCE = 0.25
"""How far, relative to the published figure, ours may lie and still agree."""

Numbers = Mapping[str, float]
"""What one job measured, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much to simulate.

    Attributes:
        quick: a small version of every job, to see that all of it works; its figures are rough.
        data: folder of the public traces that some claims need.
    """

    quick: bool = False
    data: Path = Path()

    def choose(self, usual: int, quick: int) -> int:
        """Return one of two sizes."""
        return quick if self.quick else usual


class Verdict(enum.Enum):
    """How our figure compares with the published one."""

    AGREES = "agrees"
    DIFFERS = "differs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A published figure beside ours.

    Args:
        what: what is measured, in words.
        low, high: the published range; equal for a single number. None is no bound on that side.
        ours: the same in our runs.
        unit: behind the numbers; "x" for a factor over another system.
        tolerance: relative distance outside the range that still agrees.
    """

    what: str
    ours: float
    low: float | None = None
    high: float | None = None
    unit: str = ""
    tolerance: float = TOLERANCE

    @property
    def verdict(self) -> Verdict:
        """Agrees: within the tolerance of the range and, for a factor, on the same side of 1."""
        low = -float("inf") if self.low is None else self.low * (1 - self.tolerance)
        high = float("inf") if self.high is None else self.high * (1 + self.tolerance)
        if self.unit == "x" and self.low is not None and self.high is not None:
            if self.low > 1 and self.ours <= 1:
                return Verdict.DIFFERS
            if self.high < 1 and self.ours >= 1:
                return Verdict.DIFFERS
        return Verdict.AGREES if low <= self.ours <= high else Verdict.DIFFERS

    @property
    def published(self) -> str:
        """The published range in words."""
        if self.low is None and self.high is None:
            return "-"
        if self.low is None:
            return f"at most {number(self.high)}{_suffix(self.unit)}"
        if self.high is None:
            return f"at least {number(self.low)}{_suffix(self.unit)}"
        if self.low == self.high:
            return f"{number(self.low)}{_suffix(self.unit)}"
        return f"{number(self.low)} to {number(self.high)}{_suffix(self.unit)}"

    @property
    def measured(self) -> str:
        """Our figure in words."""
        return f"{number(self.ours)}{_suffix(self.unit)}"


def _suffix(unit: str) -> str:
    return f" {unit}" if unit else ""


def number(value: float | None) -> str:
    """Return a number with three significant digits, and thousands separated."""
    if value is None:
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Numbers that stand beside the figures: baselines, and runs with an assumption changed.

    Args:
        title: what the rows are.
        columns: heads; the first is that of the rows' names.
        rows: cells as text.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """What the jobs of a claim say together.

    Args:
        figures: published beside ours.
        tables: what they come from, the tuned chunked-prefill baseline among it, and runs with an assumption changed.
        why: where ours differs, what makes the difference, with the numbers that show it; "" if nothing does.
    """

    figures: tuple[Figure, ...]
    tables: tuple[Table, ...] = ()
    why: str = ""

    @property
    def verdict(self) -> Verdict:
        """Agrees if every figure does."""
        differs = any(figure.verdict is Verdict.DIFFERS for figure in self.figures)
        return Verdict.DIFFERS if differs else Verdict.AGREES


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A published result and how it is reproduced.

    Args:
        name: for the command line.
        title: system and what it claims.
        source: where it was published.
        workload, objective: what is asked for, and when a request counts.
        method: how our runs reproduce it, and which parameters are ours.
        jobs: the simulations, by name; they run in any order, in processes of their own, so they pickle.
        conclude: what their numbers say.
        files: of `Effort.data`, which the jobs need.
    """

    name: str
    title: str
    source: str
    workload: str
    objective: str
    method: str
    jobs: Callable[[Effort], Mapping[str, Callable[[], Numbers]]]
    conclude: Callable[[Mapping[str, Numbers]], Conclusion]
    files: tuple[str, ...] = ()


def best(results: Mapping[str, Numbers], names: Sequence[str], measure: str) -> tuple[str, float]:
    """Return which of the jobs has the largest number of that name, and the number; the first of equals."""
    name = max(names, key=lambda each: results[each][measure])
    return name, results[name][measure]


def ratio(ours: float, other: float) -> float:
    """Return a quotient; of nothing and nothing it is 1, of something and nothing infinite."""
    if other:
        return ours / other
    return float("inf") if ours else 1.0
