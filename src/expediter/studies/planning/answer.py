"""A plan: what was found, in figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from expediter.sim.trace import TraceSummary
from expediter.studies.planning.limits import Limit
from expediter.studies.planning.serve_command import ServeCommand
from expediter.studies.planning.setups import Setup
from expediter.studies.planning.trial import Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A set-up of some size, as it served the whole trace.

    Attributes:
        meets: whether it met the targets, on the first draw of the traffic and on all that were made together.
        measured: on the first draw.
        attainments: of each draw; only of the first where that failed.
    """

    setup: Setup
    replicas: int
    num_gpus: int
    cost_per_hour: float
    meets: bool
    measured: Measured
    attainments: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A set-up that meets the targets, at its least size.

    Attributes:
        point: how it served the trace.
        bears: largest multiple of the arrival rate, of those tried, that it served as well; 1 for none above.
        fails_at: least multiple above that at which it did not; None if it bore all that were tried.
        loads: the multiples that were tried, with the attainment at each, ascending.
        limit: what breaks first, from the run at `fails_at`, or at one replica less if there is none.
        command: how to serve it.
        borrowed: which of its step times' constants were not measured on its GPU.
    """

    point: Point
    bears: float
    fails_at: float | None
    loads: Sequence[tuple[float, float]]
    limit: Limit
    command: ServeCommand
    borrowed: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuledOut:
    """Set-ups of one kind and split that no number of replicas helps.

    Attributes:
        num_setups: their presets and budgets.
        impossible_share: of the requests, at least so many miss their targets in any case.
    """

    gpu: str
    split: str
    reason: str
    num_setups: int
    impossible_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The planner's answer.

    Attributes:
        model, attainment: of the question.
        choices: the cheapest set-ups that meet the targets, cheapest first; of equal cost, the one that bears most.
        nearest: if there are none, the set-up that came nearest, and why it fails.
        points: every set-up that was simulated on the whole trace, by cost.
        ruled_out: set-ups that were not simulated, since no number of replicas helps them; the nearest to it first.
        num_setups: that were to choose from.
        num_dropped: set-ups that a shorter trace ruled out.
        num_simulations: spent.
        is_complete: whether the search came to its end within its budget.
        trace: what was asked for.
    """

    model: str
    attainment: float
    choices: Sequence[Choice]
    nearest: tuple[Point, Limit] | None
    points: Sequence[Point]
    ruled_out: Sequence[RuledOut]
    num_setups: int
    num_dropped: int
    num_simulations: int
    is_complete: bool
    trace: TraceSummary

    @property
    def frontier(self) -> list[Point]:
        """Points than which none that costs as much or less has a higher attainment, cheapest first."""
        best: list[Point] = []
        for point in sorted(self.points, key=lambda p: (p.cost_per_hour, -p.measured.attainment)):
            if not best or point.measured.attainment > best[-1].measured.attainment:
                best.append(point)
        return best

    def to_json(self) -> bytes:
        """Return the plan as indented JSON with a final newline."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"
