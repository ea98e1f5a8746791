"""The loop on a virtual clock: commands before the next plan, in order, and tokens as the model's own reference."""

from __future__ import annotations

import numpy as np

from expediter.core.clock import VirtualClock
from expediter.core.events import Admitted, Event, Finished, FirstToken, Queued, Rejected, RejectReason, Tokens
from expediter.core.plan import StepFeatures
from expediter.core.ports import ExecutorLimits
from expediter.core.request import Carried, FinishReason, Request
from expediter.runtime.loop import Abort, Command, Drain, ReplicaLoop, Resume, StepRecord
from expediter.runtime.recorded import run_recorded
from expediter.scheduling.build import CacheConfig, build_scheduler
from expediter.scheduling.config import SchedulerConfig
from expediter.testing.fake_executor import FakeExecutor, toy_generate

VOCAB_SIZE = 50
LIMITS = ExecutorLimits(num_blocks=24, block_size=4, max_model_len=64, vocab_size=VOCAB_SIZE, max_num_seqs=4)


class OneSecond:
    def step_time_s(self, features: StepFeatures) -> float:
        return 1.0

    def decode_run_s(self, features: StepFeatures, num_steps: int) -> np.ndarray:
        return np.ones(num_steps)


class Recorder:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.steps: list[StepRecord] = []

    def emit(self, events: list[Event], step: StepRecord | None) -> None:
        self.events += events
        if step is not None:
            self.steps.append(step)

    def tokens(self, request_id: str) -> list[int]:
        return [
            int(event.tokens[0, column])
            for event in self.events
            if isinstance(event, Tokens)
            for column, state in enumerate(event.states)
            if state.request_id == request_id
        ]

    def of(self, kind: type) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]


class ListInbox:
    def __init__(self) -> None:
        self.commands: list[Command] = []

    def take(self) -> list[Command]:
        taken, self.commands = self.commands, []
        return taken


def request(request_id: str, num_prompt_tokens: int = 6, max_tokens: int = 5, arrival_s: float = 0.0) -> Request:
    prompt = (np.arange(num_prompt_tokens) * 7 + ord(request_id[0])) % VOCAB_SIZE
    return Request(request_id=request_id, prompt=prompt.astype(np.int32), max_tokens=max_tokens, arrival_s=arrival_s)


def make_loop() -> tuple[ReplicaLoop, ListInbox, Recorder, VirtualClock]:
    clock, inbox, recorder = VirtualClock(), ListInbox(), Recorder()
    scheduler = build_scheduler(
        config=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64),
        cache=CacheConfig(num_blocks=24, block_size=4),
    )
    executor = FakeExecutor(LIMITS, step_time=OneSecond(), clock=clock)
    return ReplicaLoop(scheduler, executor, clock, inbox, recorder), inbox, recorder, clock


def test_requests_run_to_their_end() -> None:
    loop, inbox, recorder, _ = make_loop()
    requests = [request(name) for name in "abc"]
    inbox.commands += [(each,) for each in requests]
    while loop.run_once():
        pass
    for each in requests:
        assert recorder.tokens(each.request_id) == toy_generate(each.prompt, 5, VOCAB_SIZE)
    assert [event.request_id for event in recorder.of(Finished)] == ["a", "b", "c"]
    assert [step.step_id for step in recorder.steps] == list(range(len(recorder.steps)))
    assert not loop.run_once()


def test_an_idle_loop_emits_nothing() -> None:
    loop, _, recorder, _ = make_loop()
    assert not loop.run_once()
    assert not recorder.events
    assert not recorder.steps


def test_aborts_and_draining() -> None:
    loop, inbox, recorder, _ = make_loop()
    inbox.commands += [(request("a"),), (request("b"),), Abort("b"), Abort("nobody")]
    assert loop.run_once()
    inbox.commands += [Abort("a", FinishReason.STOP), Drain(), (request("c"),)]
    assert not loop.run_once()
    assert {(e.request_id, e.reason) for e in recorder.of(Finished)} == {
        ("a", FinishReason.STOP),
        ("b", FinishReason.ABORT),
    }
    assert [(e.request_id, e.reason) for e in recorder.of(Rejected)] == [("c", RejectReason.SHUTDOWN)]


def test_a_request_of_another_replica_goes_on() -> None:
    loop, inbox, recorder, _ = make_loop()
    given = request("a")
    tokens = toy_generate(given.prompt, 5, VOCAB_SIZE)
    carried = Carried(output=tuple(tokens[:2]), first_scheduled_s=0.0, first_token_s=1.0)
    inbox.commands += [Drain(), Resume(given, carried)]
    while loop.run_once():
        pass
    assert recorder.tokens("a") == tokens[2:]
    assert [(event.resumed, event.num_known_tokens) for event in recorder.of(Admitted)] == [(True, 8)]
    assert not recorder.of(FirstToken)
    assert [(e.num_prompt_tokens, e.num_output_tokens) for e in recorder.of(Finished)] == [(6, 5)]


def test_recorded_arrivals_keep_their_times_and_order() -> None:
    """Steps take 1 s: what arrives during one is queued with its own time and runs from the next on."""
    clock, recorder = VirtualClock(), Recorder()
    scheduler = build_scheduler(
        config=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64),
        cache=CacheConfig(num_blocks=24, block_size=4),
    )
    arrivals = [
        *[request("d", arrival_s=100.5), request("a", arrival_s=0.0), request("c", arrival_s=0.7)],
        request("b", arrival_s=0.25),
    ]
    executor = FakeExecutor(LIMITS, step_time=OneSecond(), clock=clock)
    num_steps = run_recorded(arrivals, scheduler, executor, clock, recorder)
    assert [(e.request_id, e.now_s) for e in recorder.of(Queued)] == [
        *[("a", 0.0), ("b", 0.25), ("c", 0.7)],
        ("d", 100.5),
    ]
    assert {e.request_id: e.now_s for e in recorder.of(Finished)} == {"a": 5.0, "b": 6.0, "c": 6.0, "d": 105.5}
    assert num_steps == len(recorder.steps) == 11
    scheduler.live.check()
