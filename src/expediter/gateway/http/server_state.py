"""What the connections of one listener share, and what the listener asks of them."""

from __future__ import annotations

import asyncio
from typing import Protocol

from expediter.gateway.http.reply import Application
from expediter.gateway.http.wire import HttpLimits


class OpenConnection(Protocol):
    """A client's connection."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is read or answered."""
        ...

    def sweep(self, now_s: float) -> None:
        """Close the connection if its time is up."""

    def close(self) -> None:
        """Close once everything that was written has gone out."""

    def abort(self) -> None:
        """Close at once, whatever has not gone out."""


class ServerState:
    """What the connections of one listener share.

    Attributes:
        connections: open ones.
        buffered_bytes: of request bodies that are not complete yet.
        is_closing: connections close behind the response that they are at.
        date_header: of now.
    """

    def __init__(self, app: Application, limits: HttpLimits) -> None:
        self.app = app
        self.limits = limits
        self.connections: set[OpenConnection] = set()
        self.buffered_bytes = 0
        self.is_closing = False
        self.date_header = b""
        self._nobody_left: asyncio.Event | None = None

    def left(self, connection: OpenConnection) -> None:
        """Forget a connection that is closed."""
        self.connections.discard(connection)
        if self._nobody_left is not None and not self.connections:
            self._nobody_left.set()

    async def until_nobody_is_left(self) -> None:
        """Return once all connections are closed."""
        self._nobody_left = asyncio.Event()
        if self.connections:
            await self._nobody_left.wait()
