"""Put a simulation together: the real scheduler and router, modelled replicas, a trace.

report = simulate("conversation.jsonl.gz", model="llama-3.1-70b", gpu="a100-80g", tensor_parallel=8, replicas=8)
print(report.goodput_rps_per_gpu, report.ttft_s.p99)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from expediter.assembly.motion import build_motion
from expediter.assembly.pools import PoolConfig
from expediter.assembly.presets import load_preset
from expediter.assembly.simulation_config import DEFAULT_SLO, SimulationConfig, hardware_of, pools_of
from expediter.assembly.traces import load_trace
from expediter.control.fleet import ReplicaProfile
from expediter.control.routing.base import Router
from expediter.control.routing.build import COPYING_ROUTINGS, SESSION_ROUTINGS, RoutingConfig, make_router
from expediter.control.routing.notes import RoutingNotes
from expediter.control.speed import Speed
from expediter.core.errors import ConfigurationError
from expediter.core.explanation import Span
from expediter.core.plan import StepFeatures
from expediter.core.ports import StepTimeModel
from expediter.core.request import Request
from expediter.core.slo import NO_SLO, SloClass
from expediter.perfmodel.calibration import calibrated_engine
from expediter.perfmodel.constants import engine_named
from expediter.perfmodel.hardware import gpu_named
from expediter.perfmodel.memory import host_tier_size, kv_capacity
from expediter.perfmodel.roofline import RooflineModel
from expediter.scheduling.build import CacheConfig, PolicyConfig, build_scheduler, limits_with_budget
from expediter.scheduling.config import SchedulerConfig
from expediter.scheduling.ordering.base import Ordering
from expediter.scheduling.scheduler import Scheduler
from expediter.sim.cluster import Cluster
from expediter.sim.event_log import EventLog
from expediter.sim.executor import SimulatedExecutor
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
            self._check_classes(requests)  # before the work is done
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
        trace = requests if isinstance(requests, Trace) else None
        self._cluster.run(self._groups(requests), progress)
        if self._failures is not None:
            self._failures.finish(self.metrics.last_event_s)
        return build_report(
            self.metrics,
            slo=self._config.slo,
            num_gpus=sum(pool.num_gpus for pool in pools_of(self._config)),
            cost_per_hour=_cost_per_hour(self._config),
            num_steps=self._cluster.num_steps,
            wall_s=time.perf_counter() - started,
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

    def _check_classes(self, trace: Trace) -> None:
        slos = trace.slos or (NO_SLO,) * len(trace)
        for pair in sorted({(name, slo == NO_SLO) for name, slo in zip(trace.slo_classes or (), slos, strict=False)}):
            self._class_of(*pair)

    def _class_of(self, name: str, has_no_targets: bool) -> SloClass | None:
        known = self._config.slo_classes
        if name and name not in known and has_no_targets:
            there = f"there are: {', '.join(sorted(known))}" if known else "none are configured"
            raise ConfigurationError(f"no SLO class {name!r}; {there}")
        return known.get(name)

    def _groups(self, requests: Trace | Iterable[Request]) -> Iterator[Sequence[Request]]:
        """Yield the requests with their sequences, each with the targets that it will be judged by."""
        if not isinstance(requests, Trace):
            return ((self._with_targets(request),) for request in requests)
        if requests.slos is None and requests.slo_classes is None:  # all have the same: none needs a look of its own
            return replace(requests, slos=(self._config.slo,) * len(requests)).groups()
        return (tuple(map(self._with_targets, group)) for group in requests.groups())

    def _with_targets(self, request: Request) -> Request:
        """Give a request its class's targets, or the simulation's: schedulers must know what they are judged by."""
        chosen = self._class_of(request.slo_class, request.slo == NO_SLO)
        if chosen is None:
            return replace(request, slo=self._config.slo) if request.slo == NO_SLO else request
        targets = chosen.with_targets(request.slo)
        return replace(request, slo=targets, value=chosen.value, refuse_late=chosen.refuse_late)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setup:
    """A configuration with every choice made."""

    preset: str
    limits: SchedulerConfig
    policy: PolicyConfig
    own_ordering: type[Ordering] | None
    routing: RoutingConfig | type[Router]
    prefix_caching: bool
    block_size: int
    num_blocks: int
    num_host_blocks: int
    block_swap_s: float | None
    step_time: StepTimeModel


def build_simulation(config: SimulationConfig) -> Simulation:
    """Wire schedulers, step-time model, replicas and router together.

    Raises:
        ConfigurationError: a name does not exist (the message lists those that do), a limit is wrong, or the model
            does not fit the GPUs.
    """
    pools = pools_of(config)
    setups = [_resolve(replace(config, **pool.overrides(config), pools=(), failures=NO_FAILURES)) for pool in pools]
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

    def scheduler(setup: _Setup) -> Scheduler:
        return build_scheduler(
            config=setup.limits,
            cache=CacheConfig(
                num_blocks=setup.num_blocks,
                block_size=setup.block_size,
                prefix_caching=setup.prefix_caching,
                num_host_blocks=setup.num_host_blocks,
                block_swap_s=setup.block_swap_s,
            ),
            policy=setup.policy,
            ordering=None if setup.own_ordering is None else setup.own_ordering(),
            prior=setup.step_time if config.knows_step_time else None,
        )

    replicas = [
        SimulatedReplica(
            replica_id,
            scheduler(setup),
            SimulatedExecutor(
                num_blocks=setup.num_blocks,
                block_size=setup.block_size,
                max_model_len=setup.limits.max_model_len,
                max_num_seqs=setup.limits.max_num_seqs,
                step_time=setup.step_time,
                num_host_blocks=setup.num_host_blocks,
                block_swap_s=setup.block_swap_s,
                number_of=None if journeys is None else journeys.number_of,
            ),
            loop,
            observers if journeys is None else journeys,
            profile=_profile(config, pool, setup),
            renew=partial(scheduler, setup),
            jumps=config.jumps,
            probe=timeline,
        )
        for replica_id, (pool, setup) in enumerate(sites)
    ]
    router = make_router(routing) if isinstance(routing, RoutingConfig) else routing()
    cluster = Cluster(replicas, router, loop, observers, journeys, failures)
    if journeys is not None:
        cluster.fleet.link = journeys.link
    description = _description(config, setups[0])
    return Simulation(config, cluster, replicas, metrics, observers, description, timeline, journeys, failures)


def _cost_per_hour(config: SimulationConfig) -> float | None:
    """Return dollars for all GPUs; None where a step-time model of one's own says nothing about GPUs."""
    if config.step_time is not None:
        return None
    return sum(
        pool.num_gpus * gpu_named(pool.gpu or config.gpu, config.prices).price_per_hour for pool in pools_of(config)
    )


def _profile(config: SimulationConfig, pool: PoolConfig, setup: _Setup) -> ReplicaProfile:
    """Return what a router may rely on of a pool's replicas."""
    knows = config.knows_step_time
    return ReplicaProfile(
        role=pool.role,
        speed=Speed.of(setup.step_time, setup.limits.max_num_batched_tokens) if knows else Speed(),
        max_kv_tokens=setup.num_blocks * setup.block_size,
        caches_prefixes=setup.prefix_caching,
    )


def _resolve(config: SimulationConfig) -> _Setup:
    preset = load_preset(config.preset)
    policy = preset.policy if config.policy is None else config.policy
    names = ("ordering", "batching", "memory", "budget", "victims", "preemption_mode")
    parts = {name: getattr(config, name) for name in names}
    policy = replace(policy, **{name: part for name, part in parts.items() if isinstance(part, str)})
    step_time, num_blocks = config.step_time, config.num_blocks
    block_size = preset.block_size if config.block_size is None else config.block_size
    if step_time is None:
        engine = engine_named(config.engine)
        if config.calibration is not None:
            engine = calibrated_engine(config.calibration, engine)
        shape, gpu = hardware_of(config)
        split = (config.tensor_parallel, config.pipeline_parallel, config.expert_parallel)
        step_time = RooflineModel(shape, gpu, *split, engine=engine)
    if num_blocks is None:
        shape, gpu = hardware_of(config)
        num_blocks = kv_capacity(
            shape,
            gpu,
            config.tensor_parallel,
            block_size,
            pipeline_parallel=config.pipeline_parallel,
            expert_parallel=config.expert_parallel,
        ).num_blocks
    num_host_blocks, block_swap_s = config.num_host_blocks, config.block_swap_s
    if config.swap_space_bytes and (num_host_blocks is None or block_swap_s is None):
        shape, gpu = hardware_of(config)
        tier = host_tier_size(
            shape,
            gpu,
            config.tensor_parallel,
            block_size,
            config.swap_space_bytes,
            pipeline_parallel=config.pipeline_parallel,
        )
        num_host_blocks = tier.num_blocks if num_host_blocks is None else num_host_blocks
        block_swap_s = tier.block_swap_s if block_swap_s is None else block_swap_s
    limits = {name: getattr(config, name) for name in ("max_num_seqs", "max_model_len")}
    scheduler = replace(preset.scheduler, **{name: value for name, value in limits.items() if value is not None})
    # Who wants explanations asks for them when a step has ended; as many requests may end in one.
    scheduler = replace(scheduler, max_explanations=scheduler.max_num_seqs, tenant_weights=config.tenant_weights)
    return _Setup(
        preset=preset.name,
        limits=limits_with_budget(scheduler, policy, config.max_num_batched_tokens),
        policy=policy,
        own_ordering=None if isinstance(config.ordering, str) else config.ordering,
        routing=_routing(config.routing, preset.cluster.routing),
        prefix_caching=preset.prefix_caching if config.prefix_caching is None else config.prefix_caching,
        block_size=block_size,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks or 0,
        block_swap_s=block_swap_s,
        step_time=step_time,
    )


def _routing(
    asked: str | RoutingConfig | type[Router] | None, of_preset: RoutingConfig
) -> RoutingConfig | type[Router]:
    if asked is None:
        return of_preset
    return replace(of_preset, name=asked) if isinstance(asked, str) else asked


def _description(config: SimulationConfig, setup: _Setup) -> dict[str, Any]:
    return {
        "preset": setup.preset,
        "model": config.model,
        "gpu": config.gpu,
        "tensor_parallel": config.tensor_parallel,
        "pipeline_parallel": config.pipeline_parallel,
        "expert_parallel": config.expert_parallel,
        "replicas": config.replicas,
        "pools": [_pool_description(pool) for pool in config.pools],
        "routing": setup.routing.name if isinstance(setup.routing, RoutingConfig) else setup.routing.__name__,
        "policy": asdict(setup.policy) | ({"ordering": setup.own_ordering.__name__} if setup.own_ordering else {}),
        "step_time": type(setup.step_time).__name__,
        "engine": config.engine if config.step_time is None else None,
        "prefix_caching": setup.prefix_caching,
        "block_size": setup.block_size,
        "num_blocks": setup.num_blocks,
        "num_host_blocks": setup.num_host_blocks,
        "max_num_seqs": setup.limits.max_num_seqs,
        "max_num_batched_tokens": setup.limits.max_num_batched_tokens,
        "max_model_len": setup.limits.max_model_len,
    }


def _pool_description(pool: PoolConfig) -> dict[str, Any]:
    return {name: value for name, value in asdict(pool).items() if name != "step_time" and value is not None}


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
