"""Put a simulation together: the real scheduler and router, modelled replicas, a trace.

report = simulate("conversation.jsonl.gz", model="llama-3.1-70b", gpu="a100-80g", tensor_parallel=8, replicas=8)
print(report.goodput_rps_per_gpu, report.ttft_s.p99)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from expediter.assembly.motion import build_motion
from expediter.assembly.simulation_config import DEFAULT_SLO, SimulationConfig, hardware_of, pools_of
from expediter.assembly.simulation_setup import resolve
from expediter.assembly.targets import Targets
from expediter.assembly.traces import load_trace
from expediter.control.routing.build import COPYING_ROUTINGS, SESSION_ROUTINGS, RoutingConfig, make_router
from expediter.control.routing.notes import RoutingNotes
from expediter.core.explanation import Span
from expediter.core.plan import StepFeatures
from expediter.core.request import Request
from expediter.perfmodel.hardware import gpu_named
from expediter.scheduling.scheduler import Scheduler
from expediter.sim.cluster import Cluster
from expediter.sim.event_log import EventLog
from expediter.sim.failures import NO_FAILURES, Failures
from expediter.sim.journeys import Journeys
from expediter.sim.loop import EventLoop
from expediter.sim.metrics import MetricsCollector
from expediter.sim.observer import Explainer, Observers
from expediter.sim.replica import SimulatedReplica
from expediter.sim.report import DecisionReport, PoolReport, Report, build_report
from expediter.sim.timeline import TimelineRecorder
from expediter.sim.trace import Trace, trace_summary

__all__ = [
    "DEFAULT_SLO",
    "Simulation",
    "SimulationConfig",
    "build_simulation",
    "hardware_of",
    "pools_of",
    "prepare_trace",
    "simulate",
]


class Simulation:
    """A cluster ready to serve one sequence of requests; made by `build_simulation`.

    Attributes:
        metrics: what became of the requests that have ended; calls who wants their records (`on_end`).
        explanations: what held the requests that `run` was asked to explain, by id.
    """

    def __init__(
        self,
        config: SimulationConfig,
        cluster: Cluster,
        replicas: list[SimulatedReplica],
        metrics: MetricsCollector,
        observers: Observers,
        description: dict[str, Any],
        timeline: TimelineRecorder | None,
        journeys: Journeys | None,
        failures: Failures | None,
    ) -> None:
        self.metrics = metrics
        self.explanations: Mapping[str, tuple[Span, ...]] = {}
        self._replicas = replicas
        self._config = config
        self._targets = Targets(config.slo, config.slo_classes)
        self._cluster = cluster
        self._observers = observers
        self._description = description
        self._timeline = timeline
        self._journeys = journeys
        self._failures = failures

    @property
    def schedulers(self) -> list[Scheduler]:
        """Those of the replicas, for who wants to look inside."""
        return [replica.scheduler for replica in self._replicas]

    def watch_steps(self, told: Callable[[StepFeatures, Sequence[float]], None]) -> None:
        """Tell of every replica's steps (`SimulatedReplica.on_steps`)."""
        for replica in self._replicas:
            replica.on_steps = told

    def run(
        self,
        requests: Trace | Iterable[Request],
        *,
        events: BinaryIO | None = None,
        progress: Callable[[int], None] | None = None,
        explain: Iterable[str] = (),
    ) -> Report:
        """Serve the requests to their ends and report.

        Args:
            requests: a trace, or requests in order of `arrival_s`.
            events: where the event log goes, if it is wanted; the caller closes it.
            progress: told the number of arrivals from time to time.
            explain: ids of requests that `explanations` shall hold afterwards.
        Raises:
            ConfigurationError: a request names an SLO class that is not configured and has no targets of its own.
        """
        if isinstance(requests, Trace):
            self._targets.check(requests)  # before the work is done
            if self._description["routing"] in SESSION_ROUTINGS:
                requests = requests.with_sessions()
        explain = tuple(explain)
        explainer = Explainer(
            explain,
            lambda replica, name, now_s: self.schedulers[replica].explain(name, now_s),
            RoutingNotes(len(explain)) if len(self._replicas) > 1 else None,
        )
        self._observers.add(explainer)
        self.explanations = explainer.spans
        if events is not None:
            self._observers.add(EventLog(events))
        started = time.perf_counter()
        self._cluster.run(self._targets.groups(requests), progress)
        if self._failures is not None:
            self._failures.finish(self.metrics.last_event_s)
        return self._report(requests if isinstance(requests, Trace) else None, time.perf_counter() - started)

    def _report(self, trace: Trace | None, wall_s: float) -> Report:
        return build_report(
            self.metrics,
            slo=self._config.slo,
            num_gpus=sum(pool.num_gpus for pool in pools_of(self._config)),
            cost_per_hour=_cost_per_hour(self._config),
            num_steps=self._cluster.num_steps,
            wall_s=wall_s,
            decisions=self._decisions(),
            trace=None if trace is None else trace_summary(trace),
            configuration=self._description,
            timeline=self._timeline,
            pools=self._pools(),
            transfers=None if self._journeys is None else self._journeys.totals,
            failures=None if self._failures is None else self._failures.totals,
            num_migrations=0 if self._journeys is None else self._journeys.num_migrations,
            stores={} if self._journeys is None else self._journeys.store_totals,
        )

    def _pools(self) -> list[PoolReport]:
        simulated_s = self.metrics.last_event_s - (self.metrics.first_event_s or 0.0)
        reports, first = [], 0
        for pool in pools_of(self._config):
            replicas = self._replicas[first : first + pool.replicas]
            first += pool.replicas
            reports.append(PoolReport.of(replicas, pool.num_gpus, simulated_s, self.metrics.last_event_s))
        return reports

    def _decisions(self) -> DecisionReport:
        models = [scheduler.knowledge.step_time for scheduler in self.schedulers]
        num_prompt_steps = sum(replica.num_prompt_steps for replica in self._replicas)
        shares = sum(replica.budget_shares for replica in self._replicas)
        actual_s = sum(model.actual_s for model in models)
        return DecisionReport(
            held_s=dict(sorted(self.metrics.held_s.items())),
            preemptions=dict(sorted(self.metrics.preemptions.items())),
            budget_used_share=shares / num_prompt_steps if num_prompt_steps else None,
            step_time_actual_s=actual_s,
            step_time_predicted_s=sum(model.predicted_s for model in models),
            step_time_error=sum(model.error_s for model in models) / actual_s if actual_s else None,
        )


def build_simulation(config: SimulationConfig) -> Simulation:
    """Wire schedulers, step-time model, replicas and router together.

    Raises:
        ConfigurationError: a name does not exist (the message lists those that do), a limit is wrong, or the model
            does not fit the GPUs.
    """
    pools = pools_of(config)
    setups = [resolve(replace(config, **pool.overrides(config), pools=(), failures=NO_FAILURES)) for pool in pools]
    sites = [(pool, setup) for pool, setup in zip(pools, setups, strict=True) for _ in range(pool.replicas)]
    loop = EventLoop()
    sizes = {replica_id: setup.num_blocks for replica_id, (_, setup) in enumerate(sites)}
    timeline = TimelineRecorder(sizes) if config.timeline else None
    metrics = MetricsCollector()
    if timeline is not None:
        metrics.on_end.append(timeline.ended)
    observers = Observers(metrics)
    routing = setups[0].routing
    copies = not isinstance(routing, RoutingConfig) or routing.name in COPYING_ROUTINGS
    journeys, failures = build_motion(
        config, [pool for pool, _ in sites], loop, observers, block_size=setups[0].block_size, copies=copies
    )
    number_of = None if journeys is None else journeys.number_of
    replicas = [
        SimulatedReplica(
            replica_id,
            setup.scheduler(),
            setup.executor(number_of),
            loop,
            observers if journeys is None else journeys,
            profile=setup.profile(pool.role),
            renew=setup.scheduler,
            jumps=config.jumps,
            probe=timeline,
        )
        for replica_id, (pool, setup) in enumerate(sites)
    ]
    router = make_router(routing) if isinstance(routing, RoutingConfig) else routing()
    cluster = Cluster(replicas, router, loop, observers, journeys, failures)
    if journeys is not None:
        cluster.fleet.link = journeys.link
    description = setups[0].description(config)
    return Simulation(config, cluster, replicas, metrics, observers, description, timeline, journeys, failures)


def _cost_per_hour(config: SimulationConfig) -> float | None:
    """Return dollars for all GPUs; None where a step-time model of one's own says nothing about GPUs."""
    if config.step_time is not None:
        return None
    return sum(
        pool.num_gpus * gpu_named(pool.gpu or config.gpu, config.prices).price_per_hour for pool in pools_of(config)
    )


def prepare_trace(
    name: str | Path,
    *,
    rate_scale: float = 1.0,
    limit: int | None = None,
    seed: int = 0,
    spread_ticks: bool = True,
    strict: bool = False,
) -> Trace:
    """Return a trace by name or from a file, cut and sped up.

    Args:
        name: one of `TRACE_NAMES`, or a file in a known format (see `sim.trace_readers`).
        rate_scale: arrival rate as a multiple of the trace's.
        limit: most requests.
        seed, spread_ticks, strict: as in `read_trace`.
    Raises:
        TraceError: there is no such trace (the message lists names and formats), or it is malformed.
        ConfigurationError: `rate_scale` or `limit` is out of range.
    """
    trace = load_trace(name, seed=seed, spread_ticks=spread_ticks, strict=strict)
    trace = replace(trace, seed=seed)
    return (trace if limit is None else trace.take(limit)).at_rate(rate_scale)


def simulate(
    trace: Trace | str | Path | Iterable[Request],
    *,
    rate_scale: float = 1.0,
    limit: int | None = None,
    seed: int = 0,
    events: BinaryIO | None = None,
    **config: Any,  # noqa: ANN401 - the fields of SimulationConfig, which checks them
) -> Report:
    """Simulate a trace in one call.

    Args:
        trace: name or file (see `prepare_trace`), a `Trace`, or requests in order of arrival.
        rate_scale: arrival rate as a multiple of the trace's; for traces only.
        limit: most requests; for traces only.
        seed: of the spread of arrivals within coarse ticks; for files only.
        events: where the event log goes, if it is wanted.
        config: fields of `SimulationConfig`.
    Raises:
        ConfigurationError: the trace or the configuration cannot be used.
    """
    simulation = build_simulation(SimulationConfig(**config))
    if isinstance(trace, str | Path):
        trace = prepare_trace(trace, rate_scale=rate_scale, limit=limit, seed=seed)
    elif isinstance(trace, Trace):
        trace = (trace if limit is None else trace.take(limit)).at_rate(rate_scale)
    return simulation.run(trace, events=events)
