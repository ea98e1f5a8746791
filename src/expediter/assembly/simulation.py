"""Put a simulation together: the real scheduler and router, modelled replicas, a trace.

report = simulate("conversation.jsonl.gz", model="llama-3.1-70b", gpu="a100-80g", tensor_parallel=8, replicas=8)
print(report.goodput_rps_per_gpu, report.ttft_s.p99)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final

from expediter.assembly.pools import PoolConfig, check_pools
from expediter.assembly.presets import load_preset
from expediter.assembly.traces import load_trace
from expediter.control.fleet import ReplicaProfile
from expediter.control.handoff import TransferStyle, transfer_style
from expediter.control.migration import MigrationConfig
from expediter.control.routing.base import Router
from expediter.control.routing.build import SESSION_ROUTINGS, RoutingConfig, make_router
from expediter.control.routing.notes import RoutingNotes
from expediter.control.speed import Speed
from expediter.core.errors import ConfigurationError
from expediter.core.explanation import Span
from expediter.core.plan import StepFeatures
from expediter.core.ports import StepTimeModel
from expediter.core.request import Request
from expediter.core.slo import NO_SLO, Slo, SloClass
from expediter.perfmodel.calibration import calibrated_engine
from expediter.perfmodel.constants import engine_named
from expediter.perfmodel.dimensions import ModelShape
from expediter.perfmodel.hardware import Gpu, gpu_named
from expediter.perfmodel.memory import host_tier_size, kv_capacity
from expediter.perfmodel.parallelism import Parallelism
from expediter.perfmodel.roofline import DEFAULT_ENGINE, RooflineModel
from expediter.perfmodel.shapes import shape_named
from expediter.perfmodel.transfer import STORAGE_BANDWIDTH, cold_start_s
from expediter.scheduling.build import CacheConfig, PolicyConfig, build_scheduler, limits_with_budget
from expediter.scheduling.config import SchedulerConfig
from expediter.scheduling.ordering.base import Ordering
from expediter.scheduling.scheduler import Scheduler
from expediter.sim.cluster import Cluster
from expediter.sim.event_log import EventLog
from expediter.sim.executor import SimulatedExecutor
from expediter.sim.failures import NO_FAILURES, FailureConfig, Failures
from expediter.sim.journeys import Journeys
from expediter.sim.loop import EventLoop
from expediter.sim.metrics import MetricsCollector
from expediter.sim.network import Link, Network
from expediter.sim.observer import Explainer, Observers
from expediter.sim.replica import SimulatedReplica
from expediter.sim.report import DecisionReport, PoolReport, Report, build_report
from expediter.sim.stores import StoreConfig, Stores, TierName
from expediter.sim.timeline import TimelineRecorder
from expediter.sim.trace import Trace, trace_summary
from expediter.sim.transfers import TransferConfig

_COPYING: Final = frozenset({"mooncake"})
"""Routing policies that ask for copies of prefixes."""
DEFAULT_SLO = Slo(ttft_s=2.0, tpot_s=0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """What to simulate. None leaves a choice to the preset, or to the model and the GPU.

    Args:
        preset: name of a preset.
        model: name of a shape, or a folder with a Hugging Face config.json.
        gpu: name of a GPU, or a .toml file that describes one (`perfmodel.hardware.gpu_named`).
        prices: own prices per hour and GPU, by the GPU's name.
        weight_dtype, kv_dtype: of the layers' weights and of KV; None for the model's.
        tensor_parallel: GPUs that share every layer of a replica.
        pipeline_parallel: stages that share a replica's layers.
        expert_parallel: groups that share the experts (`perfmodel.parallelism.Parallelism`).
        replicas: number of them.
        pools: what the cluster consists of, in place of `replicas` that are all alike and do everything; what a pool
            leaves open is as said here, but for the sizes of its parallel groups.
        transfer: when KV moves from prefill to decode replicas (`control.handoff.TransferStyle`); None: the preset's.
        transfer_lease_s, transfer_retries: when a transfer counts as lost, and how often it is begun anew.
        network_bandwidth: of each GPU's way to other replicas, byte/s; None for the GPU's.
        network_latency_s: of that way; None for the GPU's.
        kv_bytes_per_token: what is sent; None for the model's.
        stores: tiers of storage below the replicas' caches that keep prompts' KV.
        migration: when running requests move to replicas with more room; None for never.
        failures: what goes wrong; replicas are numbered from 0 in the order of their pools.
        cold_start_s: until a replica that was lost serves again; None for what reading the weights takes, and a start.
        slo: targets of requests that have none and name no class.
        slo_classes: by name; requests bring the names along.
        routing: name of a routing policy, which keeps the preset's thresholds; one with thresholds; or a class of one's
            own with the `Router` protocol.
        policy: names of the parts; None for the preset's.
        ordering: name, or a class of one's own with the `Ordering` protocol; every replica gets an instance.
        batching, memory, budget, victims, preemption_mode: names of parts.
        knows_step_time: schedulers start from the simulation's own step-time model instead of learning from nothing.
        max_num_seqs, max_num_batched_tokens, max_model_len: limits of each replica's scheduler; a batching that
            computes prompts whole sets the token budget itself.
        block_size: tokens per KV block.
        num_blocks: KV blocks per replica; None for what the GPUs hold beside the weights.
        swap_space_bytes: host memory per GPU for the KV of preempted requests.
        num_host_blocks: blocks of each replica's host tier; None for what `swap_space_bytes` holds.
        block_swap_s: time to move one block there or back; None for what the GPU's link takes.
        prefix_caching: whether ended requests leave their KV for reuse.
        engine: whose overhead the modelled GPUs carry, by name.
        calibration: file of measured steps that the engine is fitted to (`perfmodel.measurements`).
        step_time: a step-time model of one's own, such as one fitted to a live replica; with it and `num_blocks`,
            model and GPU play no part.
        timeline: whether the report says how the run went over time, and gives whole distributions.
        jumps: advance runs of equal steps at once; False gives the same results, slower.
    Raises:
        ConfigurationError: a number is out of range.
    """

    preset: str = "sarathi"
    model: str = "llama-3.1-8b"
    gpu: str = "a100-80g"
    prices: Mapping[str, float] = field(default_factory=dict)
    weight_dtype: str | None = None
    kv_dtype: str | None = None
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    replicas: int = 1
    pools: tuple[PoolConfig, ...] = ()
    transfer: str | None = None
    transfer_lease_s: float = 30.0
    transfer_retries: int = 1
    network_bandwidth: float | None = None
    network_latency_s: float | None = None
    kv_bytes_per_token: float | None = None
    stores: tuple[StoreConfig, ...] = ()
    migration: MigrationConfig | None = None
    failures: FailureConfig = NO_FAILURES
    cold_start_s: float | None = None
    slo: Slo = DEFAULT_SLO
    slo_classes: Mapping[str, SloClass] = field(default_factory=dict)
    routing: str | RoutingConfig | type[Router] | None = None
    policy: PolicyConfig | None = None
    ordering: str | type[Ordering] | None = None
    batching: str | None = None
    memory: str | None = None
    budget: str | None = None
    victims: str | None = None
    preemption_mode: str | None = None
    knows_step_time: bool = True
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    block_size: int | None = None
    num_blocks: int | None = None
    swap_space_bytes: int = 0
    num_host_blocks: int | None = None
    block_swap_s: float | None = None
    prefix_caching: bool | None = None
    engine: str = DEFAULT_ENGINE
    calibration: Path | None = None
    step_time: StepTimeModel | None = None
    timeline: bool = False
    jumps: bool = True

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "pipeline_parallel", "expert_parallel", "replicas", "block_size", "num_blocks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigurationError(f"{name} must be at least 1, not {value}")
        for name in ("swap_space_bytes", "num_host_blocks", "block_swap_s"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigurationError(f"{name} must not be negative, not {value}")
        check_pools(self.pools)
        self.failures.check(sum(pool.replicas for pool in self.pools) or self.replicas)
        if self.cold_start_s is not None and not self.cold_start_s > 0:
            raise ConfigurationError(f"cold_start_s must be above 0, not {self.cold_start_s}")
        if self.transfer is not None:
            transfer_style(self.transfer)

    @property
    def parallelism(self) -> Parallelism:
        """How a replica's GPUs share the model."""
        return Parallelism(tensor=self.tensor_parallel, pipeline=self.pipeline_parallel, expert=self.expert_parallel)


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
    copies = not isinstance(routing, RoutingConfig) or routing.name in _COPYING
    journeys, failures = _motion(
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


def _motion(
    config: SimulationConfig,
    pools: Sequence[PoolConfig],
    loop: EventLoop,
    observers: Observers,
    *,
    block_size: int,
    copies: bool,
) -> tuple[Journeys | None, Failures | None]:
    """Return what moves requests between replicas, and what makes them fail, where anything does.

    Args:
        pools: of each replica.
        copies: the router may ask for copies of prefixes.
    """
    failures = None
    if not config.failures.is_empty:
        cold_start_s = {replica_id: _cold_start_s(config, pool) for replica_id, pool in enumerate(pools)}
        failures = Failures(config.failures, loop, observers, cold_start_s)
    is_plain = failures is None and config.migration is None and not config.stores and not copies
    if is_plain and all(pool.role == "mixed" for pool in pools):
        return None, None  # each request stays where it was sent
    network, transfers = _network(config, pools)
    loses = (lambda: False) if failures is None else failures.loses
    stores = _stores(config, pools, network, transfers.kv_bytes_per_token, block_size) if config.stores else None
    journeys = Journeys(
        loop,
        network,
        observers,
        transfers,
        loses=loses,
        can_fail=failures is not None,
        stores=stores,
        migration=config.migration,
    )
    return journeys, failures


def _stores(
    config: SimulationConfig, pools: Sequence[PoolConfig], network: Network, kv_bytes_per_token: float, block_size: int
) -> Stores:
    if kv_bytes_per_token <= 0:
        raise ConfigurationError("stores need to know the bytes of a token's KV: kv_bytes_per_token must be above 0")
    local: dict[int, dict[TierName, Link]] = {}
    for replica_id, pool in enumerate(pools):
        links: dict[TierName, Link] = {}
        for store in config.stores:
            bandwidth = store.bandwidth
            if bandwidth is None and store.tier != "remote":
                gpu = gpu_named(pool.gpu or config.gpu, config.prices)
                host = gpu.host_bandwidth * gpu.host_efficiency * pool.num_gpus_per_replica
                bandwidth = host if store.tier == "host" else STORAGE_BANDWIDTH
            if bandwidth is not None:
                links[store.tier] = Link(bandwidth=bandwidth, latency_s=store.latency_s)
        local[replica_id] = links
    return Stores(config.stores, network, local, kv_bytes_per_token=kv_bytes_per_token, block_size=block_size)


def _cost_per_hour(config: SimulationConfig) -> float | None:
    """Return dollars for all GPUs; None where a step-time model of one's own says nothing about GPUs."""
    if config.step_time is not None:
        return None
    return sum(
        pool.num_gpus * gpu_named(pool.gpu or config.gpu, config.prices).price_per_hour for pool in pools_of(config)
    )


def _cold_start_s(config: SimulationConfig, pool: PoolConfig) -> float:
    if config.cold_start_s is not None:
        return config.cold_start_s
    shape, gpu = hardware_of(replace(config, **pool.overrides(config), pools=(), failures=NO_FAILURES))
    return cold_start_s(shape, gpu, pool.tensor_parallel, pool.pipeline_parallel)


def pools_of(config: SimulationConfig) -> tuple[PoolConfig, ...]:
    """Return the pools of a simulation; without any, its replicas as the preset splits them, all of them alike."""
    if config.pools:
        return config.pools
    all_mixed = PoolConfig(
        replicas=config.replicas,
        tensor_parallel=config.tensor_parallel,
        pipeline_parallel=config.pipeline_parallel,
        expert_parallel=config.expert_parallel,
    )
    num_prefill = load_preset(config.preset).cluster.num_prefill(config.replicas)
    if not num_prefill:
        return (all_mixed,)
    num_decode = config.replicas - num_prefill
    return (
        replace(all_mixed, role="prefill", replicas=num_prefill),
        replace(all_mixed, role="decode", replicas=num_decode),
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


def _network(config: SimulationConfig, pools: Sequence[PoolConfig]) -> tuple[Network, TransferConfig]:
    links: dict[int, Link] = {}
    num_layers, kv_bytes = 1, config.kv_bytes_per_token
    style = transfer_style(config.transfer or load_preset(config.preset).cluster.transfer)
    if None in (config.network_bandwidth, config.network_latency_s, kv_bytes) or style is TransferStyle.LAYERWISE:
        shape = hardware_of(config)[0]
        num_layers, kv_bytes = shape.num_layers, shape.kv_bytes_per_token if kv_bytes is None else kv_bytes
    for replica_id, pool in enumerate(pools):
        bandwidth, latency_s = config.network_bandwidth, config.network_latency_s
        if bandwidth is None or latency_s is None:
            gpu = gpu_named(pool.gpu or config.gpu, config.prices)
            bandwidth = gpu.network_bandwidth if bandwidth is None else bandwidth
            latency_s = gpu.network_latency_s if latency_s is None else latency_s
        links[replica_id] = Link(bandwidth=bandwidth * pool.num_gpus_per_replica, latency_s=latency_s)
    transfers = TransferConfig(
        style=style,
        kv_bytes_per_token=kv_bytes or 0.0,
        lease_s=config.transfer_lease_s,
        max_retries=config.transfer_retries,
    )
    return Network(links, num_layers), transfers


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
    scheduler = replace(scheduler, max_explanations=scheduler.max_num_seqs)
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


def hardware_of(config: SimulationConfig) -> tuple[ModelShape, Gpu]:
    """Return the model and the GPU that a configuration names.

    Raises:
        ConfigurationError: there is none of that name.
    """
    shape = shape_named(config.model).with_dtypes(weights=config.weight_dtype, kv=config.kv_dtype)
    return shape, gpu_named(config.gpu, config.prices)


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
