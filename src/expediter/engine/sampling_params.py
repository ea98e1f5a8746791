"""Checks of a request's sampling parameters. No torch here: the gateway imports it too."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from expediter.core.errors import RequestError
from expediter.core.request import SamplingParams

MIN_TEMPERATURE: Final = 1e-5
"""Below it sampling is greedy, as in vLLM: dividing by less overflows float32 for no change in the outcome."""

_RANGES: Final = (
    # field, lowest, highest, whether the lowest itself is allowed
    ("temperature", 0.0, math.inf, True),
    ("top_p", 0.0, 1.0, False),
    ("min_p", 0.0, 1.0, True),
    ("repetition_penalty", 0.0, math.inf, False),
    ("presence_penalty", -2.0, 2.0, True),
    ("frequency_penalty", -2.0, 2.0, True),
)


def validate_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Refuse what the sampler could not run; what passes never fails a step.

    Args:
        vocab_size: of the model; ids lie in [0, vocab_size).
    Raises:
        RequestError: names the field in `param`.
    """
    for name, lowest, highest, closed in _RANGES:
        value = getattr(params, name)
        if not math.isfinite(value) or value > highest or value < lowest or (value == lowest and not closed):
            raise RequestError(f"{name} must lie in {'[' if closed else '('}{lowest}, {highest}]", param=name)
    if params.top_k < -1:
        raise RequestError("top_k must be -1 or 0 (off) or at least 1", param="top_k")
    if params.seed is not None and not -(2**63) <= params.seed < 2**64:
        raise RequestError("seed must fit 64 bits", param="seed")
    if params.logprobs is not None and not 0 <= params.logprobs <= vocab_size:
        raise RequestError(f"logprobs must lie in [0, {vocab_size}]", param="logprobs")
    for token_id, bias in params.logit_bias:
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"logit_bias has token id {token_id}; ids lie in [0, {vocab_size})", param="logit_bias")
        if not -100.0 <= bias <= 100.0:  # false for NaN too
            raise RequestError("logit_bias must lie in [-100, 100]", param="logit_bias")


def validate_token_ids(token_ids: Iterable[int], vocab_size: int, *, param: str) -> None:
    """Refuse ids outside [0, vocab_size), in a prompt or a stop list.

    Raises:
        RequestError: names `param`.
    """
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"token id {token_id} is not in [0, {vocab_size})", param=param)
