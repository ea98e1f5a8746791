"""Reads a configuration file again while the server runs: at SIGHUP, and when it has changed."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar

from expediter.core.errors import ConfigurationError

logger = logging.getLogger(__name__)

_LOOK_EVERY_S: Final = 1.0

Loaded = TypeVar("Loaded")


class Reloaded(NamedTuple):
    """What came of reading the file again.

    Attributes:
        error: why nothing has changed; None if the file is in force.
        after_restart: what of it is not, until the server starts again.
    """

    error: str | None = None
    after_restart: Sequence[str] = ()


class FileReload(Generic[Loaded]):
    """Keeps the server as the file has it. A file that cannot be used changes nothing, and the log says why.

    Args:
        path: of the file.
        load: reads it, in a thread.
        put: puts what was read in force, all or nothing, and returns what of it takes a restart. Either raises
            `ConfigurationError` if it cannot be used.
    """

    def __init__(self, path: Path, load: Callable[[], Loaded], put: Callable[[Loaded], Sequence[str]]) -> None:
        self._path = path
        self._load = load
        self._put = put
        self._seen = self._signature()
        self._wake = asyncio.Event()

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

    async def reload(self) -> Reloaded:
        """Read the file now."""
        try:
            after_restart = self._put(await asyncio.to_thread(self._load))
        except ConfigurationError as error:
            logger.error("the configuration stays as it was: %s", error)
            return Reloaded(str(error))
        logger.info("the configuration was read again")
        for what in after_restart:
            logger.warning("%s: what the file says now takes a restart", what)
        return Reloaded(after_restart=after_restart)

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
