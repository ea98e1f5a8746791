"""The replica's side of the socket: a reader thread fills the inbox, the main thread runs the loop.

A replica never outlives its gateway: end of file on the socket ends the loop, a watchdog ends a loop that is stuck in
a step, and on Linux the kernel kills the replica when the gateway's process is gone.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Final, NamedTuple, Protocol

from expediter.core.errors import ExpediterError, ReplicaError
from expediter.core.events import Event
from expediter.core.explanation import Span
from expediter.core.ports import Clock, Executor
from expediter.runtime.clock import MonotonicClock
from expediter.runtime.frames import (
    AbortFrame,
    DrainFrame,
    ExplainFrame,
    ExplanationFrame,
    Failed,
    FrameSplitter,
    GatewayFrame,
    Heartbeat,
    Hello,
    ReplicaFrame,
    ResumeFrame,
    Stats,
    decode_gateway_frame,
    encode_frame,
)
from expediter.runtime.loop import Abort, Command, Drain, Explain, ReplicaLoop, Resume, SchedulerPort, StepRecord
from expediter.runtime.parent import die_with_parent
from expediter.runtime.preparation import Arrival, Prepared, PreparingInbox
from expediter.runtime.request_frames import requests_of, resumed_of
from expediter.runtime.spec import ReplicaSpec, decode_spec
from expediter.runtime.step_frames import step_frame
from expediter.scheduling.knowledge import Knowledge

HEARTBEAT_S: Final = 0.5
_RECEIVE_BYTES: Final = 1 << 16
_STUCK_EXIT_S: Final = 3.0

logger = logging.getLogger(__name__)


class KVGauges(Protocol):
    """Sizes of the scheduler's KV cache, in blocks."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_used_blocks(self) -> int: ...

    @property
    def num_cached_blocks(self) -> int: ...


class MeasuredScheduler(SchedulerPort, Protocol):
    """A scheduler that also tells its gauges."""

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_pending_tokens(self) -> int: ...

    @property
    def num_waiting_by_reason(self) -> dict[str, int]: ...

    @property
    def kv(self) -> KVGauges: ...

    @property
    def knowledge(self) -> Knowledge: ...


class BuiltReplica(NamedTuple):
    """What a spec became. `max_model_len` is the scheduler's, in tokens."""

    scheduler: MeasuredScheduler
    executor: Executor
    max_model_len: int


class SocketInbox:
    """Commands from the gateway, read by a thread of its own."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._commands: queue.SimpleQueue[Arrival | None] = queue.SimpleQueue()
        self._closed = False
        self._next: list[Arrival] = []
        self._loop_ended = threading.Event()

    @property
    def closed(self) -> bool:
        """Whether the gateway is gone, as far as `take` and `wait` have seen."""
        return self._closed

    def start(self) -> None:
        threading.Thread(target=self._read, name="inbox", daemon=True).start()

    def put(self, arrival: Prepared) -> None:
        """Have `take` return something that one of our own threads says."""
        self._commands.put(arrival)

    def take(self) -> Sequence[Arrival]:
        while True:
            try:
                self._put_next(self._commands.get_nowait())
            except queue.Empty:
                taken, self._next = self._next, []
                return taken

    def wait(self, timeout_s: float) -> None:
        """Return as soon as there is something to take, or after the timeout."""
        try:
            self._put_next(self._commands.get(timeout=timeout_s))
        except queue.Empty:
            return

    def finish(self) -> None:
        """Tell the watchdog that the loop has ended by itself."""
        self._loop_ended.set()

    def _put_next(self, arrival: Arrival | None) -> None:
        if arrival is None:
            self._closed = True
        else:
            self._next.append(arrival)

    def _read(self) -> None:
        splitter = FrameSplitter()
        try:
            while data := self._sock.recv(_RECEIVE_BYTES):
                for body in splitter.feed(data):
                    self._commands.put(_command_of(decode_gateway_frame(body)))
        except ConnectionError:
            logger.info("the gateway is gone")
        except (OSError, ReplicaError):
            logger.exception("the gateway's socket is unusable")
        self._commands.put(None)
        if not self._loop_ended.wait(_STUCK_EXIT_S):
            os._exit(1)  # the loop is stuck in a step that nobody waits for any more


def _command_of(frame: GatewayFrame) -> Command:
    match frame:
        case ResumeFrame():
            return Resume(*resumed_of(frame))
        case AbortFrame():
            return Abort(frame.request_id, frame.reason)
        case ExplainFrame():
            return Explain(frame.request_id)
        case DrainFrame():
            return Drain()
        case _:
            return requests_of(frame)


class SocketSink:
    """Sends each turn of the loop as one frame; a thread of its own sends heartbeats, during long steps too."""

    def __init__(self, sock: socket.socket, scheduler: MeasuredScheduler, clock: Clock) -> None:
        self._sock = sock
        self._scheduler = scheduler
        self._clock = clock
        self._lock = threading.Lock()
        self._turn_started_s = clock.now()

    def start_heartbeat(self) -> None:
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def emit(self, events: list[Event], step: StepRecord | None) -> None:
        if events or step:
            self.send(step_frame(events, step, self._stats()))
        self._turn_started_s = self._clock.now()

    def explained(self, request_id: str, spans: tuple[Span, ...] | None) -> None:
        self.send(ExplanationFrame(request_id, spans))

    def send(self, frame: ReplicaFrame) -> None:
        """Send one frame; blocks while the gateway is behind, which slows the replica down instead of growing a queue.

        Raises:
            OSError: the gateway is gone.
        """
        raw = encode_frame(frame)
        with self._lock:
            self._sock.sendall(raw)

    def _beat(self) -> None:
        try:
            while True:
                self.send(Heartbeat(self._clock.now() - self._turn_started_s))
                time.sleep(HEARTBEAT_S)
        except OSError:
            return  # the gateway is gone, which the reader thread acts upon

    def _stats(self) -> Stats:
        scheduler = self._scheduler
        step_time = scheduler.knowledge.step_time
        return Stats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_pending_tokens=scheduler.num_pending_tokens,
            num_blocks=scheduler.kv.num_blocks,
            num_used_blocks=scheduler.kv.num_used_blocks,
            num_cached_blocks=scheduler.kv.num_cached_blocks,
            waiting_by_reason=scheduler.num_waiting_by_reason if scheduler.num_waiting else {},
            actual_step_s=step_time.actual_s,
            predicted_step_s=step_time.predicted_s,
            step_error_s=step_time.error_s,
        )


def replica_main(build: Callable[[ReplicaSpec], BuiltReplica]) -> int:
    """Be a replica: read the spec from standard input, build, serve until the gateway is gone; return the exit code."""
    spec = decode_spec(sys.stdin.buffer.read())
    die_with_parent(spec.parent_pid)
    with socket.socket(fileno=spec.socket_fd) as sock:
        inbox = SocketInbox(sock)
        inbox.start()  # before building: a gateway that leaves while a model loads is noticed
        try:
            built = build(spec)
        except ExpediterError as error:
            sock.sendall(encode_frame(Failed(str(error))))
            return 2
        try:
            _serve(spec, built, sock, inbox)
        except BrokenPipeError:
            logger.info("replica %d: the gateway is gone", spec.replica_id)
        finally:
            inbox.finish()
            built.executor.close()
    return 0


def _serve(spec: ReplicaSpec, built: BuiltReplica, sock: socket.socket, inbox: SocketInbox) -> None:
    clock = MonotonicClock()
    sink = SocketSink(sock, built.scheduler, clock)
    sink.send(
        Hello(
            replica_id=spec.replica_id,
            pid=os.getpid(),
            limits=built.executor.limits,
            max_model_len=built.max_model_len,
        )
    )
    sink.start_heartbeat()
    with closing(PreparingInbox(inbox, built.executor.prepare)) as preparing:
        loop = ReplicaLoop(built.scheduler, built.executor, clock, preparing, sink)
        while not inbox.closed:
            if not loop.run_once():
                inbox.wait(HEARTBEAT_S)
