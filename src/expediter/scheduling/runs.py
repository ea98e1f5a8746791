"""Runs of equal steps, which a simulation advances in one jump."""

from __future__ import annotations

from expediter.core.errors import InvariantError
from expediter.core.plan import StepPlan
from expediter.scheduling.draft import Rules
from expediter.scheduling.in_flight import InFlight
from expediter.scheduling.live import LiveRequests


class Runs:
    """Says how often the plan in flight could be repeated, and lets it stand for so many steps.

    A jump and its single steps come to the same, block ids and all.
    """

    def __init__(self, live: LiveRequests, rules: Rules) -> None:
        self._live = live
        self._rules = rules

    def repeatable_steps(self, plan: StepPlan) -> int:
        """Return how many times in a row the plan in flight would be made if nothing is added or aborted, at least 1.

        The last of them may be the one in which a request ends. Requests that a token can stop are never repeated:
        their end is not known before. Age may still change the order of the queue: see `queue_changes_s`.
        """
        step, running = self._live.step, self._live.running
        decoding, kv = running.decoding, running.kv
        if step is None or not step.is_whole or plan.num_swapped_blocks or decoding.num_stopping:
            return 1
        if plan.num_decodes != decoding.size:
            return 1
        if len(self._live.waiting) and not self._live.queue_is_stuck:
            return 1
        if not running.prefilling:
            return decoding.max_run(kv.block_size, kv.num_available_blocks)
        run = self._repeatable_chunks(step)
        if run > 1 and plan.num_decodes:
            run = min(run, decoding.max_run(kv.block_size, kv.num_available_blocks))
        return run

    def _repeatable_chunks(self, step: InFlight) -> int:
        """Return how many times the plan's chunk can be followed by one like it: the next of a prompt that takes all.

        The last of them leaves at least a token: that token's step samples.
        """
        plan, rules, running = step.plan, self._rules, self._live.running
        if step.chunks.states != running.prefilling[:1] or step.chunks.sampled:
            return 1
        if plan.features.num_tokens < plan.budget_tokens or not rules.budget.is_static:
            return 1
        if rules.ordering.interleaves and len(running.prefilling) > 1:
            return 1
        state = running.prefilling[0]
        left = state.num_known_tokens - state.num_computed_tokens
        run = step.num_ahead + (left - 1) // plan.features.num_prefill_tokens
        # Where the cache holds more of the prompt already, its blocks are given up for those one by one.
        num_cached = running.kv.match(state.token_bytes, state.request.cache_salt).num_blocks
        return run if num_cached * running.kv.block_size <= state.num_computed_tokens else 1

    def queue_changes_s(self, now_s: float) -> float:
        """Return the time after which a plan may differ from a repeated one because somebody waited too long."""
        waiting = self._live.waiting
        if not len(waiting) or not (self._live.running.has_slot or self._rules.ordering.displaces):
            return float("inf")
        return waiting.next_change_s(now_s)

    def repeat(self, plan: StepPlan, num_steps: int) -> None:
        """Make the plan in flight stand for `num_steps` steps; blocks are taken as single steps would take them.

        Raises:
            InvariantError: more steps than `repeatable_steps` allows.
        """
        if num_steps == 1:
            return
        step, running = self._live.step, self._live.running
        if step is None or plan is not step.plan or num_steps > self.repeatable_steps(plan):
            raise InvariantError(f"step {plan.step_id} cannot be repeated {num_steps} times")
        while running.prefilling and step.num_ahead < num_steps - 1:
            step.compute_ahead(running)
        running.grow_for_run(num_steps)
        plan.num_steps = num_steps

    def tick(self) -> None:
        """Record that one more step of a run with a prompt is over; what it computed can be reused from now on.

        `repeat` and `apply` at the end of the run do the same for those steps that nobody told of.
        """
        assert self._live.step is not None
        self._live.step.compute_ahead(self._live.running)
