"""Puts the front door together: listener, tenants, backends, and what watches over them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import uvloop
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.types import ASGIApp

from expediter.assembly.door_config import DoorConfig, url_of
from expediter.assembly.file_config import FileConfig, load_file_config
from expediter.assembly.observing import Observing, OwnPoolSeen
from expediter.assembly.renewal import renew_backends
from expediter.control.limits import TenantLimits
from expediter.control.patience import Patience
from expediter.control.retry import RetryBudget
from expediter.control.waiting import QueueConfig
from expediter.gateway.admin import build_admin
from expediter.gateway.backends.registry import Backends
from expediter.gateway.backends.watcher import Watcher
from expediter.gateway.changes import Changes
from expediter.gateway.door.door import MODEL_PATHS, Door
from expediter.gateway.door.drain import Drain
from expediter.gateway.door.pages import Pages, build_app
from expediter.gateway.door.parts import DoorParts
from expediter.gateway.door.waiting_room import WaitingRoom
from expediter.gateway.everywhere import CONTROL, Everywhere, make
from expediter.gateway.explanations import Pool
from expediter.gateway.http.asgi import AsgiApplication
from expediter.gateway.http.listener import Listener
from expediter.gateway.http.wire import HttpLimits
from expediter.gateway.openapi import OPERATIONS, Operation, openapi_route
from expediter.gateway.processes import SharedKnowledge
from expediter.gateway.recent import RecentRequests
from expediter.gateway.reload import FileReload
from expediter.gateway.salts import CacheSalts
from expediter.gateway.server import StopSignals, bind, serve_until_signal
from expediter.gateway.tenants import Tenants
from expediter.runtime.clock import MonotonicClock
from expediter.runtime.supervisor import Supervisor
from expediter.telemetry.exchanges import ExchangeRecord
from expediter.telemetry.gateway_metrics import GatewayMetrics
from expediter.telemetry.process_place import ALONE, ProcessPlace
from expediter.telemetry.shown_backend import ShownBackend

_CHANGES: Final = "changes"
_GC_ALLOCATIONS: Final = 100_000
"""Objects made, less objects gone, before the garbage collector looks at the youngest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPool:
    """Our own replicas as the door sees them: one backend, which is asked in this process.

    Args:
        app: their API. `operations`: what it takes and answers.
        models: names that clients may use for what they serve.
        registry: of their metrics.
        max_requests: that they have at once, running and waiting; more wait in the central queue.
        max_model_len: longest prompt and output together, in tokens.
        ordering: of their queues; that of the central queue, too, unless the file says another.
        recent: which of their requests a client means by a name.
    """

    name: str
    app: Starlette
    operations: Mapping[str, Operation]
    models: Sequence[str]
    supervisor: Supervisor
    registry: CollectorRegistry
    max_requests: int
    max_model_len: int
    ordering: str
    recent: RecentRequests

    def seen(self) -> OwnPoolSeen:
        """Return what can be asked of them."""
        return OwnPoolSeen(name=self.name, entries=Pool(self.recent, self.supervisor), shown=self.supervisor.shown)


class FrontDoor:
    """One process's door; make it inside of the event loop.

    Attributes:
        on_renewed: told the names of the backends that have come or gone with another configuration file.
    """

    def __init__(
        self, config: DoorConfig, tenants: Tenants, drain: Drain, own: OwnPool | None, place: ProcessPlace = ALONE
    ) -> None:
        file, clock = config.file, MonotonicClock()
        self.on_renewed: Callable[[Sequence[str]], None] = lambda _: None
        self._config, self._tenants = config, tenants
        self._weights_at_start = file.weights
        registry = CollectorRegistry() if own is None else own.registry
        self._own = own
        self._limits = limits = TenantLimits(tenants.limits)
        self._clock = clock
        self._sharing = None if place.folder is None else SharedKnowledge(place, limits)
        metrics = GatewayMetrics(registry, self._shown, policy=config.routing_config.name, place=place)
        self.backends = Backends(
            clock=clock,
            routing=config.routing_config,
            health=file.health,
            environment=os.environ,
            events=metrics,
            loads=None if self._sharing is None else self._sharing.loads,
        )
        self._watcher = Watcher(self.backends, clock)
        self._observing = Observing(
            config.observing,
            registry=registry,
            metrics=metrics,
            backends=self.backends,
            own=None if own is None else own.seen(),
            slo_classes=lambda: tenants.book.slo_classes,
            live=self._live,
            ask=self._watcher.fetch_json,
            shows_all=lambda: not tenants.book.has_keys,
            place=place,
        )
        self._room = WaitingRoom(self._queue(file.queue), tenants.weights, clock, metrics)
        self._parts = parts = DoorParts(
            backends=self.backends,
            limits=limits if self._sharing is None else self._sharing.limits,
            room=self._room,
            patience=Patience(file.door.patience),
            retry=file.door.retry,
            budget=RetryBudget(file.door.retry, clock.now()),
            rng=np.random.default_rng(),
            salts=CacheSalts(config.salt_secret),
            own_app=None if own is None else own.app,
            tracer=self._observing.tracer,
        )
        self._take_in()
        self.door = Door(parts, tenants, drain, self._app(drain), metrics, self._observing.records)
        self.listener = Listener(self.door, file.door.http)

    def _take_in(self) -> None:
        """Begin with the backends that flags and file name, and our own replicas."""
        for backend in self._config.all_backends:
            self.backends.add(backend)
        own = self._own
        if own is not None:
            self.backends.add_own(
                own.name,
                own.models,
                lambda: own.supervisor.is_ready,
                up_in_s=own.supervisor.up_in_s,
                max_requests=own.max_requests,
                max_model_len=own.max_model_len,
            )

    def _app(self, drain: Drain) -> ASGIApp:
        """Return what answers all that is not for a model."""
        own, pages = self._own, Pages(self.backends, drain, self._replicas)
        routes = [*self._observing.main.routes(), *pages.routes()]
        described = [*routes, *([] if own is None else own.app.routes)]
        operations = OPERATIONS if own is None else own.operations
        openapi = openapi_route(described, operations, sorted(MODEL_PATHS) if self._config.all_backends else ())
        return build_app([*routes, openapi], None if own is None else own.app)

    def _queue(self, queue: QueueConfig) -> QueueConfig:
        return queue if self._own is None else queue.or_ordering(self._own.ordering)

    def take(self, file: FileConfig) -> list[str]:
        """Put another configuration file in force, all or nothing; return what of it takes a restart.

        Raises:
            ConfigurationError: it cannot be used; nothing has changed.
        """
        before = self._config.file
        config, after_restart = self._config.taking(file)
        book = config.tenant_book()
        names = renew_backends(self.backends, before.backends, file.backends, os.environ)
        self._config = config
        self._tenants.book = book
        self._limits.replace(self._tenants.limits, self._clock.now())
        self._room.rearrange(self._queue(file.queue), self._tenants.weights)
        self.backends.health.judge.configure(file.health)
        self.listener.bound(file.door.http)
        self._parts.patience.configure(file.door.patience)
        self._parts.retry = file.door.retry
        self._parts.budget.configure(file.door.retry)
        self.on_renewed(names)
        if self._own is not None and file.weights != self._weights_at_start:
            after_restart.append("weights of tenants inside our own replicas")
        return after_restart

    def _replicas(self) -> dict[str, str]:
        """Return the state of each replica of our own."""
        states = {} if self._own is None else self._own.supervisor.states
        return {str(number): state.value for number, state in states.items()}

    def _shown(self) -> list[ShownBackend]:
        return self._observing.shown()

    def _live(self, tenant: str, name: str) -> list[ExchangeRecord]:
        return self.door.live(tenant, name)

    async def start(self) -> None:
        """Find out what the backends serve, and begin to look after them."""
        await self._observing.start()
        await self._watcher.start()
        if self._sharing is not None:
            self._sharing.start(self.backends)
        self.door.start()
        _relieve_collector()

    async def stop(self) -> None:
        """Let go of everybody."""
        self.door.stop()
        if self._sharing is not None:
            self._sharing.stop()
        await self._watcher.stop()
        await self._observing.stop()

    def summary(self) -> str:
        """Return what is served, in words."""
        statuses = self.backends.status()
        num_up = sum(status.state == "up" for status in statuses)
        models = ", ".join(self.backends.models) or "no model yet"
        return f"serves {models} with {num_up} of {len(statuses)} backends up"

    def admin(self, key: str, reload: FileReload[FileConfig] | None) -> ASGIApp:
        """Return the admin API; the file is read again by `reload`, if there is one."""
        pages = self._observing.admin.routes()
        return build_admin(self.backends, key=key, reload=None if reload is None else reload.reload, pages=pages)

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
    *,
    admin: socket.socket | None = None,
    place: ProcessPlace = ALONE,
) -> None:
    """Serve on a bound socket until a signal.

    Args:
        admin: bound socket of the admin API, None for none.
        place: among several processes.
    Raises:
        ConfigurationError: a backend's key is not set, or its name is taken.
    """
    front = FrontDoor(config, tenants, drain, own, place)
    path = config.file.path
    reload = None if path is None else FileReload(path, lambda: load_file_config(path), front.take)
    async with _background(reload), _admin_listeners(front, config.admin_key, reload, admin, place):
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
async def _background(reload: FileReload[FileConfig] | None) -> AsyncIterator[None]:
    """Watch the configuration file, if there is one."""
    tasks = [] if reload is None else [asyncio.create_task(reload.run())]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def _admin_listeners(
    front: FrontDoor,
    key: str,
    reload: FileReload[FileConfig] | None,
    admin: socket.socket | None,
    place: ProcessPlace,
) -> AsyncIterator[None]:
    """Serve the admin API: to the operator, and to the other processes of ours."""
    listeners: list[Listener] = []
    path = place.own(CONTROL)
    if path is not None:
        path.unlink(missing_ok=True)  # of a predecessor that was killed
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(str(path))
        inner = front.admin("", reload)
        listeners.append(await _listening(inner, sock))
        changes = Changes(path.with_name(_CHANGES))
        await make(changes, inner)
    if admin is not None:
        app = front.admin(key, reload)
        if path is not None:
            app = Everywhere(app, place.others(CONTROL), changes)
            front.on_renewed = changes.settled
        listeners.append(await _listening(app, admin))
    try:
        yield
    finally:
        for listener in listeners:
            await listener.stop(0.0)


async def _listening(app: ASGIApp, sock: socket.socket) -> Listener:
    listener = Listener(AsgiApplication(app), HttpLimits())
    await listener.start(sock)
    return listener


def serve_backends(config: DoorConfig, announce: Callable[[str], None]) -> None:
    """Serve backends alone from this process until a signal; returns after a clean shutdown.

    Args:
        announce: told in a line when the server is ready.
    Raises:
        ConfigurationError: it cannot start.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve_backends(config, announce))


async def _serve_backends(config: DoorConfig, announce: Callable[[str], None]) -> None:
    tenants = Tenants(config.tenant_book())
    with bind(config.host, config.port) as sock, bind_admin(config) as admin, StopSignals() as signals:

        def tell(front: FrontDoor) -> None:
            announce(ready_line(config, sock, admin, f"{front.summary()}, routing {config.routing_config.name}"))

        await run_door(config, tenants, Drain(), None, sock, signals, tell, admin=admin)


def bind_admin(config: DoorConfig) -> contextlib.AbstractContextManager[socket.socket | None]:
    """Take the admin listener's address, if there is to be one."""
    return contextlib.nullcontext() if config.admin_port is None else bind(config.admin_host, config.admin_port)


def ready_line(config: DoorConfig, sock: socket.socket, admin: socket.socket | None, what: str) -> str:
    """Return what is announced: where what is served, and where the admin API is."""
    line = f"ready: {url_of(config.host, sock.getsockname()[1])} {what}"
    return line if admin is None else f"{line}, admin: {url_of(config.admin_host, admin.getsockname()[1])}"


def _relieve_collector() -> None:
    """Let the garbage collector look less often, and not at what stays: a forwarded request leaves no cycles behind.

    With the usual thresholds it takes a quarter of the time of a forwarded request.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_ALLOCATIONS, 50, 50)
