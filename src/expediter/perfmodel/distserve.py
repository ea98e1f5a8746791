"""DistServe's own step times: the coefficients of its simulator, fitted by its authors on an A100 of 80 GB.

    prefill = a + b * sum L + c * sum L^2 + 1       for prompts of L tokens
    decode  = a + b * sum C + c * B                 for B requests of C context tokens; others from 95 requests on

All in ms, for one step of the whole batch; the 1 is what its simulator adds. The authors' engine never mixes the two. A
step that does, as chunked prefill makes it, takes here what its prompts take, and what its decodes take beside that
without a second fixed part: weights are read once. That rule is ours. A chunk behind a prefix of P tokens counts
L * (L + 2P) in place of L^2.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from expediter.core.errors import ConfigurationError
from expediter.core.plan import StepFeatures

_FILE: Final = "distserve.json"
_MS: Final = 1e-3
_PREFILL_OVERHEAD_S: Final = 1e-3
Coefficients = tuple[float, float, float]


class TimedSteps(msgspec.Struct, frozen=True):
    """Coefficients of one engine, model and number of GPUs, in ms."""

    prefill: Coefficients
    decoding_smallbs: Coefficients
    decoding_largebs: Coefficients
    decoding_large_small_bs_threshold: int


class _File(msgspec.Struct, frozen=True):
    source: dict[str, Any]
    steps: dict[str, dict[str, dict[int, TimedSteps]]]


@cache
def _file() -> _File:
    return msgspec.json.decode(resources.files("expediter.perfmodel").joinpath(_FILE).read_bytes(), type=_File)


class DistServeModel:
    """`StepTimeModel` of an OPT model on A100 80 GB; formula: see the module.

    Args:
        model: opt-13b or opt-66b.
        tensor_parallel: GPUs of the replica.
        engine: whose steps were measured, distserve or vllm.
    Raises:
        ConfigurationError: there are no coefficients for that; the message lists those that exist.
    """

    def __init__(self, model: str, tensor_parallel: int = 1, *, engine: str = "distserve") -> None:
        steps = _file().steps
        try:
            found = steps[engine][model][tensor_parallel]
        except KeyError:
            there = (f"{e} {m} x {n}" for e, models in steps.items() for m, sizes in models.items() for n in sizes)
            raise ConfigurationError(
                f"no step times of {engine} {model} x {tensor_parallel}; there are: {', '.join(there)}"
            ) from None
        fixed_s, token_s, square_s = _seconds(found.prefill)
        self._prefill = (fixed_s + _PREFILL_OVERHEAD_S, token_s, square_s)
        self._small, self._large = _seconds(found.decoding_smallbs), _seconds(found.decoding_largebs)
        self._threshold = found.decoding_large_small_bs_threshold

    def step_time_s(self, features: StepFeatures) -> float:
        """Return the duration of one step in seconds."""
        fixed_s, context_token_s = self._without_context_s(features)
        return fixed_s + context_token_s * features.decode_context_tokens

    def decode_run_s(self, features: StepFeatures, num_steps: int) -> npt.NDArray[np.float64]:
        """Return the durations of `num_steps` successive decode steps, float64, shape [num_steps]; see the port."""
        fixed_s, context_token_s = self._without_context_s(features)
        grown = np.arange(num_steps, dtype=np.float64)
        grown *= features.num_decodes
        grown += features.decode_context_tokens
        grown *= context_token_s
        grown += fixed_s
        return grown

    def _without_context_s(self, features: StepFeatures) -> tuple[float, float]:
        """Return the duration but for the context that decodes read, and the time per token of that."""
        decode = self._small if features.num_decodes < self._threshold else self._large
        fixed_s, decodes_s = decode[0], decode[2] * features.num_decodes
        if not features.num_prefill_tokens:
            return fixed_s + decodes_s, decode[1]
        prompts_s = self._prefill[1] * features.num_prefill_tokens + 2 * self._prefill[2] * features.prefill_attention
        if not features.num_decodes:
            return self._prefill[0] + prompts_s, 0.0
        return max(self._prefill[0], fixed_s) + prompts_s + decodes_s, decode[1]


def _seconds(coefficients: Coefficients) -> Coefficients:
    a, b, c = coefficients
    return a * _MS, b * _MS, c * _MS
