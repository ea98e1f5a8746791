"""How fast a replica computes, in closed form: a router cannot ask a step-time model about every replica."""

from __future__ import annotations

from dataclasses import dataclass

from expediter.core.plan import StepFeatures
from expediter.core.ports import StepTimeModel

_MANY_DECODES = 64
_CONTEXT_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """A straight line through a step-time model, in seconds.

    The defaults know no hardware. They rank replicas by their tokens: what they predict is no time to hold against a
    target.

    Attributes:
        step_s: a step with hardly anything in it.
        token_s: each prompt token, in steps that are full of them.
        attention_s: each chunk * (prefix + chunk / 2) in tokens squared.
        decode_s: each decode of a step.
        context_s: each token of decode context.
        budget_tokens: most tokens of a step.
        overhead_s: what every first token takes besides steps: the way there and back, parsing, tokenizing.
        is_known: whether it comes from a model.
    """

    step_s: float = 0.01
    token_s: float = 1e-4
    attention_s: float = 0.0
    decode_s: float = 0.0
    context_s: float = 1e-8
    budget_tokens: int = 2048
    overhead_s: float = 0.0
    is_known: bool = False

    @classmethod
    def of(cls, model: StepTimeModel, budget_tokens: int) -> Speed:
        """Return the line through five steps of a model."""

        def step_s(chunk: int, prefix: int, decodes: int = 0, context: int = 0) -> float:
            attention = chunk * (prefix + chunk / 2)
            seqs = decodes + (chunk > 0)
            return model.step_time_s(StepFeatures(chunk + decodes, seqs, decodes, decodes * context, attention))

        chunk = budget_tokens
        full_s = step_s(chunk, 0)
        attention_s = max(0.0, step_s(chunk, chunk) - full_s) / chunk**2
        one_s = step_s(0, 0, 1, 1)
        many_s = step_s(0, 0, _MANY_DECODES, 1)
        reading_s = step_s(0, 0, _MANY_DECODES, _CONTEXT_TOKENS)
        return cls(
            step_s=one_s,
            token_s=max(0.0, full_s - attention_s * chunk**2 / 2) / chunk,
            attention_s=attention_s,
            decode_s=max(0.0, many_s - one_s) / (_MANY_DECODES - 1),
            context_s=max(0.0, reading_s - many_s) / (_MANY_DECODES * (_CONTEXT_TOKENS - 1)),
            budget_tokens=budget_tokens,
            is_known=True,
        )

    def prefill_s(self, num_new: float, num_cached: float) -> float:
        """Return how long a prompt takes that has the replica for itself.

        Args:
            num_new: tokens to compute, behind `num_cached` that need no computing.
        """
        attention = num_new * (num_cached + num_new / 2)
        return max(self.step_s, num_new * self.token_s) + attention * self.attention_s

    def decode_step_s(self, num_decodes: float, context_tokens: float) -> float:
        """Return the duration of a step that only decodes."""
        return self.step_s + num_decodes * self.decode_s + context_tokens * self.context_s

    def queue_s(self, num_pending_tokens: int, num_prompts: int, num_running: int, context_tokens: int) -> float:
        """Return how long it takes until a new prompt's turn comes: the overhead, and the prompt tokens ahead of it.

        Decodes go on beside them.

        Args:
            num_prompts: that the pending tokens belong to, at least; each attends to what it has itself.
            context_tokens: of the running requests.
        """
        if not num_pending_tokens:
            # Somebody who decodes has a step in progress, half of it on average.
            return self.overhead_s + (self.decode_step_s(num_running, context_tokens) / 2 if num_running else 0.0)
        own = num_pending_tokens / max(1, num_prompts)
        num_steps = -(-num_pending_tokens // max(1, self.budget_tokens - num_running))
        decodes_s = num_running * self.decode_s + context_tokens * self.context_s
        prompts_s = num_pending_tokens * (self.token_s + own / 2 * self.attention_s)
        return self.overhead_s + max(self.step_s * num_steps, prompts_s) + num_steps * decodes_s
