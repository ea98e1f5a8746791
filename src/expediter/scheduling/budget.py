"""How many tokens a step may compute."""

from __future__ import annotations

from typing import Protocol

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
