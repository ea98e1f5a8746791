"""Accepts connections on a socket, watches their deadlines, and closes them in the end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from email.utils import formatdate
from typing import Final

from expediter.gateway.http.protocol import HttpConnection
from expediter.gateway.http.reply import Application
from expediter.gateway.http.server_state import ServerState
from expediter.gateway.http.wire import HttpLimits

_SWEEP_S: Final = 0.25
_BACKLOG: Final = 2048


class Listener:
    """Answers the requests of all connections to a socket by an application."""

    def __init__(self, app: Application, limits: HttpLimits) -> None:
        self._state = ServerState(app, limits)
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    def bound(self, limits: HttpLimits) -> None:
        """Put other limits in force, for connections that come from now on."""
        self._state.limits = limits

    async def start(self, sock: socket.socket) -> None:
        """Listen on a bound socket, which is closed at the end."""
        self._sweep()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: HttpConnection(self._state), sock=sock, backlog=_BACKLOG)

    async def stop(self, timeout_s: float) -> None:
        """Stop listening; let responses in progress go out for so long, then close what is left."""
        state = self._state
        state.is_closing = True
        if self._server is not None:
            self._server.close()
        for connection in tuple(state.connections):
            if connection.is_idle:
                connection.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await state.until_nobody_is_left()
        for connection in tuple(state.connections):
            connection.abort()
        if self._sweeper is not None:
            self._sweeper.cancel()

    @property
    def num_connections(self) -> int:
        """Open connections."""
        return len(self._state.connections)

    def _sweep(self) -> None:
        now_s = time.monotonic()
        self._state.date_header = f"date: {formatdate(usegmt=True)}\r\n".encode("ascii")
        for connection in tuple(self._state.connections):
            connection.sweep(now_s)
        self._sweeper = asyncio.get_running_loop().call_later(_SWEEP_S, self._sweep)
