"""Many simulations at once, with reports in the order in which they were asked for.

specs = [RunSpec(label=name, config=SimulationConfig(preset=name), trace=TraceSpec()) for name in ("vllm", "sarathi")]
with Workers() as workers:
    for spec, report in run_all(specs, workers):
        print(spec.label, report.goodput_rps)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from expediter.assembly.simulation import SimulationConfig, build_simulation, prepare_trace
from expediter.sim.report import Report
from expediter.sim.trace import Trace
from expediter.sim.trace_arrivals import jittered
from expediter.studies.workers import Progress, Task, Workers


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpec:
    """Which requests a run serves; the worker reads them.

    Args:
        name: a trace that comes with Expediter, or a file.
        rate_scale: arrival rate as a multiple of the trace's.
        limit: most requests; None for all.
        seed: of the spread of arrivals within coarse ticks, and of the jitter.
        jitter: move every arrival a little (`sim.trace_arrivals.jittered`), so that each seed is another draw of the
            same traffic.
        spread_ticks, strict: as in `sim.trace_readers.read_trace`.
    """

    name: str | Path = "demo"
    rate_scale: float = 1.0
    limit: int | None = None
    seed: int = 0
    jitter: bool = False
    spread_ticks: bool = True
    strict: bool = False

    def load(self) -> Trace:
        """Read the trace.

        Raises:
            ConfigurationError: as `prepare_trace`.
        """
        trace = prepare_trace(
            self.name,
            rate_scale=self.rate_scale,
            limit=self.limit,
            seed=self.seed,
            spread_ticks=self.spread_ticks,
            strict=self.strict,
        )
        if not self.jitter:
            return trace
        return replace(trace, arrival_s=jittered(trace.arrival_s, np.random.default_rng(self.seed)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """One simulation.

    Args:
        label: what progress and errors call it.
        config: what is simulated.
        trace: what it serves.
    """

    label: str
    config: SimulationConfig
    trace: TraceSpec

    def run(self) -> Report:
        """Simulate.

        Raises:
            ConfigurationError: the trace or the configuration cannot be used.
        """
        return build_simulation(self.config).run(self.trace.load())


def run_all(
    specs: Iterable[RunSpec], workers: Workers, progress: Progress | None = None
) -> Iterator[tuple[RunSpec, Report]]:
    """Simulate each spec and yield it with its report, in the order of the specs; reports do not depend on the workers.

    Args and errors as `Workers.run`, whose tasks are the specs.
    """
    listed = tuple(specs)
    tasks = [Task(label=spec.label, call=partial(RunSpec.run, spec)) for spec in listed]
    return zip(listed, workers.run(tasks, progress), strict=True)
