"""The driver loop of a replica: drain the inbox, plan, execute, apply, emit.

Nothing here knows of processes or sockets: the replica process runs it with a wall clock, tests with a virtual one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from expediter.core.events import Event, Finished
from expediter.core.explanation import Span
from expediter.core.plan import SequenceFailure, StepFeatures, StepPlan, StepResult, TokenLogprobs
from expediter.core.ports import Clock, Executor
from expediter.core.request import Carried, FinishReason, Request


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request from outside; `STOP` when the driver found a stop string in its text."""

    request_id: str
    reason: FinishReason = FinishReason.ABORT


@dataclass(frozen=True, slots=True)
class Resume:
    """Go on with a request that ran elsewhere."""

    request: Request
    carried: Carried


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no new requests; finish what is there."""


@dataclass(frozen=True, slots=True)
class Explain:
    """Say what held a request; the answer goes to the sink."""

    request_id: str


Command = tuple[Request, ...] | Resume | Abort | SequenceFailure | Drain | Explain
"""A request comes as the sequences of its group, most often one."""


class PassagePort(Protocol):
    """What the loop uses of a scheduler's `Passage`."""

    def resume(self, request: Request, carried: Carried | None, now_s: float) -> list[Event]: ...


class SchedulerPort(Protocol):
    """What the loop uses of a `Scheduler`."""

    @property
    def has_work(self) -> bool: ...

    @property
    def passage(self) -> PassagePort: ...

    def add_group(self, requests: Sequence[Request], now_s: float) -> list[Event]: ...

    def abort(self, request_id: str, now_s: float, reason: FinishReason = ...) -> list[Event]: ...

    def plan(self, now_s: float) -> StepPlan: ...

    def apply(self, result: StepResult, now_s: float) -> list[Event]: ...

    def drain(self) -> None: ...

    def explain(self, request_id: str, now_s: float) -> tuple[Span, ...] | None: ...


class Inbox(Protocol):
    """Where commands come from."""

    def take(self) -> Iterable[Command]:
        """Return what has arrived since the last call, oldest first; never blocks."""
        ...


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What a step was and how long it took; feeds fitted step-time models."""

    step_id: int
    features: StepFeatures
    elapsed_s: float
    logprobs: tuple[TokenLogprobs | None, ...] | None
    budget_tokens: int = 0


class StepSink(Protocol):
    """Receives what one turn of the loop produced."""

    def emit(self, events: list[Event], step: StepRecord | None) -> None:
        """Take the events in order; `step` is None when nothing was executed."""
        ...

    def explained(self, request_id: str, spans: tuple[Span, ...] | None) -> None:
        """Take the answer to an `Explain`; None if the request is not known (any more)."""
        ...


class ReplicaLoop:
    """One scheduler and one executor, step by step.

    Args:
        clock: read before planning and after execution.
        inbox: requests are added with their own arrival time, before the next plan.
    """

    def __init__(
        self, scheduler: SchedulerPort, executor: Executor, clock: Clock, inbox: Inbox, sink: StepSink
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._inbox = inbox
        self._sink = sink

    def run_once(self) -> bool:
        """Do one turn; return whether a step was executed (else there is nothing to do until something arrives)."""
        events = self._drain_inbox()
        plan = self._scheduler.plan(self._clock.now())
        events += plan.events
        step = None
        if not plan.is_empty:
            features = plan.features  # the plan's arrays are the scheduler's own and change with `apply`
            result = self._executor.execute(plan)
            for failure in result.failures:
                events += self._fail(failure)
            events += self._scheduler.apply(result, self._clock.now())
            step = StepRecord(plan.step_id, features, result.elapsed_s, result.logprobs, plan.budget_tokens)
        self._sink.emit(events, step)
        return step is not None

    def _fail(self, failure: SequenceFailure) -> list[Event]:
        """End a sequence; of the step in flight, its part is void."""
        events = self._scheduler.abort(failure.request_id, self._clock.now(), FinishReason.ERROR)
        return [replace(e, message=failure.message) if isinstance(e, Finished) else e for e in events]

    def _drain_inbox(self) -> list[Event]:
        events: list[Event] = []
        for command in self._inbox.take():
            match command:
                case tuple():
                    events += self._scheduler.add_group(command, command[0].arrival_s)
                case Resume(request, carried):
                    events += self._scheduler.passage.resume(request, carried, self._clock.now())
                case SequenceFailure():
                    events += self._fail(command)
                case Abort():
                    events += self._scheduler.abort(command.request_id, self._clock.now(), command.reason)
                case Explain(request_id):
                    self._sink.explained(request_id, self._scheduler.explain(request_id, self._clock.now()))
                case Drain():
                    self._scheduler.drain()
        return events
