"""What moves requests and KV between simulated replicas, and what makes those fail, put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from expediter.assembly.pools import PoolConfig
from expediter.assembly.presets import load_preset
from expediter.assembly.simulation_config import SimulationConfig, hardware_of
from expediter.control.handoff import TransferStyle, transfer_style
from expediter.core.errors import ConfigurationError
from expediter.perfmodel.hardware import gpu_named
from expediter.perfmodel.transfer import STORAGE_BANDWIDTH, cold_start_s
from expediter.sim.failures import NO_FAILURES, Failures
from expediter.sim.journeys import Journeys
from expediter.sim.loop import EventLoop
from expediter.sim.network import Link, Network
from expediter.sim.observer import Observers
from expediter.sim.stores import Stores, TierName
from expediter.sim.transfers import TransferConfig


def build_motion(
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


def _cold_start_s(config: SimulationConfig, pool: PoolConfig) -> float:
    if config.cold_start_s is not None:
        return config.cold_start_s
    shape, gpu = hardware_of(replace(config, **pool.overrides(config), pools=(), failures=NO_FAILURES))
    return cold_start_s(shape, gpu, pool.tensor_parallel, pool.pipeline_parallel)


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
