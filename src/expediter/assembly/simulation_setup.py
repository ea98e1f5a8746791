"""What a configuration comes to: every choice of a simulated replica, made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from expediter.assembly.pools import PoolConfig
from expediter.assembly.presets import Preset, load_preset
from expediter.assembly.simulation_config import SimulationConfig, hardware_of
from expediter.control.fleet import ReplicaProfile, Role
from expediter.control.routing.base import Router
from expediter.control.routing.build import RoutingConfig
from expediter.control.speed import Speed
from expediter.core.ports import StepTimeModel
from expediter.core.request import RequestState
from expediter.perfmodel.calibration import calibrated_engine
from expediter.perfmodel.constants import engine_named
from expediter.perfmodel.memory import host_tier_size, kv_capacity
from expediter.perfmodel.roofline import RooflineModel
from expediter.scheduling.build import CacheConfig, PolicyConfig, build_scheduler, limits_with_budget
from expediter.scheduling.config import SchedulerConfig
from expediter.scheduling.ordering.base import Ordering
from expediter.scheduling.scheduler import Scheduler
from expediter.sim.executor import SimulatedExecutor


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSetup:
    """A simulated replica, with nothing left open.

    Attributes:
        preset: name of the preset that it comes from.
        own_ordering: an ordering of one's own; None for the policy's.
        cache: sizes of its KV pool and host tier.
        step_time: how long its steps take.
        knows_step_time: its scheduler starts from that instead of learning from nothing.
    """

    preset: str
    limits: SchedulerConfig
    policy: PolicyConfig
    own_ordering: type[Ordering] | None
    routing: RoutingConfig | type[Router]
    cache: CacheConfig
    step_time: StepTimeModel
    knows_step_time: bool

    @property
    def num_blocks(self) -> int:
        return self.cache.num_blocks

    @property
    def block_size(self) -> int:
        return self.cache.block_size

    def scheduler(self) -> Scheduler:
        """Return a scheduler for one replica."""
        return build_scheduler(
            config=self.limits,
            cache=self.cache,
            policy=self.policy,
            ordering=None if self.own_ordering is None else self.own_ordering(),
            prior=self.step_time if self.knows_step_time else None,
        )

    def executor(self, number_of: Callable[[RequestState], int] | None) -> SimulatedExecutor:
        """Return an executor for one replica; `number_of` as there."""
        return SimulatedExecutor(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_model_len=self.limits.max_model_len,
            max_num_seqs=self.limits.max_num_seqs,
            step_time=self.step_time,
            num_host_blocks=self.cache.num_host_blocks,
            block_swap_s=self.cache.block_swap_s,
            number_of=number_of,
        )

    def profile(self, role: Role) -> ReplicaProfile:
        """Return what a router may rely on of a replica."""
        budget = self.limits.max_num_batched_tokens
        return ReplicaProfile(
            role=role,
            speed=Speed.of(self.step_time, budget) if self.knows_step_time else Speed(),
            max_kv_tokens=self.num_blocks * self.block_size,
            caches_prefixes=self.cache.prefix_caching,
        )

    def description(self, config: SimulationConfig) -> dict[str, Any]:
        """Return what a report says of a simulation whose first replica this is."""
        return {
            "preset": self.preset,
            "model": config.model,
            "gpu": config.gpu,
            "tensor_parallel": config.tensor_parallel,
            "pipeline_parallel": config.pipeline_parallel,
            "expert_parallel": config.expert_parallel,
            "replicas": config.replicas,
            "pools": [_pool_description(pool) for pool in config.pools],
            "routing": self.routing.name if isinstance(self.routing, RoutingConfig) else self.routing.__name__,
            "policy": asdict(self.policy) | ({"ordering": self.own_ordering.__name__} if self.own_ordering else {}),
            "step_time": type(self.step_time).__name__,
            "engine": config.engine if config.step_time is None else None,
            "prefix_caching": self.cache.prefix_caching,
            "block_size": self.block_size,
            "num_blocks": self.num_blocks,
            "num_host_blocks": self.cache.num_host_blocks,
            "max_num_seqs": self.limits.max_num_seqs,
            "max_num_batched_tokens": self.limits.max_num_batched_tokens,
            "max_model_len": self.limits.max_model_len,
        }


def resolve(config: SimulationConfig) -> ReplicaSetup:
    """Return the replicas of a configuration whose pools and failures play no part.

    Raises:
        ConfigurationError: a name does not exist, a limit is wrong, or the model does not fit the GPUs.
    """
    preset = load_preset(config.preset)
    policy = _policy(config, preset)
    step_time = _step_time(config) if config.step_time is None else config.step_time
    cache = _cache(config, preset)
    limits = {name: getattr(config, name) for name in ("max_num_seqs", "max_model_len")}
    scheduler = replace(preset.scheduler, **{name: value for name, value in limits.items() if value is not None})
    # Who wants explanations asks for them when a step has ended; as many requests may end in one.
    scheduler = replace(scheduler, max_explanations=scheduler.max_num_seqs, tenant_weights=config.tenant_weights)
    return ReplicaSetup(
        preset=preset.name,
        limits=limits_with_budget(scheduler, policy, config.max_num_batched_tokens),
        policy=policy,
        own_ordering=None if isinstance(config.ordering, str) else config.ordering,
        routing=_routing(config.routing, preset.cluster.routing),
        cache=cache,
        step_time=step_time,
        knows_step_time=config.knows_step_time,
    )


def _policy(config: SimulationConfig, preset: Preset) -> PolicyConfig:
    policy = preset.policy if config.policy is None else config.policy
    names = ("ordering", "batching", "memory", "budget", "victims", "preemption_mode")
    parts = {name: getattr(config, name) for name in names}
    return replace(policy, **{name: part for name, part in parts.items() if isinstance(part, str)})


def _step_time(config: SimulationConfig) -> RooflineModel:
    engine = engine_named(config.engine)
    if config.calibration is not None:
        engine = calibrated_engine(config.calibration, engine)
    shape, gpu = hardware_of(config)
    split = (config.tensor_parallel, config.pipeline_parallel, config.expert_parallel)
    return RooflineModel(shape, gpu, *split, engine=engine)


def _cache(config: SimulationConfig, preset: Preset) -> CacheConfig:
    num_blocks = config.num_blocks
    block_size = preset.block_size if config.block_size is None else config.block_size
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
    return CacheConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        prefix_caching=preset.prefix_caching if config.prefix_caching is None else config.prefix_caching,
        num_host_blocks=num_host_blocks or 0,
        block_swap_s=block_swap_s,
    )


def _routing(
    asked: str | RoutingConfig | type[Router] | None, of_preset: RoutingConfig
) -> RoutingConfig | type[Router]:
    if asked is None:
        return of_preset
    return replace(of_preset, name=asked) if isinstance(asked, str) else asked


def _pool_description(pool: PoolConfig) -> dict[str, Any]:
    return {name: value for name, value in asdict(pool).items() if name != "step_time" and value is not None}
