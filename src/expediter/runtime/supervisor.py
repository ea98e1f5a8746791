"""The gateway's side of the replicas' processes: starts, watches and restarts them, and reads what they send."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from expediter.control.routing.base import Router
from expediter.core.errors import CapacityError, ConfigurationError, ReplicaError
from expediter.core.ports import Clock
from expediter.core.request import FinishReason, Request
from expediter.runtime.dispatch import Dispatcher, ResumeConfig
from expediter.runtime.frames import (
    DrainFrame,
    ExplainFrame,
    ExplanationFrame,
    Failed,
    Heartbeat,
    Hello,
    ReplicaFrame,
    Stats,
    StepFrame,
)
from expediter.runtime.questions import Answer
from expediter.runtime.replica import ManagedReplica, ReplicaState
from expediter.runtime.replica_process import ReplicaProcess, to_its_end
from expediter.runtime.spec import ReplicaSpec
from expediter.runtime.step_frames import events_of
from expediter.runtime.streams import RequestStream
from expediter.telemetry.metrics import ServerMetrics
from expediter.telemetry.shown_backend import ShownBackend
from expediter.telemetry.step_log import StepLog

logger = logging.getLogger(__name__)

_NOT_SPAWNED: Final = 127
"""Exit code of a command that cannot be run, as shells have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorConfig:
    """Patience with replicas, in seconds.

    Args:
        start_timeout_s: for a replica to load its model.
        stall_s: without a sign of life, before a replica counts as stalled and gets no requests.
        kill_stalled_s: without a sign of life, before it is killed and started again.
        max_step_s: a step that takes longer hangs; the replica is killed and started again.
        min_backoff_s, max_backoff_s: pause before a restart; doubles with each one in a row.
        stable_s: after being up so long, a death is the first in a row again.
        resume: what is done for the requests of a replica that dies.
    Raises:
        ConfigurationError: the order of the times makes no sense.
    """

    start_timeout_s: float = 600.0
    stall_s: float = 10.0
    kill_stalled_s: float = 30.0
    max_step_s: float = 300.0
    min_backoff_s: float = 0.5
    max_backoff_s: float = 30.0
    stable_s: float = 60.0
    resume: ResumeConfig = field(default_factory=ResumeConfig)

    def __post_init__(self) -> None:
        if not 0 < self.stall_s <= self.kill_stalled_s or not 0 < self.min_backoff_s <= self.max_backoff_s:
            raise ConfigurationError("stall_s <= kill_stalled_s and min_backoff_s <= max_backoff_s must be above 0")


class Supervisor:
    """All replicas of one server; lives on the gateway's event loop.

    Args:
        command: argv of a replica process, which calls `runtime.process.replica_main`.
        specs: one per replica.
    """

    def __init__(
        self,
        *,
        command: Sequence[str],
        specs: Sequence[ReplicaSpec],
        router: Router,
        metrics: ServerMetrics,
        step_log: StepLog,
        clock: Clock,
        config: SupervisorConfig,
    ) -> None:
        self._command = command
        self._step_log = step_log
        self._clock = clock
        self._config = config
        self._replicas = [ManagedReplica(spec, metrics.for_replica(spec.replica_id)) for spec in specs]
        by_id = {replica.replica_id: replica for replica in self._replicas}
        self._dispatcher = Dispatcher(by_id, router, clock, config.resume)
        self._tasks: list[asyncio.Task[None]] = []
        self._draining = False
        self._start_error: asyncio.Future[None] | None = None
        self._all_up = asyncio.Event()

    # ---- lifecycle

    async def start(self) -> list[Hello]:
        """Start all replicas; return what each can hold, once all are up.

        Raises:
            ConfigurationError: a replica refused what it was told.
            ReplicaError: a replica died, or took too long, before it was up.
        """
        self._start_error = asyncio.get_running_loop().create_future()
        self._tasks = [asyncio.create_task(self._keep_running(replica)) for replica in self._replicas]
        self._tasks.append(asyncio.create_task(self._watch_for_stalls()))
        all_up = asyncio.ensure_future(self._all_up.wait())
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                await asyncio.wait((all_up, self._start_error), return_when=asyncio.FIRST_COMPLETED)
            if self._start_error.done():
                self._start_error.result()
        except BaseException as error:
            all_up.cancel()
            await self.stop()
            if isinstance(error, TimeoutError):
                raise ReplicaError(f"replicas were not up after {self._config.start_timeout_s:g} s") from error
            raise
        self._start_error = None
        return [replica.hello for replica in self._replicas if replica.hello is not None]

    def drain(self) -> None:
        """Take no new requests; what is in flight goes on."""
        self._draining = True
        for replica in self._replicas:
            if replica.process is not None:
                replica.process.send(DrainFrame())

    def fail_in_flight(self) -> None:
        """End every request in flight with an error event now."""
        self._dispatcher.fail_all()

    async def stop(self) -> None:
        """End all replicas and wait until their processes are gone; requests in flight end with an error event."""
        self._draining = True
        self._dispatcher.fail_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    # ---- requests

    def submit(self, requests: Sequence[Request], wake: asyncio.Event) -> list[RequestStream]:
        """Dispatch the sequences of a request, one or several, to the replica that the router picks.

        Args:
            requests: a group as `Scheduler.add_group` takes it; they differ in id and sampling alone.
            wake: set whenever the stream has something new; streams of one consumer share it.
        Raises:
            CapacityError: no replica is up, or the server is shutting down.
        """
        if self._draining:
            raise CapacityError("the server is shutting down", retry_after_s=self.start_took_s)
        return self._dispatcher.submit(requests, wake)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request; its `Finished` follows. One that has ended already is left alone."""
        self._dispatcher.abort(request_id, reason)

    async def explain(self, request_id: str, timeout_s: float = 5.0) -> Answer:
        """Ask the replicas what held a request; None if none of them knows it (any more).

        Raises:
            CapacityError: a replica that may know it did not answer in time.
        """
        running = [replica for replica in self._replicas if replica.process is not None and replica.hello is not None]
        owners = [replica for replica in running if request_id in replica.in_flight] or running
        waits = []
        for replica in owners:
            if replica.process is not None:
                waits.append(replica.questions.ask(request_id))
                replica.process.send(ExplainFrame(request_id))
        try:
            async with asyncio.timeout(timeout_s):
                answers = await asyncio.gather(*waits)
        except TimeoutError as error:
            message = "the replica is busy and did not answer in time"
            raise CapacityError(message, retry_after_s=timeout_s) from error
        told = next((answer for answer in answers if answer is not None), None)
        return self._dispatcher.explained(request_id, told)

    # ---- state

    @property
    def states(self) -> dict[int, ReplicaState]:
        """State of each replica by number."""
        return {replica.replica_id: replica.state for replica in self._replicas}

    def shown(self) -> list[ShownBackend]:
        """Return what is shown of each replica."""
        return [replica.shown() for replica in self._replicas]

    @property
    def pids(self) -> dict[int, int]:
        """Process id of each replica that has a process."""
        return {r.spec.replica_id: r.process.pid for r in self._replicas if r.process is not None}

    @property
    def is_ready(self) -> bool:
        """Whether new requests are taken and a replica serves."""
        return not self._draining and any(replica.state is ReplicaState.UP for replica in self._replicas)

    def up_in_s(self) -> float:
        """Return in how many seconds a replica is likely to take requests; 0 if one does."""
        now_s = self._clock.now()
        return min(replica.up_in_s(now_s) for replica in self._replicas)

    @property
    def start_took_s(self) -> float:
        """How long the replicas took to start the last time: what a server that takes this one's place will need."""
        return max((replica.start_took_s or 0.0 for replica in self._replicas), default=0.0)

    @property
    def num_in_flight(self) -> int:
        return self._dispatcher.num_in_flight

    # ---- one replica

    async def _keep_running(self, replica: ManagedReplica) -> None:
        while True:
            exit_code = await self._run_incarnation(replica)
            logger.error("replica %d ended with exit code %d", replica.replica_id, exit_code)
            if self._start_error is not None:
                self._fail_start(ReplicaError(f"replica {replica.replica_id} exited with code {exit_code}"))
                return
            if self._clock.now() - replica.up_since_s >= self._config.stable_s:
                replica.num_deaths_in_a_row = 0
            backoff_s = self._config.min_backoff_s * 2.0 ** min(replica.num_deaths_in_a_row, 32)
            replica.num_deaths_in_a_row += 1
            backoff_s = min(backoff_s, self._config.max_backoff_s)
            replica.starting_s = self._clock.now() + backoff_s
            await asyncio.sleep(backoff_s)
            replica.metrics.count_restart()

    async def _run_incarnation(self, replica: ManagedReplica) -> int:
        """Start the replica and pass its events on until it is gone; return its exit code."""
        self._set_state(replica, ReplicaState.STARTING)
        replica.starting_s = self._clock.now()
        try:
            process = await ReplicaProcess.start(self._command, replica.spec)
        except OSError:
            logger.exception("replica %d cannot be spawned", replica.replica_id)
            return _NOT_SPAWNED
        replica.process = process
        replica.last_frame_s = self._clock.now()
        replica.turn_age_s = 0.0
        try:
            async for frame in process.frames():
                replica.last_frame_s = self._clock.now()
                self._receive(replica, frame)
        except Exception:  # whatever a frame does to us: only this replica ends, and it is started again
            logger.exception("replica %d sent what cannot be handled and is ended", replica.replica_id)
            process.kill()
        finally:
            replica.process = None
            self._set_state(replica, ReplicaState.DOWN)
            replica.metrics.set_up(False)
            replica.questions.give_up()
            self._dispatcher.lose(replica)
            exit_code = await to_its_end(process.end())
        return exit_code

    def _receive(self, replica: ManagedReplica, frame: ReplicaFrame) -> None:
        match frame:
            case Hello():
                replica.hello = frame
                replica.up_since_s = self._clock.now()
                replica.start_took_s = replica.up_since_s - replica.starting_s
                self._set_state(replica, ReplicaState.UP)
                replica.metrics.set_up(True)
                if all(other.state is ReplicaState.UP for other in self._replicas):
                    self._all_up.set()
            case Failed():
                logger.error("replica %d cannot start: %s", replica.replica_id, frame.message)
                self._fail_start(ConfigurationError(frame.message))
            case Heartbeat():
                replica.turn_age_s = frame.turn_age_s
            case ExplanationFrame():
                replica.questions.answer(frame.request_id, frame.spans)
            case StepFrame():
                for event in events_of(frame):
                    self._dispatcher.pass_on(replica, event)
                replica.turn_age_s = 0.0
                self._show(replica, frame.stats)
                if frame.features is not None:
                    replica.metrics.record_step(frame.features, frame.budget_tokens)
                    speed = replica.speed.observe(frame.step_id, frame.features, frame.elapsed_s, frame.budget_tokens)
                    if speed is not None:
                        self._dispatcher.learned(replica, speed)
                    self._step_log.append(replica.replica_id, frame.features, frame.elapsed_s)
        if replica.state is ReplicaState.STALLED:
            logger.info("replica %d is moving again", replica.replica_id)
            self._set_state(replica, ReplicaState.UP)

    def _set_state(self, replica: ManagedReplica, state: ReplicaState) -> None:
        """Change the state; only who is up gets requests."""
        was_up, replica.state = replica.state is ReplicaState.UP, state
        if was_up and state is not ReplicaState.UP:
            replica.stats = None
            self._dispatcher.leave(replica)
        elif state is ReplicaState.UP and not was_up:
            self._dispatcher.join(replica)

    def _show(self, replica: ManagedReplica, stats: Stats) -> None:
        replica.stats = stats
        if stats.num_running != replica.num_running:
            replica.num_running = stats.num_running
            self._dispatcher.load_changed(replica)
        replica.metrics.set_gauges(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_pending_tokens=stats.num_pending_tokens,
            num_used_blocks=stats.num_used_blocks,
            num_blocks=stats.num_blocks,
            waiting_by_reason=stats.waiting_by_reason,
        )
        replica.metrics.set_step_times(stats.actual_step_s, stats.predicted_step_s, stats.step_error_s)

    # ---- watching

    def _fail_start(self, error: ConfigurationError | ReplicaError) -> None:
        if self._start_error is not None and not self._start_error.done():
            self._start_error.set_exception(error)

    async def _watch_for_stalls(self) -> None:
        interval_s = min(self._config.stall_s / 8, 0.5)
        last_look_s = self._clock.now()
        while True:
            await asyncio.sleep(interval_s)
            now_s = self._clock.now()
            own_lag_s = now_s - last_look_s - interval_s
            last_look_s = now_s
            for replica in self._replicas:
                # While this loop itself was late, frames could not be read: that is not the replica's fault.
                replica.last_frame_s += max(own_lag_s, 0.0)
                self._judge(replica, now_s - replica.last_frame_s)

    def _judge(self, replica: ManagedReplica, silent_s: float) -> None:
        if replica.process is None:
            return
        if replica.state is ReplicaState.STARTING:
            if silent_s >= self._config.start_timeout_s:
                replica.process.kill()
        elif replica.turn_age_s >= self._config.max_step_s:
            logger.error("replica %d hangs in a step and is killed", replica.replica_id)
            replica.process.kill()
        elif silent_s >= self._config.kill_stalled_s:
            logger.error("replica %d was silent for %.1f s and is killed", replica.replica_id, silent_s)
            replica.process.kill()
        elif silent_s >= self._config.stall_s and replica.state is ReplicaState.UP:
            logger.warning("replica %d has been silent for %.1f s", replica.replica_id, silent_s)
            self._set_state(replica, ReplicaState.STALLED)
