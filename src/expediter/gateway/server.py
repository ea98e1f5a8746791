"""Serves the application until a signal, then drains: finishes what is in flight, or ends it at a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from expediter.core.errors import ConfigurationError
from expediter.gateway.middleware import Drain
from expediter.runtime.supervisor import Supervisor

logger = logging.getLogger(__name__)

KEEP_ALIVE_S: Final = 120
"""Longer than the pools of usual proxies and clients keep idle connections: they should close first, never we."""
_FLUSH_S: Final = 1.0
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class HttpServer(uvicorn.Server):
    """Uvicorn without its own signal handling, which would stop listening at once and could not drain."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """Take an address without listening on it yet; port 0 lets the system choose.

    Raises:
        ConfigurationError: the address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return sock


def make_http_server(app: ASGIApp) -> HttpServer:
    """Return a server for the application."""
    return HttpServer(
        uvicorn.Config(
            app,
            loop="none",
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(_FLUSH_S) + 1,
        )
    )


class StopSignals:
    """Context manager: SIGTERM and SIGINT, counted. The first asks for a clean end, the second for a fast one."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def __enter__(self) -> StopSignals:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)

    def _receive(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def serve_until_signal(
    server: HttpServer,
    sock: socket.socket,
    supervisor: Supervisor,
    drain: Drain,
    signals: StopSignals,
    *,
    shutdown_timeout_s: float,
    on_listening: Callable[[], None],
) -> None:
    """Listen; at the first signal drain and return. The second ends the drain at once.

    While draining, /health answers 200 and /ready 503, new work gets 503, and work in flight goes on until
    `shutdown_timeout_s` has passed; what is left then ends with an error event.

    Args:
        sock: bound address; it is closed at the end.
        on_listening: called once connections are accepted.
    """
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    await first_of(server.listening.wait(), asyncio.shield(serving))
    if not serving.done():
        on_listening()
        await first_of(signals.first.wait(), asyncio.shield(serving))
    if not serving.done():
        await _drain(supervisor, drain, signals.second, shutdown_timeout_s)
        server.should_exit = True
        server.force_exit = signals.second.is_set()
    await serving


async def _drain(supervisor: Supervisor, drain: Drain, hurry: asyncio.Event, timeout_s: float) -> None:
    logger.info("shutting down: %d requests open, %g s to finish them", drain.num_open, timeout_s)
    drain.is_draining = True
    supervisor.drain()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await first_of(drain.until_idle(), hurry.wait())
    if drain.num_open:
        logger.warning("ending %d requests that did not finish in time", drain.num_open)
        supervisor.fail_in_flight()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_S):
                await drain.until_idle()


async def first_of(*waits: Awaitable[object]) -> None:
    """Return when the first has ended; cancel the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
