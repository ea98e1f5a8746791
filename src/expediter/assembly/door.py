"""Puts the front door together: listener, tenants, backends, and what watches over them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import uvloop
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from expediter.assembly.file_config import FileConfig, load_file_config
from expediter.assembly.observing import Observing, ObservingConfig, OwnPoolSeen
from expediter.control.limits import TenantLimits
from expediter.control.retry import RetryBudget
from expediter.control.routing.build import RoutingConfig
from expediter.core.errors import ConfigurationError
from expediter.gateway.backends.config import BackendConfig
from expediter.gateway.backends.registry import DEFAULT_ROUTING, Backends
from expediter.gateway.backends.watcher import Watcher
from expediter.gateway.door.door import Door
from expediter.gateway.door.drain import Drain
from expediter.gateway.door.pages import Pages, build_app
from expediter.gateway.door.parts import DoorParts
from expediter.gateway.door.patience import Patience
from expediter.gateway.door.waiting_room import WaitingRoom
from expediter.gateway.explanations import Pool
from expediter.gateway.http.listener import Listener
from expediter.gateway.recent import RecentRequests
from expediter.gateway.reload import TenantReload
from expediter.gateway.server import StopSignals, bind, serve_until_signal
from expediter.gateway.tenants import TenantBook, Tenants
from expediter.runtime.clock import MonotonicClock
from expediter.runtime.supervisor import Supervisor
from expediter.telemetry.exchanges import ExchangeRecord
from expediter.telemetry.gateway_metrics import GatewayMetrics
from expediter.telemetry.process_place import ALONE
from expediter.telemetry.shown_backend import ShownBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorConfig:
    """A server's front door.

    Args:
        backends: beside those in `file`; none in either: only our own replicas.
        routing: among backends.
        api_keys: keys of the default tenant; none here and none in `file`: everybody may come in.
        file: SLO classes, backends, limits, and tenants, which are read again when they change.
        shutdown_timeout_s: for requests in flight at the first signal.
        observing: what is written of requests.
    Raises:
        ConfigurationError: a value is out of range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    backends: tuple[BackendConfig, ...] = ()
    routing: RoutingConfig = DEFAULT_ROUTING
    api_keys: tuple[str, ...] = ()
    file: FileConfig = field(default_factory=FileConfig)
    shutdown_timeout_s: float = 30.0
    observing: ObservingConfig = field(default_factory=ObservingConfig)

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise ConfigurationError(f"port must lie in [0, 65535], not {self.port}")
        if not self.shutdown_timeout_s >= 0:
            raise ConfigurationError("shutdown_timeout_s must not be negative")
        if not all(self.api_keys):
            raise ConfigurationError("an API key must not be empty")

    @property
    def all_backends(self) -> tuple[BackendConfig, ...]:
        return (*self.backends, *self.file.backends)

    def tenant_book(self) -> TenantBook:
        """Return who may come in."""
        return self.file.tenant_book(self.api_keys, os.environ)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPool:
    """Our own replicas as the door sees them: one backend, which is asked in this process.

    Args:
        app: their API.
        models: names that clients may use for what they serve.
        registry: of their metrics.
        max_requests: that they have at once, running and waiting; more wait in the central queue.
        ordering: of their queues; that of the central queue, too, unless the file says another.
        recent: which of their requests a client means by a name.
    """

    name: str
    app: Starlette
    models: Sequence[str]
    supervisor: Supervisor
    registry: CollectorRegistry
    max_requests: int
    ordering: str
    recent: RecentRequests

    def seen(self) -> OwnPoolSeen:
        """Return what can be asked of them."""
        return OwnPoolSeen(name=self.name, entries=Pool(self.recent, self.supervisor), shown=self.supervisor.shown)


class FrontDoor:
    """One process's door; make it inside of the event loop."""

    def __init__(self, config: DoorConfig, tenants: Tenants, drain: Drain, own: OwnPool | None) -> None:
        file, clock = config.file, MonotonicClock()
        registry = CollectorRegistry() if own is None else own.registry
        self._own = own
        metrics = GatewayMetrics(registry, self._shown, policy=config.routing.name, place=ALONE)
        self.backends = Backends(clock=clock, routing=config.routing, environment=os.environ, events=metrics)
        self._watcher = Watcher(self.backends, clock)
        self._observing = Observing(
            config.observing,
            registry=registry,
            metrics=metrics,
            backends=self.backends,
            own=None if own is None else own.seen(),
            slo_classes=file.slo_classes,
            live=self._live,
            ask=self._watcher.fetch_json,
            shows_all=lambda: not tenants.book.has_keys,
            place=ALONE,
        )
        limits = TenantLimits(tenants.limits)
        queue = file.queue if own is None else file.queue.or_ordering(own.ordering)
        room = WaitingRoom(queue, tenants.weights, clock, metrics)
        self.door_parts = DoorParts(
            backends=self.backends,
            limits=limits,
            room=room,
            patience=Patience(file.door.patience),
            retry=file.door.retry,
            budget=RetryBudget(file.door.retry, clock.now()),
            rng=np.random.default_rng(),
            own_app=None if own is None else own.app,
            tracer=self._observing.tracer,
        )
        for backend in config.all_backends:
            self.backends.add(backend)
        if own is not None:
            self.backends.add_own(
                own.name,
                own.models,
                lambda: own.supervisor.is_ready,
                up_in_s=own.supervisor.up_in_s,
                max_requests=own.max_requests,
            )
        pages = [] if own is not None and not config.all_backends else Pages(self.backends, drain).routes()
        app = build_app([*self._observing.main.routes(), *pages], None if own is None else own.app)
        self.door = Door(self.door_parts, tenants, drain, app, metrics, self._observing.sinks)
        self.listener = Listener(self.door, file.door.http)

        def tenants_changed(_: TenantBook) -> None:
            limits.replace(tenants.limits, clock.now())
            room.reweigh(tenants.weights)

        tenants.on_change(tenants_changed)

    def _shown(self) -> list[ShownBackend]:
        return self._observing.shown()

    def _live(self, tenant: str, name: str) -> list[ExchangeRecord]:
        return self.door.live(tenant, name)

    async def start(self) -> None:
        """Find out what the backends serve, and begin to look after them."""
        await self._observing.start()
        await self._watcher.start()
        self.door.start()

    async def stop(self) -> None:
        """Let go of everybody."""
        self.door.stop()
        await self._watcher.stop()
        await self._observing.stop()

    def drain(self) -> None:
        """Take no new requests; those in flight go on."""
        if self._own is not None:
            self._own.supervisor.drain()

    def fail_in_flight(self) -> None:
        """End those in flight with an error now."""
        self.door.end_exchanges()
        if self._own is not None:
            self._own.supervisor.fail_in_flight()


async def run_door(
    config: DoorConfig,
    tenants: Tenants,
    drain: Drain,
    own: OwnPool | None,
    sock: socket.socket,
    signals: StopSignals,
    on_listening: Callable[[FrontDoor], None],
) -> None:
    """Serve on a bound socket until a signal.

    Raises:
        ConfigurationError: a backend's key is not set, or its name is taken.
    """
    front = FrontDoor(config, tenants, drain, own)
    async with _reloading(config, tenants):
        try:
            await front.start()
            await serve_until_signal(
                front.listener,
                sock,
                front,
                drain,
                signals,
                shutdown_timeout_s=config.shutdown_timeout_s,
                on_listening=lambda: on_listening(front),
            )
        finally:
            await front.stop()


@contextlib.asynccontextmanager
async def _reloading(config: DoorConfig, tenants: Tenants) -> AsyncIterator[None]:
    """Watch the configuration file, if there is one."""
    path, tasks = config.file.path, []
    if path is not None:
        reload = TenantReload(path, lambda: replace(config, file=load_file_config(path)).tenant_book(), tenants)
        tasks.append(asyncio.create_task(reload.run()))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def serve_backends(config: DoorConfig, announce: Callable[[str], None]) -> None:
    """Serve backends alone until a signal; returns after a clean shutdown.

    Args:
        announce: told in a line when the server is ready.
    Raises:
        ConfigurationError: it cannot start.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve_backends(config, announce))


async def _serve_backends(config: DoorConfig, announce: Callable[[str], None]) -> None:
    tenants = Tenants(config.tenant_book())
    with bind(config.host, config.port) as sock, StopSignals() as signals:
        port = sock.getsockname()[1]

        def tell(front: FrontDoor) -> None:
            statuses = front.backends.status()
            num_up = sum(status.state == "up" for status in statuses)
            models = ", ".join(front.backends.models) or "no model yet"
            announce(
                f"ready: {url_of(config.host, port)} serves {models} with {num_up} of {len(statuses)} backends up, "
                f"routing {config.routing.name}"
            )

        await run_door(config, tenants, Drain(), None, sock, signals, tell)


def url_of(host: str, port: int) -> str:
    """Return the address as a URL."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
