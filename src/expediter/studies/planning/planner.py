"""The planner: bounds, search, and a closer look at the cheapest set-ups."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from expediter.assembly.simulation import DEFAULT_SLO, SimulationConfig
from expediter.core.errors import ConfigurationError
from expediter.sim.trace import Trace, trace_summary
from expediter.studies.planning.answer import Choice, Plan, Point, RuledOut
from expediter.studies.planning.bounds import Bound, Bounds
from expediter.studies.planning.coverage import borrowed
from expediter.studies.planning.demand import demand_of
from expediter.studies.planning.limits import Limit, limit_of
from expediter.studies.planning.search import Budget, Search, Size, rungs_of, search
from expediter.studies.planning.serve_command import serve_command
from expediter.studies.planning.setups import SearchSpace, Setup
from expediter.studies.planning.trial import Measured, Traffic, Trial, load_traffic, measure, measure_unless_lost
from expediter.studies.workers import Task, Workers

_MORE_LOAD: Final = (1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0)
"""Multiples of the arrival rate at which the cheapest set-ups are tried."""

_NEAREST: Final = 8
"""Set-ups to look at closely if nothing meets the targets."""

_Result = TypeVar("_Result")

Told = Callable[[str, int], None]
"""Told what is being done and how many simulations are over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """A question to the planner.

    Args:
        traffic: the requests to serve.
        space: what may be chosen.
        base: model, targets, engine and limits; what a set-up decides is ignored in it.
        attainment: share of the requests that must meet all their targets, in (0, 1].
        top: set-ups to find and to look at closely.
        seeds: draws of the traffic that those must serve.
        max_simulations: most simulations in all.
        max_s: most real time; with it the answer may depend on the machine.
    Raises:
        ConfigurationError: a number is out of range, or `base` has a step-time model of its own, which no GPU changes.
    """

    traffic: Traffic
    space: SearchSpace
    base: SimulationConfig = field(default_factory=lambda: SimulationConfig(slo=DEFAULT_SLO))
    attainment: float = 0.99
    top: int = 5
    seeds: int = 3
    max_simulations: int = 400
    max_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.attainment <= 1:
            raise ConfigurationError(f"attainment must lie in (0, 1], not {self.attainment}")
        for name in ("top", "seeds", "max_simulations"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_s is not None and not self.max_s > 0:
            raise ConfigurationError(f"the time to plan must be above 0 s, not {self.max_s}")
        if self.base.step_time is not None:
            raise ConfigurationError("a plan compares GPUs; a step-time model of one's own says nothing of them")


def make_plan(config: PlanConfig, workers: Workers, told: Told | None = None) -> Plan:
    """Search for the cheapest set-ups; the same question has the same answer, whatever the workers.

    Args:
        workers: run the simulations.
        told: of progress.
    Raises:
        ConfigurationError: the traffic or the model cannot be used, or no set-up can hold the model.
    """
    return _Planner(config, workers, told).plan()


class _Planner:
    def __init__(self, config: PlanConfig, workers: Workers, told: Told | None) -> None:
        self._config = config
        self._workers = workers
        self._told = told
        self._budget = Budget(config.max_simulations, config.max_s)
        self._num_done = 0
        self._points: dict[Size, Point] = {}
        self._possible: dict[Setup, int] = {}

    def plan(self) -> Plan:
        config = self._config
        trace = load_traffic(config.traffic, 0)
        setups = config.space.setups(config.base.model)
        bounds = self._bounds(setups, trace)
        self._possible = {setup: bound.min_replicas for setup, bound in bounds.items() if bound.reason is None}
        found = search(
            self._possible,
            list(rungs_of(len(trace))),
            self._passes,
            max_gpus=config.space.max_gpus,
            top=config.top,
            budget=self._budget,
        )
        choices = self._choices(found)
        nearest = None if choices else self._nearest(found)
        reasons = Counter(
            (setup.gpu, setup.split, bound.reason) for setup, bound in bounds.items() if bound.reason is not None
        )
        return Plan(
            model=config.base.model,
            attainment=config.attainment,
            choices=choices,
            nearest=nearest,
            points=sorted(self._points.values(), key=_by_cost),
            ruled_out=[
                RuledOut(gpu=gpu, split=split, reason=reason, num_setups=num)
                for (gpu, split, reason), num in reasons.items()
            ],
            num_setups=len(setups),
            num_dropped=len(found.dropped),
            num_simulations=self._num_done,
            is_complete=found.is_complete,
            trace=trace_summary(trace),
        )

    def _bounds(self, setups: Sequence[Setup], trace: Trace) -> dict[Setup, Bound]:
        config = self._config
        demand = demand_of(trace, config.base.slo, config.base.slo_classes)
        of = Bounds(config.base, demand, config.attainment).of
        return {setup: of(setup) for setup in setups}

    def _trial(self, size: Size, **how: Any) -> Trial:  # noqa: ANN401 - fields of Trial
        config = self._config
        return Trial(
            config=size.setup.simulation(config.base, size.replicas),
            traffic=config.traffic,
            attainment=config.attainment,
            **how,
        )

    def _run(self, doing: str, job: Callable[[Trial], _Result], trials: Sequence[tuple[Size, Trial]]) -> list[_Result]:
        def progress(_: int, __: str) -> None:
            self._num_done += 1
            if self._told is not None:
                self._told(doing, self._num_done)

        tasks = [Task(label=size.setup.describe(size.replicas), call=partial(job, trial)) for size, trial in trials]
        return list(self._workers.run(tasks, progress))

    def _passes(self, sizes: Sequence[Size], limit: int | None) -> list[bool]:
        doing = "the whole trace" if limit is None else f"{limit} requests"
        results = self._run(doing, measure_unless_lost, [(size, self._trial(size, limit=limit)) for size in sizes])
        if limit is None:
            self._keep(sizes, results)
        return [measured is not None and self._meets(measured) for measured in results]

    def _keep(self, sizes: Sequence[Size], results: Sequence[Measured | None]) -> None:
        for size, measured in zip(sizes, results, strict=True):
            if measured is not None:
                self._points[size] = Point(
                    setup=size.setup,
                    replicas=size.replicas,
                    num_gpus=size.setup.num_gpus(size.replicas),
                    cost_per_hour=size.cost_per_hour,
                    meets=self._meets(measured),
                    measured=measured,
                )

    def _meets(self, measured: Measured) -> bool:
        return measured.attainment >= self._config.attainment - 1e-12

    def _look_at(self, sizes: Sequence[Size]) -> None:
        """Simulate sizes that the search gave up on to their ends."""
        missing = [size for size in sizes if size not in self._points]
        self._keep(missing, self._run("what is too small", measure, [(size, self._trial(size)) for size in missing]))

    def _choices(self, found: Search) -> list[Choice]:
        passed = [self._points[Size(b.setup, b.passed)] for b in found.brackets if b.passed is not None]
        passed.sort(key=lambda point: (point.cost_per_hour, -_least_slack(point.measured)))
        passed = passed[: self._config.top]
        sizes = [Size(point.setup, point.replicas) for point in passed]
        self._look_at([Size(setup, replicas - 1) for setup, replicas in sizes if replicas > setup.least_size])
        margins = self._margins(sizes)
        attainments = self._attainments(passed)
        base = self._config.base
        choices = [
            Choice(
                point=point,
                bears=bears,
                fails_at=fails_at,
                limit=limit_of(failed),
                attainments=shares,
                command=serve_command(point.setup, point.replicas, base),
                borrowed=borrowed(point.setup.gpu, base.engine, is_calibrated=base.calibration is not None),
            )
            for point, (bears, fails_at, failed), shares in zip(passed, margins, attainments, strict=True)
        ]
        return sorted(choices, key=lambda choice: (choice.point.cost_per_hour, -choice.bears))

    def _margins(self, sizes: Sequence[Size]) -> list[tuple[float, float | None, Measured | None]]:
        """Return, for each, the largest load it bears, the least above at which it fails, and the run there."""
        low, high = [-1] * len(sizes), [len(_MORE_LOAD)] * len(sizes)
        failed: list[Measured | None] = [None] * len(sizes)
        while open_ := [i for i in range(len(sizes)) if high[i] - low[i] > 1]:
            middles = {i: (low[i] + high[i]) // 2 for i in open_}
            trials = [(sizes[i], self._trial(sizes[i], rate_scale=_MORE_LOAD[middles[i]])) for i in open_]
            for i, measured in zip(open_, self._run("more load", measure, trials), strict=True):
                if self._meets(measured):
                    low[i] = middles[i]
                else:
                    high[i], failed[i] = middles[i], measured
        return [
            (
                1.0 if low[i] < 0 else _MORE_LOAD[low[i]],
                None if high[i] == len(_MORE_LOAD) else _MORE_LOAD[high[i]],
                failed[i],
            )
            for i in range(len(sizes))
        ]

    def _attainments(self, points: Sequence[Point]) -> list[list[float]]:
        seeds = range(1, self._config.seeds)
        sizes = [Size(point.setup, point.replicas) for point in points]
        trials = [(size, self._trial(size, seed=seed)) for size in sizes for seed in seeds]
        shares = iter(self._run("other seeds", measure, trials))
        return [[point.measured.attainment, *(next(shares).attainment for _ in seeds)] for point in points]

    def _nearest(self, found: Search) -> tuple[Point, Limit] | None:
        """Return the best of some that failed, each at the largest size that was tried."""
        tried = [Size(b.setup, b.failed) for b in found.brackets if b.failed >= self._possible[b.setup]]
        largest = sorted(tried, key=lambda size: -size.setup.num_gpus(size.replicas))
        self._look_at(largest[:_NEAREST])
        if not self._points:
            return None
        point = max(self._points.values(), key=lambda p: (p.measured.attainment, -p.cost_per_hour))
        return point, limit_of(point.measured)


def _least_slack(measured: Measured) -> float:
    return min(measured.slack.values(), default=math.inf)


def _by_cost(point: Point) -> tuple[Any, ...]:
    setup = point.setup
    return point.cost_per_hour, point.num_gpus, setup.gpu, setup.split, setup.policy
