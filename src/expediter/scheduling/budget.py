"""How many tokens a step may compute."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from expediter.core.plan import StepFeatures
from expediter.scheduling.decoding import DecodingBatch
from expediter.scheduling.knowledge import Knowledge
from expediter.scheduling.running import RunningSet


class BudgetRule(Protocol):
    """Sets the token budget of a step.

    Attributes:
        is_static: the budget depends on nothing but limits.
    """

    is_static: bool

    def tokens(self, running: RunningSet, now_s: float) -> int:
        """Return the budget of the next step, decodes included; at most `max_num_batched_tokens`."""
        ...


class FixedBudget:
    """The same budget for every step."""

    is_static = True

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._tokens = max_num_batched_tokens

    def tokens(self, running: RunningSet, now_s: float) -> int:  # noqa: ARG002 - the protocol's
        return self._tokens


_MAX_STEP_S = 0.25
_TILE = 64
_LOST_AFTER = 2.0


class SlackBudget:
    """The largest budget whose predicted time fits the tightest slack of the decodes.

    A decode's next token is due at its first token's time plus its pace times the tokens since; who is early has slack
    to lend to prompts. Who is late by more than two tokens cannot be helped by short steps and does not count. What a
    step computes for free beside the weights it reads anyway is always allowed. Source: the dynamic chunk of QoServe
    and Niyama, with a fitted model.

    Args:
        max_num_batched_tokens: upper limit whatever the slack.
    """

    is_static = False

    def __init__(self, max_num_batched_tokens: int, knowledge: Knowledge) -> None:
        self._max_tokens = max_num_batched_tokens
        self._knowledge = knowledge
        knowledge.ask()

    def tokens(self, running: RunningSet, now_s: float) -> int:
        decoding = running.decoding
        size = decoding.size
        if not size:
            return self._max_tokens
        slack_s = self._slack_s(decoding, now_s)
        model = self._knowledge.step_time
        prefix = running.prefilling[0].num_computed_tokens if running.prefilling else 0
        context = decoding.context_tokens

        def duration_s(prompt_tokens: int) -> float:
            attention = prompt_tokens * (prefix + prompt_tokens / 2)
            return model.bound_s(StepFeatures(size + prompt_tokens, size + 1, size, context, attention))

        low, high = 0, max(0, self._max_tokens - size)
        longest_s = duration_s(high)
        if longest_s <= slack_s:
            return size + high
        available_s = max(slack_s, 1.05 * duration_s(0))
        if longest_s <= available_s:
            return size + high
        while high - low > _TILE or (not low and high > 1):
            middle = (low + high) // 2
            if duration_s(middle) <= available_s:
                low = middle
            else:
                high = middle
        return size + (low if low < 2 * _TILE else low - low % _TILE)

    def _slack_s(self, decoding: DecodingBatch, now_s: float) -> float:
        slack, pace = decoding.slack_s(now_s)
        helped = slack > -_LOST_AFTER * pace
        least = float(slack[helped].min()) if helped.any() else np.inf
        return min(least, _MAX_STEP_S)
