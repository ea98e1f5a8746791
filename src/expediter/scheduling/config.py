"""Limits of one replica's scheduler."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from expediter.core.errors import ConfigurationError
from expediter.core.ranges import require_at_least, require_not_negative


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How much one step and one replica may hold.

    Args:
        max_num_seqs: most running sequences; one decode token each must fit the budget.
        max_num_batched_tokens: token budget of a step.
        max_model_len: longest prompt plus output, in tokens.
        max_preemptions: after so many, a request resumes only when blocks for its longest possible output are free, and
            is never preempted again; bounds recomputation.
        max_bypasses: requests that may be admitted past one that does not fit; then it blocks the queue until it runs.
            This is the ageing bound of admission.
        max_scan: waiting requests looked at behind a blocked one, per step.
        tenant_weights: share of each tenant under the fair orderings; 1 for who is not named.
        watermark_blocks: blocks that admission leaves available for the growth of what runs already.
        max_explanations: ended requests whose explanation is kept.
    Raises:
        ConfigurationError: a limit is out of range.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 131_072
    max_preemptions: int = 3
    max_bypasses: int = 32
    max_scan: int = 8
    watermark_blocks: int = 0
    max_explanations: int = 1024
    tenant_weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_at_least(1, self, "max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_scan")
        require_not_negative(self, "max_preemptions", "max_bypasses", "watermark_blocks", "max_explanations")
        for tenant, weight in self.tenant_weights.items():
            if not (math.isfinite(weight) and weight > 0):
                raise ConfigurationError(f"the weight of tenant {tenant!r} must be a number above 0, not {weight}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigurationError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sequence decodes one token per step"
            )
