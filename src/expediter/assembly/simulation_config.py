"""What to simulate, and the hardware and the pools that this names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from expediter.assembly.pools import PoolConfig, check_pools
from expediter.assembly.presets import load_preset
from expediter.control.handoff import transfer_style
from expediter.control.migration import MigrationConfig
from expediter.control.routing.base import Router
from expediter.control.routing.build import RoutingConfig
from expediter.core.ports import StepTimeModel
from expediter.core.ranges import require_above_zero, require_at_least, require_not_negative
from expediter.core.slo import Slo, SloClass
from expediter.perfmodel.dimensions import ModelShape
from expediter.perfmodel.hardware import Gpu, gpu_named
from expediter.perfmodel.parallelism import Parallelism
from expediter.perfmodel.roofline import DEFAULT_ENGINE
from expediter.perfmodel.shapes import shape_named
from expediter.scheduling.build import PolicyConfig
from expediter.scheduling.ordering.base import Ordering
from expediter.sim.failures import NO_FAILURES, FailureConfig
from expediter.sim.stores import StoreConfig

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
        tenant_weights: share of each tenant under the fair orderings, 1 by default.
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
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
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
        require_at_least(1, self, "tensor_parallel", "pipeline_parallel", "expert_parallel")
        require_at_least(1, self, "replicas", "block_size", "num_blocks")
        require_not_negative(self, "swap_space_bytes", "num_host_blocks", "block_swap_s")
        check_pools(self.pools)
        self.failures.check(sum(pool.replicas for pool in self.pools) or self.replicas)
        require_above_zero(self, "cold_start_s")
        if self.transfer is not None:
            transfer_style(self.transfer)

    @property
    def parallelism(self) -> Parallelism:
        """How a replica's GPUs share the model."""
        return Parallelism(tensor=self.tensor_parallel, pipeline=self.pipeline_parallel, expert=self.expert_parallel)


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


def hardware_of(config: SimulationConfig) -> tuple[ModelShape, Gpu]:
    """Return the model and the GPU that a configuration names.

    Raises:
        ConfigurationError: there is none of that name.
    """
    shape = shape_named(config.model).with_dtypes(weights=config.weight_dtype, kv=config.kv_dtype)
    return shape, gpu_named(config.gpu, config.prices)
