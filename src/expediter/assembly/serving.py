"""Puts a server together: replicas, gateway, metrics."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import uvloop

from expediter.assembly.door import OwnPool, bind_admin, ready_line, run_door
from expediter.assembly.door_config import DoorConfig
from expediter.assembly.file_config import FileConfig
from expediter.assembly.observing import ObservingConfig
from expediter.assembly.presets import Preset
from expediter.control.routing.build import make_router
from expediter.core.errors import ConfigurationError
from expediter.core.ranges import require_at_least, require_not_negative
from expediter.engine.tokenizer import Tokenizer
from expediter.gateway.api.operations import OWN_OPERATIONS
from expediter.gateway.app import build_app
from expediter.gateway.backends.config import BackendConfig
from expediter.gateway.door.drain import Drain
from expediter.gateway.grammars import Grammars
from expediter.gateway.info import ServerInfo
from expediter.gateway.server import StopSignals, bind, first_of
from expediter.gateway.service import GatewayConfig, Service
from expediter.gateway.tenants import Tenants
from expediter.runtime.clock import MonotonicClock
from expediter.runtime.frames import Hello
from expediter.runtime.spec import ReplicaSpec
from expediter.runtime.supervisor import Supervisor, SupervisorConfig
from expediter.scheduling.build import limits_with_budget
from expediter.telemetry.metrics import ServerMetrics
from expediter.telemetry.step_log import StepLog

OWN_BACKEND: Final = "own"
"""Name of our own replicas among backends."""
REPLICA_COMMAND: Final = (sys.executable, "-m", "expediter.assembly.replica")
_REQUESTS_PER_SEQUENCE: Final = 4
_MIN_REQUESTS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """One server.

    Args:
        model: folder of the model.
        model_names: names that clients may use for it; the first is shown.
        preset: scheduler limits, policy, routing; the operator's overrides are in it already.
        max_model_len: None for what model and KV pool can hold.
        max_num_batched_tokens: None for the preset's, or what its batching needs.
        num_blocks, kv_cache_memory_bytes: size of each replica's KV pool; None to derive it.
        swap_space_bytes: host memory of each replica for the KV of preempted requests.
        api_keys: keys of the default tenant; none here and none in `file`: everybody may come in.
        backends: servers that serve models beside our own replicas.
        admin_host, admin_port: of the admin listener; no port for none.
        file: SLO classes, and tenants, which are read again when they change.
        shutdown_timeout_s: for requests in flight at the first signal.
        observing: what is written of requests.
    Raises:
        ConfigurationError: a value is out of range.
    """

    model: Path
    model_names: tuple[str, ...]
    preset: Preset
    host: str = "127.0.0.1"
    port: int = 8000
    num_replicas: int = 1
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    num_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    swap_space_bytes: int = 0
    dtype: str = "auto"
    device: str = "auto"
    api_keys: tuple[str, ...] = ()
    file: FileConfig = field(default_factory=FileConfig)
    backends: tuple[BackendConfig, ...] = ()
    admin_host: str = "127.0.0.1"
    admin_port: int | None = None
    shutdown_timeout_s: float = 30.0
    observing: ObservingConfig = field(default_factory=ObservingConfig)
    supervisor: SupervisorConfig = field(default_factory=SupervisorConfig)

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise ConfigurationError(f"replicas must be at least 1, not {self.num_replicas}")
        require_at_least(1, self, "max_model_len", "num_blocks", "kv_cache_memory_bytes")
        require_at_least(1, self.preset, "block_size")
        require_not_negative(self, "swap_space_bytes", "shutdown_timeout_s")
        if self.preset.cluster.routing.prefix_knowledge == "exact":
            raise ConfigurationError("prefix_knowledge exact is for simulations: no server looks into its replicas")
        if self.preset.cluster.prefill_share:
            raise ConfigurationError(
                f"preset {self.preset.name!r} computes prompts and tokens on different replicas; replicas of a server "
                f"do both, so choose another, or simulate it"
            )
        limits = self.preset.scheduler
        if self.max_model_len is not None:
            limits = replace(limits, max_model_len=self.max_model_len)
            limits_with_budget(limits, self.preset.policy, self.max_num_batched_tokens)
        elif self.max_num_batched_tokens is not None:  # whether it holds a prompt, the replica knows
            replace(limits, max_num_batched_tokens=self.max_num_batched_tokens)

    @property
    def door(self) -> DoorConfig:
        """The door in front of the replicas."""
        return DoorConfig(
            host=self.host,
            port=self.port,
            backends=self.backends,
            api_keys=self.api_keys,
            file=self.file,
            shutdown_timeout_s=self.shutdown_timeout_s,
            observing=self.observing,
            admin_host=self.admin_host,
            admin_port=self.admin_port,
        )


def serve(
    config: ServeConfig, announce: Callable[[str], None], *, replica_command: Sequence[str] = REPLICA_COMMAND
) -> None:
    """Serve until a signal; returns after a clean shutdown, with no process left behind.

    Args:
        announce: told in a line when the server is ready.
        replica_command: argv of a replica process.
    Raises:
        ConfigurationError, ReplicaError: it cannot start.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config, announce, replica_command))


async def _serve(config: ServeConfig, announce: Callable[[str], None], replica_command: Sequence[str]) -> None:
    tenants = Tenants(config.door.tenant_book())
    metrics, step_log, clock = ServerMetrics(config.model_names[0]), StepLog(), MonotonicClock()
    text = Tokenizer.from_folder(config.model)
    supervisor = Supervisor(
        command=replica_command,
        specs=replica_specs(config),
        router=make_router(config.preset.cluster.routing),
        metrics=metrics,
        step_log=step_log,
        clock=clock,
        config=config.supervisor,
    )
    with bind(config.host, config.port) as sock, bind_admin(config.door) as admin, StopSignals() as signals:
        starting = asyncio.create_task(supervisor.start())
        try:
            await first_of(asyncio.shield(starting), signals.first.wait())
            if not starting.done():  # a signal came first
                return
            hellos = starting.result()
            line = ready_line(config.door, sock, admin, _summary(config, hellos))
            async with Grammars(config.model, count=metrics.count_grammar) as grammars:
                service = Service(_gateway_config(config, hellos), supervisor, text, clock, grammars)
                drain = Drain(supervisor.start_took_s)
                own = OwnPool(
                    name=OWN_BACKEND,
                    app=build_app(service, step_log),
                    operations=OWN_OPERATIONS,
                    models=config.model_names,
                    supervisor=supervisor,
                    registry=metrics.registry,
                    max_requests=_max_requests(config, len(hellos)),
                    max_model_len=service.config.max_model_len,
                    ordering=config.preset.policy.ordering,
                    recent=service.recent,
                )
                await run_door(config.door, tenants, drain, own, sock, signals, lambda _: announce(line), admin=admin)
                service.close()
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await supervisor.stop()


def replica_specs(config: ServeConfig) -> list[ReplicaSpec]:
    """Return what each replica is told. They share the CPU's cores evenly, but for one that is left to the gateway.

    Threads of a matrix product wait for each other actively: with one more than there are free cores, a step takes
    several times as long.
    """
    num_threads = max((_num_cores() - 1) // config.num_replicas, 1)
    scheduler = replace(config.preset.scheduler, tenant_weights=config.file.weights)
    return [
        ReplicaSpec(
            replica_id=number,
            model=str(config.model),
            dtype=config.dtype,
            device=config.device,
            num_threads=num_threads,
            block_size=config.preset.block_size,
            num_blocks=config.num_blocks,
            kv_cache_memory_bytes=config.kv_cache_memory_bytes,
            swap_space_bytes=config.swap_space_bytes,
            scheduler=scheduler,
            max_model_len=config.max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
            policy=config.preset.policy,
            prefix_caching=config.preset.prefix_caching,
            log_format=config.observing.log_format,
        )
        for number in range(config.num_replicas)
    ]


def _max_requests(config: ServeConfig, num_replicas: int) -> int:
    """Return how many requests the replicas have at once: enough waiting ones for their order to have a choice."""
    return num_replicas * max(_REQUESTS_PER_SEQUENCE * config.preset.scheduler.max_num_seqs, _MIN_REQUESTS)


def _num_cores() -> int:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _gateway_config(config: ServeConfig, hellos: Sequence[Hello]) -> GatewayConfig:
    preset, limits = config.preset, hellos[0].limits
    max_model_len = min(hello.max_model_len for hello in hellos)
    scheduler = limits_with_budget(
        replace(preset.scheduler, max_model_len=max_model_len), preset.policy, config.max_num_batched_tokens
    )
    return GatewayConfig(
        model_names=config.model_names,
        max_model_len=max_model_len,
        # A request has its own id, the response's and perhaps the client's.
        max_recent=3 * preset.scheduler.max_explanations * len(hellos),
        num_kv_tokens=min(hello.limits.num_blocks * hello.limits.block_size for hello in hellos),
        info=ServerInfo(
            preset=preset.name,
            policy=preset.policy,
            prefix_caching=preset.prefix_caching,
            routing=preset.cluster.routing.name,
            replicas=len(hellos),
            block_size=limits.block_size,
            num_blocks=limits.num_blocks,
            num_host_blocks=limits.num_host_blocks,
            block_swap_s=limits.block_swap_s,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_model_len=max_model_len,
        ),
    )


def _summary(config: ServeConfig, hellos: Sequence[Hello]) -> str:
    """Return what is served, in words."""
    limits = hellos[0].limits
    return (
        f"serves {config.model_names[0]} with {len(hellos)} replica{'s' if len(hellos) > 1 else ''}, "
        f"preset {config.preset.name}, each with {limits.num_blocks} KV blocks of {limits.block_size} tokens, "
        f"max_model_len {min(hello.max_model_len for hello in hellos)}"
    )
