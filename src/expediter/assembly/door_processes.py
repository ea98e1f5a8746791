"""Several processes with one door each, on one port: starts them, starts again who dies, and stops them all."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import uvloop

from expediter.assembly.door import bind_admin, ready_line
from expediter.assembly.door_config import DoorConfig
from expediter.assembly.file_config import FileConfig, load_file_config
from expediter.core.errors import ConfigurationError
from expediter.gateway.reload import FileReload
from expediter.gateway.server import StopSignals, bind, first_of
from expediter.telemetry.process_place import ProcessPlace

logger = logging.getLogger(__name__)

DOOR_COMMAND: Final = (sys.executable, "-m", "expediter.assembly.door_process")
READY: Final = b"ready "
"""What a process says on its standard output once it listens, with what there is to announce behind it."""
_MIN_BACKOFF_S: Final = 0.25
_MAX_BACKOFF_S: Final = 10.0
_STABLE_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What a process is told on its standard input, which stays open as long as its parent lives.

    Args:
        listen_fd, admin_fd: bound sockets that it inherits.
    """

    config: DoorConfig
    place: ProcessPlace
    listen_fd: int
    admin_fd: int | None


def encode_assignment(assignment: Assignment) -> bytes:
    """Return an assignment as one line."""
    raw = msgspec.msgpack.encode(assignment, enc_hook=_encode_path)
    return raw.hex().encode("ascii") + b"\n"


def decode_assignment(line: bytes) -> Assignment:
    """Return what `encode_assignment` has written."""
    return msgspec.msgpack.decode(bytes.fromhex(line.decode("ascii")), type=Assignment, dec_hook=_decode_path)


def _encode_path(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(type(value).__name__)


def _decode_path(kind: type, value: object) -> Path:
    if issubclass(kind, Path):
        return Path(str(value))
    raise NotImplementedError(kind.__name__)


def serve_in_processes(
    config: DoorConfig, announce: Callable[[str], None], *, command: Sequence[str] = DOOR_COMMAND
) -> None:
    """Serve backends from `config.num_processes` processes until a signal; returns after a clean shutdown.

    Args:
        announce: told in a line when all of them listen.
        command: argv of such a process.
    Raises:
        ConfigurationError: they cannot start.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config, announce, command))


class _Newest:
    """What a process is told when it is started, for the first time or again.

    Attributes:
        config: with what the file said when it could last be used.
    """

    def __init__(self, config: DoorConfig) -> None:
        self.config = config

    async def watch(self, processes: Sequence[_Process]) -> None:
        """Read the file when it has changed or somebody asks for it by SIGHUP, and have all do so, until cancelled."""
        path = self.config.file.path
        if path is None:
            return

        def take(file: FileConfig) -> list[str]:
            config, after_restart = self.config.taking(file)
            config.tenant_book()
            self.config = config
            for process in processes:
                process.hang_up()
            return after_restart

        await FileReload(path, lambda: load_file_config(path), take).run()


async def _serve(config: DoorConfig, announce: Callable[[str], None], command: Sequence[str]) -> None:
    config.tenant_book()  # what is wrong in it is said once, and before anything starts
    newest = _Newest(config)
    with contextlib.ExitStack() as stack, StopSignals() as signals:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="expediter-")))
        first = stack.enter_context(bind(config.host, config.port, is_shared=True))
        port = first.getsockname()[1]
        others = [stack.enter_context(bind(config.host, port, is_shared=True)) for _ in range(config.num_processes - 1)]
        admin = stack.enter_context(bind_admin(config))
        processes = [
            _Process(newest, ProcessPlace(folder, slot, config.num_processes), sock, admin, command)
            for slot, sock in enumerate([first, *others])
        ]
        tasks = [asyncio.create_task(process.keep_running()) for process in processes]
        watching = asyncio.create_task(newest.watch(processes))
        try:
            await first_of(*(asyncio.shield(task) for task in tasks), signals.first.wait(), _all_ready(processes))
            if all(process.is_ready.is_set() for process in processes):
                announce(ready_line(config, first, admin, f"{processes[0].announced}, {len(processes)} processes"))
                await first_of(*(asyncio.shield(task) for task in tasks), signals.first.wait())
            await _stop(processes, tasks, signals, [first, *others])
        finally:
            for process in processes:
                process.kill()
            for task in (*tasks, watching):
                task.cancel()
            await asyncio.gather(*tasks, watching, return_exceptions=True)
        if not signals.first.is_set():
            raise ConfigurationError("a gateway process could not start; its messages are above")


async def _all_ready(processes: Sequence[_Process]) -> None:
    for process in processes:
        await process.is_ready.wait()


async def _stop(
    processes: Sequence[_Process],
    tasks: Sequence[asyncio.Task[None]],
    signals: StopSignals,
    socks: Sequence[socket.socket],
) -> None:
    for sock in socks:
        sock.close()  # a process that has ended must leave nobody listening
    for process in processes:
        process.stop()
    ended = asyncio.gather(*tasks, return_exceptions=True)
    await first_of(asyncio.shield(ended), signals.second.wait())
    if not ended.done():
        for process in processes:
            process.stop()
    await ended


class _Process:
    """One of them, started again when it dies; one that dies before it was ever ready ends the whole."""

    def __init__(
        self,
        newest: _Newest,
        place: ProcessPlace,
        sock: socket.socket,
        admin: socket.socket | None,
        command: Sequence[str],
    ) -> None:
        self._newest = newest
        self._place = place
        self._listen_fd = sock.fileno()
        self._admin_fd = admin.fileno() if admin is not None and place.slot == 0 else None
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self._is_stopping = False
        self._is_listening = False
        self.is_ready = asyncio.Event()
        self.announced = ""

    async def keep_running(self) -> None:
        """Run it until it is stopped, or cannot start."""
        num_deaths = 0
        loop = asyncio.get_running_loop()
        while True:
            started_s = loop.time()
            code = await self._run()
            if self._is_stopping or not self.is_ready.is_set():
                return
            logger.error("gateway process %d ended with exit code %d", self._place.slot, code)
            num_deaths = 0 if loop.time() - started_s > _STABLE_S else num_deaths + 1
            await asyncio.sleep(min(_MAX_BACKOFF_S, _MIN_BACKOFF_S * 2.0 ** min(num_deaths, 16)))

    def stop(self) -> None:
        """Ask it to end; a second time, to do so at once."""
        self._is_stopping = True
        self._signal(signal.SIGTERM)

    def hang_up(self) -> None:
        """Have it read the file again."""
        if self._is_listening:  # before that, the signal would end it
            self._signal(signal.SIGHUP)

    def kill(self) -> None:
        """End it now."""
        self._is_stopping = True
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _run(self) -> int:
        assignment = Assignment(
            config=self._newest.config, place=self._place, listen_fd=self._listen_fd, admin_fd=self._admin_fd
        )
        fds = [fd for fd in (assignment.listen_fd, assignment.admin_fd) if fd is not None]
        # A session of its own: a terminal's Ctrl-C reaches the parent, which passes it on.
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=fds,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(ConnectionError):
            process.stdin.write(encode_assignment(assignment))
            await process.stdin.drain()
            line = await process.stdout.readline()
            if line.startswith(READY):
                self.announced = line[len(READY) :].decode().strip()
                self.is_ready.set()
                self._is_listening = True
        code = await process.wait()
        self._is_listening = False
        return code
