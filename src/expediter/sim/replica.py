"""A replica in virtual time: the real scheduler, driven plan -> execute -> apply."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Final

from expediter.control.fleet import MIXED, ReplicaProfile, ReplicaSnapshot, Role
from expediter.core.errors import InvariantError
from expediter.core.events import Admitted, Event, Finished, Rejected, Tokens
from expediter.core.plan import StepFeatures, StepPlan
from expediter.core.request import Carried, Request
from expediter.scheduling.passage import Departure
from expediter.scheduling.scheduler import Scheduler
from expediter.sim.executor import SimulatedExecutor
from expediter.sim.loop import EventKind, EventLoop
from expediter.sim.observer import Observer, Probe, ReplicaLoad

_ENDS: Final = (Finished, Rejected)
_STARTS_OR_ENDS: Final = (Admitted, Finished, Rejected)


class SimulatedReplica:
    """One scheduler with a simulated executor.

    Steps that would all be planned alike are advanced in one jump, which ends early at the end of the step in progress
    when a request arrives. Nothing that anyone can see differs from single steps: between the steps of a jump no
    request starts, ends or is preempted, the end times are the same sums, and what is computed of a prompt is recorded
    at the end of each.

    Requests that arrive during a step wait in the inbox until it ends, as with a real replica.

    Args:
        profile: what a router may rely on; the cache is asked here.
        renew: returns a scheduler as at the beginning, for a replica that can be lost and come back.
        jumps: False to run every step as an event of its own, for comparison.
        probe: looks at the load over time, if anybody wants to.
    Attributes:
        profile: for the fleet.
        num_steps: steps begun and finished so far; a jump counts for all of its steps.
        num_prompt_steps: steps so far that computed prompts.
        budget_shares: sum over those of the share of the token budget that they used.
        on_steps: told of each step or jump of decodes when it is over, with its features at the beginning and the
            duration of each step; None for nobody.
        incarnation: how often it was lost.
        on_load_change: called after anything that changes `snapshot` without a `receive`.
    """

    def __init__(
        self,
        replica_id: int,
        scheduler: Scheduler,
        executor: SimulatedExecutor,
        loop: EventLoop,
        observer: Observer,
        *,
        profile: ReplicaProfile = MIXED,
        renew: Callable[[], Scheduler] | None = None,
        jumps: bool = True,
        probe: Probe | None = None,
    ) -> None:
        self.replica_id = replica_id
        self.scheduler = scheduler
        self.profile = replace(profile, cached_tokens=self.num_cached_tokens)
        self.incarnation = 0
        self._renew = renew
        self._slowness = 1.0
        self.num_steps = 0
        self.num_prompt_steps = 0
        self.budget_shares = 0.0
        self._idle_s = 0.0
        self._idle_since_s: float | None = 0.0
        self.on_load_change: Callable[[], None] = lambda: None
        self.on_steps: Callable[[StepFeatures, Sequence[float]], None] | None = None
        self._executor = executor
        self._loop = loop
        self._observer = observer
        self._jumps = jumps
        self._probe = probe
        self._inbox: list[tuple[Sequence[Request], bool]] = []
        self._posted: list[Callable[[float], None]] = []
        self._is_planning = False
        self._num_inbox_tokens = 0
        self._num_context_tokens = 0
        self._prompt_tokens: dict[str, int] = {}
        self._expected_hits: dict[str, int] = {}
        self._num_expected_hits = 0
        self._plan: StepPlan | None = None
        self._durations_s: list[float] = []
        self._ends_s: list[float] = []
        self._end_ticket = -1
        self._num_over = 0
        self._is_woken = False

    @property
    def role(self) -> Role:
        """What it is for; "prefill" replicas hand their requests off."""
        return self.profile.role

    def snapshot(self) -> ReplicaSnapshot:
        """Return what a router sees; exact also in the middle of a jump, during which none of it changes."""
        num_pending = self.scheduler.num_pending_tokens + self._num_inbox_tokens
        return ReplicaSnapshot(
            replica_id=self.replica_id,
            num_requests=len(self._prompt_tokens),
            num_pending_tokens=max(0, num_pending - self._num_expected_hits),
            num_context_tokens=self._num_context_tokens,
            num_running=self.scheduler.num_running,
        )

    def busy_s(self, now_s: float) -> float:
        """Return for how long it has run steps, from 0 s to `now_s`; the same with jumps or without."""
        idle_s = self._idle_s if self._idle_since_s is None else self._idle_s + max(0.0, now_s - self._idle_since_s)
        return now_s - idle_s

    def num_cached_tokens(self, request: Request) -> int:
        """Return how many leading tokens of a prompt the cache holds, in whole blocks."""
        kv = self.scheduler.kv
        return kv.match(request.prompt.tobytes(), request.cache_salt).num_blocks * kv.block_size

    def receive(
        self, group: Sequence[Request], now_s: float, *, keep: bool = False, num_expected_hits: int = 0
    ) -> None:
        """Take a request that arrives at `now_s`, with all its sequences.

        Args:
            keep: keep their KV for a transfer when they end.
            num_expected_hits: prompt tokens that the router takes to be cached here: no load, until it turns out.
        """
        if num_expected_hits:
            self._expected_hits[group[0].request_id] = num_expected_hits
            self._num_expected_hits += num_expected_hits
        self._inbox.append((group, keep))
        self._num_inbox_tokens += group[0].num_prompt_tokens
        for request in group:
            self.expect(request.request_id, request.num_prompt_tokens)
        self._look(now_s)
        self._interrupt(now_s)

    def expect(self, request_id: str, num_tokens: int) -> None:
        """Count a request that will be here as load from now on; it ends here, or is forgotten."""
        self._prompt_tokens[request_id] = num_tokens
        self._num_context_tokens += num_tokens

    def forget(self, request_id: str) -> None:
        """Count a request no more that has gone elsewhere."""
        self._num_context_tokens -= self._prompt_tokens.pop(request_id, 0)
        self._num_expected_hits -= self._expected_hits.pop(request_id, 0)
        self.on_load_change()

    def post(self, action: Callable[[float], None], now_s: float) -> None:
        """Do something with the scheduler between two steps, as soon as may be; first posted, first done."""
        self._posted.append(action)
        self._interrupt(now_s)

    def report(self, events: list[Event]) -> None:
        """Pass on what a posted action made the scheduler say."""
        self._emit(events)

    def crash(self, now_s: float) -> list[tuple[Departure, ...]]:
        """Lose the cache, what was posted and the step in progress; return what the requests have, group by group.

        Raises:
            InvariantError: it cannot be lost.
        """
        if self._renew is None:
            raise InvariantError(f"replica {self.replica_id} cannot be lost")
        self._settle(now_s)
        lost = self.scheduler.passage.evacuate(now_s)
        lost += [tuple(Departure(r, Carried(), None) for r in group) for group, _ in self._inbox]
        self._inbox.clear()
        self._posted.clear()
        self._prompt_tokens.clear()
        self._expected_hits.clear()
        self._num_expected_hits = 0
        self._num_inbox_tokens = self._num_context_tokens = 0
        self.scheduler = self._renew()
        self.incarnation += 1
        if self._idle_since_s is None:
            self._idle_since_s = now_s
        self._look(now_s)
        return lost

    def _settle(self, now_s: float) -> None:
        """Let the steps of a jump that are over by now have happened, and cancel the rest."""
        plan, num_steps = self._plan, bisect_right(self._ends_s, now_s)
        if plan is None:
            return
        self._loop.cancel(self._end_ticket)
        self._plan = None
        if num_steps:
            self.scheduler.runs.repeat(plan, num_steps)
            self.num_steps += num_steps
            for _ in range(num_steps):  # and the one that is lost
                self._count_prompt_step(plan)
            result = self._executor.result(plan, self._durations_s[:num_steps])
            self._emit(self.scheduler.apply(result, self._ends_s[num_steps - 1]))

    def slow_down(self, factor: float, now_s: float) -> None:
        """Let steps take `factor` times as long from the next one on."""
        self._slowness = factor
        self._interrupt(now_s)

    def _interrupt(self, now_s: float) -> None:
        """Plan as soon as the step in progress has ended."""
        if self._is_planning:
            return
        if self._plan is None:
            self._wake(now_s)
        elif len(self._ends_s) > 1:
            self._shorten(now_s)

    def _wake(self, now_s: float) -> None:
        if not self._is_woken:
            self._is_woken = True
            self._loop.schedule(now_s, EventKind.PLAN, self.replica_id, self._plan_step)

    def _shorten(self, now_s: float) -> None:
        """End the jump with the step in progress; one that ends at `now_s` is over already (`EventKind`)."""
        num_steps = bisect_left(self._ends_s, now_s) + 1
        if num_steps < len(self._ends_s):
            self._loop.cancel(self._end_ticket)
            del self._ends_s[num_steps:]
            self._schedule_end()

    def _schedule_end(self) -> None:
        """Wait for the end of the jump, or of its next step: what is computed of a prompt shows at once."""
        assert self._plan is not None
        ticks = self._plan.features.num_prefill_tokens > 0 and self._num_over < len(self._ends_s) - 1
        end_s, action = (self._ends_s[self._num_over], self._tick) if ticks else (self._ends_s[-1], self._finish_step)
        self._end_ticket = self._loop.schedule(end_s, EventKind.STEP_END, self.replica_id, action)

    def _tick(self, now_s: float) -> None:  # noqa: ARG002 - the loop's
        self._num_over += 1
        self.scheduler.runs.tick()
        self.on_load_change()
        self._schedule_end()

    def _plan_step(self, now_s: float) -> None:
        self._is_woken = False
        self._is_planning = True
        if self._posted:
            self._do_posted(now_s)
        for group, keep in self._inbox:
            self._emit(self.scheduler.add_group(group, group[0].arrival_s, keep=keep))
        self._inbox.clear()
        self._num_inbox_tokens = 0
        plan = self.scheduler.plan(now_s)
        self._emit(plan.events)
        self._look(now_s)
        self._is_planning = False
        if plan.events:
            self.on_load_change()
        if plan.is_empty:
            if self._idle_since_s is None:
                self._idle_since_s = now_s
            if self._posted:
                self._wake(now_s)
            elif self.scheduler.has_work and not len(self.scheduler.kv.landings):
                raise InvariantError(f"replica {self.replica_id}: requests are left, and none of them can run")
            return
        if self._idle_since_s is not None:
            self._idle_s += now_s - self._idle_since_s
            self._idle_since_s = None
        self._count_prompt_step(plan)
        num_steps = self.scheduler.runs.repeatable_steps(plan) if self._jumps and not self._posted else 1
        self._durations_s = self._executor.durations_s(plan, num_steps)
        if self._slowness != 1.0:
            self._durations_s = [duration_s * self._slowness for duration_s in self._durations_s]
        # One addition per step, from the left, as single steps would do it.
        self._ends_s = list(accumulate(self._durations_s, initial=now_s))[1:]
        if num_steps > 1:
            # A plan made after that moment may differ, so the step in progress then is the last of the jump.
            del self._ends_s[bisect_right(self._ends_s, self.scheduler.runs.queue_changes_s(now_s)) + 1 :]
        self._plan = plan
        self._num_over = 0
        self._schedule_end()

    def _count_prompt_step(self, plan: StepPlan) -> None:
        if plan.features.num_prefill_tokens:
            self.num_prompt_steps += 1
            self.budget_shares += plan.features.num_tokens / plan.budget_tokens

    def _do_posted(self, now_s: float) -> None:
        posted, self._posted = self._posted, []
        for action in posted:
            action(now_s)

    def _finish_step(self, now_s: float) -> None:
        plan, num_steps = self._plan, len(self._ends_s)
        assert plan is not None
        if num_steps > 1:
            self.scheduler.runs.repeat(plan, num_steps)
        self._look(now_s)
        if self.on_steps is not None:
            self._tell_of_steps(plan, self._durations_s[:num_steps])
        result = self._executor.result(plan, self._durations_s[:num_steps])
        self._plan = None
        self.num_steps += num_steps
        for _ in range(num_steps - 1):
            self._count_prompt_step(plan)
        self._emit(self.scheduler.apply(result, now_s))
        if plan.features.num_prefill_tokens:
            self.on_load_change()
        self._wake(now_s)

    def _tell_of_steps(self, plan: StepPlan, durations_s: list[float]) -> None:
        assert self.on_steps is not None
        if not plan.features.num_prefill_tokens:
            self.on_steps(plan.features, durations_s)
            return
        for number, duration_s in enumerate(durations_s):
            self.on_steps(plan.features.later(number), [duration_s])

    def _look(self, now_s: float) -> None:
        if self._probe is not None:
            num_running, kv = self.scheduler.num_running, self.scheduler.kv
            load = ReplicaLoad(
                len(self._prompt_tokens) - num_running, num_running, kv.num_used_blocks, kv.num_cached_blocks
            )
            self._probe.sample(self.replica_id, now_s, load)

    def _emit(self, events: list[Event]) -> None:
        facts = [event for event in events if type(event) is not Tokens]
        if not facts:  # most steps only yield tokens
            return
        for event in facts:
            if isinstance(event, _STARTS_OR_ENDS):
                self._num_expected_hits -= self._expected_hits.pop(event.request_id, 0)
            if isinstance(event, _ENDS):
                self._num_context_tokens -= self._prompt_tokens.pop(event.request_id)
                self.on_load_change()
        self._observer.record(self.replica_id, facts)
