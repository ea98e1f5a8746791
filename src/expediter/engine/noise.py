"""Counter-based randomness: noise is a pure function of (seed, output index, token id), so nothing has to be kept.

A request that is preempted and recomputed, or that runs in another batch or on another device, meets the same noise.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

_UINT64 = npt.NDArray[np.uint64]
_GOLDEN_32: Final = 0x9E3779B1 - (1 << 32)  # torch has no unsigned arithmetic: the same bits as a negative int32
_MULTIPLY_1: Final = 0x7FEB352D
_MULTIPLY_2: Final = 0x846CA68B - (1 << 32)


def noise_keys(seeds: _UINT64, output_indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Return one 64-bit key per draw as two int32, shape [n, 2].

    Args:
        seeds: uint64, shape [n].
        output_indices: position of the token to draw within its request's output, from 0, shape [n].
    Source: splitmix64 (Steele, Lea, Flood 2014).
    """
    keys = _mix64(_mix64(seeds + np.uint64(0x9E3779B97F4A7C15)) ^ output_indices.astype(np.uint64))
    return keys.view(np.int32).reshape(len(seeds), 2)


def _mix64(values: _UINT64) -> _UINT64:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def gumbel(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise, float32, of the broadcast shape.

    The argmax of logits plus this noise is a draw from their softmax (the Gumbel-max trick). It is chosen over
    inverting the cumulated probabilities because last-bit differences of the logits, which come with another batch,
    then change the outcome only where two candidates tie to the last bit.

    Args:
        keys: from `noise_keys`, int32, shape [n, 2].
        token_ids: int32, shape [1 or n, num_candidates].
    Source: the integer hash is lowbias32 (Wellons, "Prospecting for hash functions"), keyed before and inside.
    """
    bits = (token_ids * _GOLDEN_32) ^ keys[:, :1]
    _xor_shift(bits, 16)
    bits.mul_(_MULTIPLY_1)
    bits.bitwise_xor_(keys[:, 1:])
    _xor_shift(bits, 15)
    bits.mul_(_MULTIPLY_2)
    _xor_shift(bits, 16)
    # Small uniforms, where float32 is finest, make the large noise that decides the argmax.
    uniform = bits.bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _xor_shift(bits: torch.Tensor, shift: int) -> None:
    """bits ^= bits >> shift in place, the shift filling with zeros as on unsigned integers."""
    bits.bitwise_xor_((bits >> shift).bitwise_and_((1 << (32 - shift)) - 1))
