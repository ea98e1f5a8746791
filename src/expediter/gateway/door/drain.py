"""Whether the server takes new work, and how much of it is open."""

from __future__ import annotations

import asyncio


class Drain:
    """Shared by the door, which counts, and the server, which waits.

    Attributes:
        is_draining: no new work is taken.
        retry_after_s: what clients are told then: how long a server in its place takes to start.
        num_open: requests that may cause work and whose responses have not ended.
    """

    def __init__(self, retry_after_s: float = 1.0) -> None:
        self.is_draining = False
        self.retry_after_s = retry_after_s
        self.num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> None:
        """Count a request in."""
        self.num_open += 1
        self._idle.clear()

    def leave(self) -> None:
        """Count a request out."""
        self.num_open -= 1
        if not self.num_open:
            self._idle.set()

    async def until_idle(self) -> None:
        """Return once nothing is open."""
        await self._idle.wait()
