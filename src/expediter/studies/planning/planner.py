"""The planner: bounds, search, and a closer look at the cheapest set-ups."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from expediter.assembly.simulation import DEFAULT_SLO, SimulationConfig
from expediter.core.errors import ConfigurationError
from expediter.core.ranges import require_at_least
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
        seeds: draws of the traffic that a set-up must serve: the first, and all of them in the mean.
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
        require_at_least(1, self, "top", "seeds", "max_simulations")
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


class _Margin(NamedTuple):
    """Largest load that a set-up bears, the least above at which it fails if one was tried, and the runs by load."""

    bears: float
    fails_at: float | None
    runs: Mapping[float, Measured]


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
        return Plan(
            model=config.base.model,
            attainment=config.attainment,
            choices=choices,
            nearest=nearest,
            points=sorted(self._points.values(), key=_by_cost),
            ruled_out=_ruled_out(bounds),
            num_setups=len(setups),
            num_dropped=found.num_dropped,
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
        """Return which sizes meet the targets: of a short trace on its first draw, of the whole one also on all draws
        together."""
        doing = "the whole trace" if limit is None else f"{limit} requests"
        results = self._run(doing, measure_unless_lost, [(size, self._trial(size, limit=limit)) for size in sizes])
        meets = [measured is not None and self._meets(measured.attainment) for measured in results]
        if limit is not None:
            return meets
        seeds = range(1, self._config.seeds)
        trials = [(s, self._trial(s, seed=seed)) for s, m in zip(sizes, meets, strict=True) if m for seed in seeds]
        others = iter(self._run("other draws", measure, trials))
        for size, measured, may_meet in zip(sizes, results, meets, strict=True):
            if measured is not None:
                self._keep(size, measured, [next(others).attainment for _ in seeds] if may_meet else ())
        return [size in self._points and self._points[size].meets for size in sizes]

    def _keep(self, size: Size, measured: Measured, others: Sequence[float] = ()) -> None:
        attainments = (measured.attainment, *others)
        self._points[size] = Point(
            setup=size.setup,
            replicas=size.replicas,
            num_gpus=size.setup.num_gpus(size.replicas),
            cost_per_hour=size.cost_per_hour,
            meets=self._meets(measured.attainment) and self._meets(sum(attainments) / len(attainments)),
            measured=measured,
            attainments=attainments,
        )

    def _meets(self, attainment: float) -> bool:
        return attainment >= self._config.attainment - 1e-12

    def _look_at(self, sizes: Sequence[Size]) -> None:
        """Simulate sizes that the search gave up on to their ends."""
        missing = [size for size in sizes if size not in self._points]
        results = self._run("what is too small", measure, [(size, self._trial(size)) for size in missing])
        for size, measured in zip(missing, results, strict=True):
            self._keep(size, measured)

    def _choices(self, found: Search) -> list[Choice]:
        passed = [self._points[Size(b.setup, b.passed)] for b in found.brackets if b.passed is not None]
        passed.sort(key=lambda point: (point.cost_per_hour, -_least_slack(point.measured)))
        passed = passed[: self._config.top]
        sizes = [Size(point.setup, point.replicas) for point in passed]
        self._look_at([Size(setup, replicas - 1) for setup, replicas in sizes if replicas > setup.least_size])
        self._look_at(_just_too_cheap(found, sizes))
        base = self._config.base
        choices = [
            Choice(
                point=point,
                bears=margin.bears,
                fails_at=margin.fails_at,
                loads=[(load, margin.runs[load].attainment) for load in sorted(margin.runs)],
                limit=limit_of(None if margin.fails_at is None else margin.runs[margin.fails_at]),
                command=serve_command(point.setup, point.replicas, base),
                borrowed=borrowed(point.setup.gpu, base.engine, is_calibrated=base.calibration is not None),
            )
            for point, margin in zip(passed, self._margins(passed), strict=True)
        ]
        return sorted(choices, key=lambda choice: (choice.point.cost_per_hour, -choice.bears))

    def _margins(self, points: Sequence[Point]) -> list[_Margin]:
        """Bisect, for each, between the loads that it bears and those that it does not."""
        low, high = [-1] * len(points), [len(_MORE_LOAD)] * len(points)
        runs: list[dict[float, Measured]] = [{1.0: point.measured} for point in points]
        sizes = [Size(point.setup, point.replicas) for point in points]
        while open_ := [i for i in range(len(sizes)) if high[i] - low[i] > 1]:
            middles = {i: (low[i] + high[i]) // 2 for i in open_}
            trials = [(sizes[i], self._trial(sizes[i], rate_scale=_MORE_LOAD[middles[i]])) for i in open_]
            for i, measured in zip(open_, self._run("more load", measure, trials), strict=True):
                runs[i][_MORE_LOAD[middles[i]]] = measured
                if self._meets(measured.attainment):
                    low[i] = middles[i]
                else:
                    high[i] = middles[i]
        loads = (1.0, *_MORE_LOAD, None)
        return [_Margin(loads[low[i] + 1] or 1.0, loads[high[i] + 1], runs[i]) for i in range(len(points))]

    def _nearest(self, found: Search) -> tuple[Point, Limit] | None:
        """Return the best of some that failed, each at the largest size that was tried."""
        tried = [Size(b.setup, b.failed) for b in found.brackets if b.failed >= self._possible[b.setup]]
        largest = sorted(tried, key=lambda size: -size.setup.num_gpus(size.replicas))
        self._look_at(largest[:_NEAREST])
        if not self._points:
            return None
        point = max(self._points.values(), key=lambda p: (p.measured.attainment, -p.cost_per_hour))
        return point, limit_of(point.measured)


def _just_too_cheap(found: Search, sizes: Sequence[Size]) -> list[Size]:
    """Return, of each kind of GPU, the dearest size that failed and costs less than the cheapest that passed."""
    if not sizes:
        return []
    below = sizes[0].cost_per_hour
    failed = [Size(b.setup, b.failed) for b in found.brackets if b.failed >= b.setup.least_size]
    dearest: dict[str, Size] = {}
    for size in sorted(failed, key=lambda size: size.cost_per_hour):
        if size.cost_per_hour < below:
            dearest[size.setup.gpu] = size
    return list(dearest.values())


def _ruled_out(bounds: Mapping[Setup, Bound]) -> list[RuledOut]:
    out: dict[tuple[str, str, str], RuledOut] = {}
    for setup, bound in bounds.items():
        if bound.reason is None:
            continue
        key = (setup.gpu, setup.split, bound.reason)
        num = out[key].num_setups + 1 if key in out else 1
        gpu, split, reason = key
        share = bound.impossible_share
        out[key] = RuledOut(gpu=gpu, split=split, reason=reason, num_setups=num, impossible_share=share)
    return sorted(out.values(), key=lambda kind: kind.impossible_share)


def _least_slack(measured: Measured) -> float:
    return min(measured.slack.values(), default=math.inf)


def _by_cost(point: Point) -> tuple[Any, ...]:
    setup = point.setup
    return point.cost_per_hour, point.num_gpus, setup.gpu, setup.split, setup.policy
