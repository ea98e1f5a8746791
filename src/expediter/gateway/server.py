"""Serves until a signal, then drains: finishes what is in flight, or ends it at a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from expediter.core.errors import ConfigurationError
from expediter.gateway.door.drain import Drain
from expediter.gateway.http.listener import Listener

logger = logging.getLogger(__name__)

_FLUSH_S: Final = 1.0
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class InFlight(Protocol):
    """Whoever works on requests."""

    def drain(self) -> None:
        """Take no new ones; those in flight go on."""

    def fail_in_flight(self) -> None:
        """End those in flight with an error now."""


def bind(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """Take an address without listening on it yet; port 0 lets the system choose.

    Args:
        is_shared: other processes of ours take it, too; the system spreads connections over them.
    Raises:
        ConfigurationError: the address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if is_shared:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sock.bind(address)
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return sock


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
    listener: Listener,
    sock: socket.socket,
    in_flight: InFlight,
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
    await listener.start(sock)
    on_listening()
    await signals.first.wait()
    await _drain(in_flight, drain, signals.second, shutdown_timeout_s)
    await listener.stop(0.0 if signals.second.is_set() else _FLUSH_S)


async def _drain(in_flight: InFlight, drain: Drain, hurry: asyncio.Event, timeout_s: float) -> None:
    logger.info("shutting down: %d requests open, %g s to finish them", drain.num_open, timeout_s)
    drain.is_draining = True
    in_flight.drain()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await first_of(drain.until_idle(), hurry.wait())
    if drain.num_open:
        logger.warning("ending %d requests that did not finish in time", drain.num_open)
        in_flight.fail_in_flight()
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
