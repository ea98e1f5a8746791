"""Reads a configuration file again while the server runs: at SIGHUP, and when it has changed."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final

from expediter.core.errors import ConfigurationError
from expediter.gateway.tenants import TenantBook, Tenants

logger = logging.getLogger(__name__)

_LOOK_EVERY_S: Final = 1.0


class TenantReload:
    """Keeps the tenants as the file has them. A file that cannot be used changes nothing, and the log says why.

    SLO classes come along with them. The rest of the file is read at the start only.

    Args:
        path: of the file.
        load: reads it; raises `ConfigurationError` if it cannot be used.
    Attributes:
        error: why the file as it is now is not in force; None if it is.
    """

    def __init__(self, path: Path, load: Callable[[], TenantBook], tenants: Tenants) -> None:
        self._path = path
        self._load = load
        self._tenants = tenants
        self._seen = self._signature()
        self._wake = asyncio.Event()
        self.error: str | None = None

    async def run(self) -> None:
        """Watch until cancelled."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._wake.set)
        try:
            while True:
                await self._until_due()
                self._seen = await asyncio.to_thread(self._signature)
                await self.reload()
        finally:
            loop.remove_signal_handler(signal.SIGHUP)

    async def reload(self) -> None:
        """Read the file now."""
        try:
            book = await asyncio.to_thread(self._load)
        except ConfigurationError as error:
            self.error = str(error)
            logger.error("tenants stay as they were: %s", error)
            return
        self.error = None
        self._tenants.replace(book)
        logger.info("tenants read again: %s", ", ".join(tenant.title for tenant in book.tenants.values()))

    async def _until_due(self) -> None:
        """Return at a signal, or when the file is another than it was."""
        while True:
            try:
                await asyncio.wait_for(self._wake.wait(), _LOOK_EVERY_S)
            except TimeoutError:
                if await asyncio.to_thread(self._signature) != self._seen:
                    return
            else:
                self._wake.clear()
                return

    def _signature(self) -> tuple[int, ...] | None:
        """Return what changes when the file does, also when another takes its place; None if there is none."""
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
