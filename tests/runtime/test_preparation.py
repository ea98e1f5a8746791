"""Requests with a grammar wait for it off the loop; what concerns them keeps its place behind them."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from expediter.core.clock import VirtualClock
from expediter.core.errors import RequestError
from expediter.core.events import Event, Finished, Queued, Tokens
from expediter.core.plan import SequenceFailure, StepPlan, StepResult
from expediter.core.ports import ExecutorLimits
from expediter.core.request import Carried, FinishReason, Grammar, Request
from expediter.runtime.loop import Abort, Command, Drain, Explain, ReplicaLoop, Resume, StepRecord
from expediter.runtime.preparation import Arrival, Prepared, PreparingInbox
from expediter.scheduling.build import CacheConfig, build_scheduler
from expediter.scheduling.config import SchedulerConfig
from expediter.testing.fake_executor import FakeExecutor

LIMITS = ExecutorLimits(num_blocks=24, block_size=4, max_model_len=64, vocab_size=50, max_num_seqs=4)


class Mail:
    def __init__(self, *arrivals: Arrival) -> None:
        self.arrivals = list(arrivals)
        self.has_more = threading.Event()

    def take(self) -> list[Arrival]:
        taken, self.arrivals = self.arrivals, []
        return taken

    def put(self, arrival: Prepared) -> None:
        self.arrivals.append(arrival)
        self.has_more.set()


class PanicError(BaseException):  # as pyo3 has it
    pass


class Gate:
    """A `prepare` that waits until it is opened; one with "refused" in it is refused."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.threads: set[str] = set()

    def __call__(self, grammar: Grammar) -> None:
        self.threads.add(threading.current_thread().name)
        assert self.opened.wait(30)
        if "refused" in grammar.text:
            raise RequestError("it is refused")
        if "broken" in grammar.text:
            raise PanicError


def request(name: str, grammar: str | None = None) -> Request:
    prompt = np.arange(6, dtype=np.int32)
    return Request(request_id=name, prompt=prompt, max_tokens=3, grammar=None if grammar is None else Grammar(grammar))


def released(inbox: PreparingInbox, mail: Mail, num_expected: int) -> list[Command]:
    """What the inbox lets go once threads have reported."""
    commands: list[Command] = []
    deadline_s = time.monotonic() + 30
    while len(commands) < num_expected and time.monotonic() < deadline_s:
        mail.has_more.wait(1)
        mail.has_more.clear()
        commands += inbox.take()
    return commands


def test_the_others_go_on_and_its_own_commands_follow_it() -> None:
    held, free, resumed = (request("held", "g"), request("held2", "g")), (request("free"),), request("resumed", "g")
    resume = Resume(resumed, Carried(output=(1,)))
    mail, gate = Mail(held, free, Abort("held2"), Explain("held"), Abort("free"), resume, Abort("resumed")), Gate()
    inbox = PreparingInbox(mail, gate)
    assert inbox.take() == [free, Abort("free")]
    assert inbox.take() == []
    gate.opened.set()
    commands = released(inbox, mail, 5)
    first, second = [held, Abort("held2"), Explain("held")], [resume, Abort("resumed")]
    assert commands in (first + second, second + first)
    mail.arrivals.append(Abort("held"))
    assert inbox.take() == [Abort("held")]
    assert threading.current_thread().name not in gate.threads
    inbox.close()


def test_a_drain_comes_after_those_that_came_before_it() -> None:
    held, mail, gate = (request("held", "g"),), Mail(), Gate()
    inbox = PreparingInbox(mail, gate)
    mail.arrivals += [held, Drain()]
    assert inbox.take() == []
    gate.opened.set()
    assert released(inbox, mail, 2) == [held, Drain()]
    mail.arrivals.append(Drain())
    assert inbox.take() == [Drain()]
    inbox.close()


@pytest.mark.parametrize(("text", "message"), [("refused", "it is refused"), ("broken", "the grammar cannot be used")])
def test_one_that_cannot_be_prepared_is_added_and_failed_at_once(text: str, message: str) -> None:
    group, mail, gate = (request("a", text), request("b", text)), Mail(), Gate()
    inbox = PreparingInbox(mail, gate)
    mail.arrivals.append(group)
    gate.opened.set()
    inbox.take()
    failures = [SequenceFailure(name, message) for name in "ab"]
    assert released(inbox, mail, 3) == [group, *failures]
    inbox.close()


class FailingExecutor(FakeExecutor):
    """Reports sequences as failed in the step with their n-th token."""

    def __init__(self, limits: ExecutorLimits, fails_at: dict[str, int]) -> None:
        super().__init__(limits)
        self._fails_at = fails_at
        self._counts = dict.fromkeys(fails_at, 0)
        self._names: dict[int, str] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        self._names |= {admission.slot: admission.state.request_id for admission in plan.admitted}
        result = super().execute(plan)
        failures = []
        for slot in plan.sample_slots.tolist():
            name = self._names[slot]
            if name in self._fails_at:
                self._counts[name] += 1
                if self._counts[name] == self._fails_at[name]:
                    failures.append(SequenceFailure(name, f"{name} failed"))
        return StepResult(result.step_id, result.tokens, 0.0, failures=tuple(failures))


class Recorder:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, events: list[Event], step: StepRecord | None) -> None:
        self.events += events

    def explained(self, request_id: str, spans: object) -> None: ...

    def num_tokens(self, name: str) -> int:
        states = [state for event in self.events if isinstance(event, Tokens) for state in event.states]
        return sum(state.request_id == name for state in states)

    def end(self, name: str) -> Finished:
        (found,) = [e for e in self.events if isinstance(e, Finished) and e.request_id == name]
        return found


@pytest.mark.parametrize("fails_at", [{"a": 1}, {"b": 1}, {"c": 2}, {"a": 1, "b": 1, "c": 1}, {"x": 1}, {"x": 3}])
def test_sequences_that_fail_end_alone(fails_at: dict[str, int]) -> None:
    """Leaders and followers of a group at their fork, and single ones, at their first token and later (CASE 24)."""
    executor, recorder, mail = FailingExecutor(LIMITS, fails_at), Recorder(), Mail()
    scheduler = build_scheduler(
        config=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64),
        cache=CacheConfig(num_blocks=24, block_size=4),
    )
    loop = ReplicaLoop(scheduler, executor, VirtualClock(), PreparingInbox(mail, executor.prepare), recorder)
    group = tuple(request(name) for name in "abc")
    mail.arrivals += [group, (request("x"),)]
    while loop.run_once():
        scheduler.live.check()
    for name in "abcx":
        end, failed_at = recorder.end(name), fails_at.get(name)
        if failed_at is None:
            assert (end.reason, end.message, recorder.num_tokens(name)) == (FinishReason.LENGTH, "", 3)
        else:
            assert (end.reason, end.message) == (FinishReason.ERROR, f"{name} failed")
            assert recorder.num_tokens(name) == failed_at - 1
    assert sum(isinstance(event, Queued) for event in recorder.events) == 4
    assert scheduler.kv.num_used_blocks == 0
    assert not scheduler.has_work
