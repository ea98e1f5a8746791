"""The step in flight: what was planned, and what becomes of it when its result comes."""

from __future__ import annotations

import numpy as np

from expediter.core.errors import InvariantError
from expediter.core.events import Event, FirstToken, Tokens
from expediter.core.plan import StepPlan, StepResult
from expediter.core.request import RequestState, Status
from expediter.scheduling.composition import Chunks
from expediter.scheduling.explanations import Explanations
from expediter.scheduling.knowledge import Knowledge
from expediter.scheduling.running import RunningSet


class InFlight:
    """A plan between `plan` and `apply`. Requests may leave meanwhile; their part of the result is ignored.

    Args:
        plan: not empty.
        chunks: whom its chunks are for.
        is_full: it takes all the prefill tokens that its budget allows.
    """

    def __init__(self, plan: StepPlan, chunks: Chunks, *, is_full: bool) -> None:
        self.plan = plan
        self.chunks = chunks
        self.is_full = is_full
        self._dropped: set[int] = set()
        self._num_ahead = 0

    def drop(self, state: RequestState, slot: int, successor: RequestState | None) -> None:
        """Ignore a sequence that has left `slot`; another of its group may go on with its chunk."""
        self._dropped.add(slot)
        if successor is not None:
            states = self.chunks.states
            states[:] = [successor if other is state else other for other in states]

    @property
    def is_whole(self) -> bool:
        """Whether everybody who was planned is still there."""
        return not self._dropped

    @property
    def num_ahead(self) -> int:
        """Steps of a run whose chunks count as computed already."""
        return self._num_ahead

    def compute_ahead(self, running: RunningSet) -> None:
        """Record what one more step of a run computed of its prompt."""
        self._num_ahead += 1
        running.compute(self.chunks.states[0], int(self.plan.lengths[-1]))

    def check(self, result: StepResult) -> None:
        """Verify that a result has the plan's shape.

        Raises:
            InvariantError: it has not.
        """
        plan = self.plan
        if result.tokens.shape != (plan.num_steps, len(plan.sampled)):
            raise InvariantError(
                f"step {plan.step_id}: tokens of shape {result.tokens.shape} for {plan.num_steps} steps of "
                f"{len(plan.sampled)} sampled sequences"
            )

    def apply_decodes(
        self, result: StepResult, running: RunningSet, now_s: float, events: list[Event]
    ) -> list[RequestState]:
        """Append the decodes' tokens; return who ended, out of the running set already."""
        num_decodes = self.plan.num_decodes
        tokens, columns = result.tokens[:, :num_decodes], self.plan.sampled[:num_decodes]
        if self._dropped:
            columns = columns[~np.isin(self.plan.slots[:num_decodes], list(self._dropped))]
            tokens = tokens[:, columns]
        if not len(columns):
            return []
        decoding = running.decoding
        events.append(Tokens(now_s, decoding.states[: decoding.size].copy(), tokens, columns))
        return running.advance(tokens, now_s)

    def apply_chunks(
        self,
        result: StepResult,
        running: RunningSet,
        knowledge: Knowledge,
        explanations: Explanations,
        now_s: float,
        events: list[Event],
    ) -> list[RequestState]:
        """Record what the chunks computed and append the tokens of those that caught up; return who ended."""
        plan, chunks = self.plan, self.chunks
        if not chunks.states:
            return []
        for index, state in enumerate(chunks.states, start=plan.num_decodes):
            if state.status is Status.RUNNING:  # else aborted in flight, or its KV did not arrive
                running.compute(state, int(plan.lengths[index]) * (plan.num_steps - self._num_ahead))
        sampled = enumerate(chunks.sampled, start=plan.num_decodes)
        columns = [column for column, state in sampled if state.status is Status.RUNNING]
        if not columns:
            return []
        caught_up = [chunks.sampled[column - plan.num_decodes] for column in columns]
        tokens = result.tokens[:, columns]
        for state, token in zip(caught_up, tokens[0].tolist(), strict=True):
            state.append(token)
            explanations.decoding(state.request_id, now_s)
            if state.first_token_s is None:
                state.first_token_s = now_s
                state.pace_s = knowledge.pace_s(state, now_s)
                events.append(FirstToken(state.request_id, now_s))
        owners = np.empty(len(caught_up), np.object_)
        owners[:] = caught_up
        events.append(Tokens(now_s, owners, tokens, np.array(columns)))
        ended = [s for s in caught_up if len(s.output) == s.request.max_tokens or s.has_stopped]
        for state in ended:
            running.leave(state, now_s)
        running.catch_up([state for state in caught_up if state.status is Status.RUNNING and state.slot >= 0])
        return ended
