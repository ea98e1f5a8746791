"""One incarnation of a replica's process, as the gateway holds it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Final, TypeVar

import msgspec

from expediter.runtime.frames import (
    FrameSplitter,
    GatewayFrame,
    ReplicaFrame,
    decode_replica_frame,
    encode_frame,
)
from expediter.runtime.spec import ReplicaSpec, encode_spec

_READ_BYTES: Final = 1 << 18
_TERMINATE_S: Final = 5.0

Result = TypeVar("Result")


async def to_its_end(work: Coroutine[object, object, Result]) -> Result:
    """Await `work` even if the caller is cancelled meanwhile; the cancellation then goes on afterwards.

    `asyncio.shield` alone would leave the work behind, and a child process unreaped when the loop closes.
    """
    task = asyncio.ensure_future(work)
    is_cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled and not task.cancelled() and task.exception() is None:
        raise asyncio.CancelledError
    return task.result()


class ReplicaProcess:
    """A child process and the gateway's end of the socket pair to it. Made by `start`, always ended by `end`.

    The socket pair has no name anywhere, so nobody but the child can speak on it, and nothing has to be cleaned up.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, command: Sequence[str], spec: ReplicaSpec) -> ReplicaProcess:
        """Spawn `command`, which reads the spec from its standard input."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.PIPE,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # a terminal's Ctrl-C is for the gateway, which drains before it ends us
                )
            except BaseException:
                ours.close()
                raise
            spec = msgspec.structs.replace(spec, socket_fd=theirs.fileno(), parent_pid=os.getpid())
        assert process.stdin is not None
        process.stdin.write(encode_spec(spec))
        process.stdin.close()  # a child that died already shows as end of file on the socket
        try:
            reader, writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            ours.close()
            process.kill()
            await to_its_end(process.wait())
            raise
        return cls(process, reader, writer)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.returncode

    async def frames(self) -> AsyncIterator[ReplicaFrame]:
        """Yield what the replica sends until it closes its end.

        Raises:
            ReplicaError: it sent something malformed.
        """
        splitter = FrameSplitter()
        while True:
            try:
                data = await self._reader.read(_READ_BYTES)
            except OSError:
                return
            if not data:
                return
            for body in splitter.feed(data):
                yield decode_replica_frame(body)

    def send(self, frame: GatewayFrame) -> None:
        """Queue a frame; one that can no longer arrive is dropped, since the end of the process is noticed anyway."""
        if not self._writer.is_closing():
            self._writer.write(encode_frame(frame))

    def kill(self) -> None:
        """End the process at once; `frames` then ends."""
        if self._process.returncode is None:
            self._process.kill()

    async def end(self, grace_s: float = _TERMINATE_S) -> int:
        """Close the socket, ask the process to end, kill it after the grace; return its exit code."""
        self._writer.close()
        if self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), grace_s)
            except TimeoutError:
                self.kill()
        return await self._process.wait()
