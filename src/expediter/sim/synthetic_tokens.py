"""Token ids for requests whose text is unknown: equal exactly where a prefix is meant to be shared, and nowhere else.

A token is two bits of domain and 29 bits of payload. Within a domain the payload is (number * odd + position) modulo
2**29, and multiplication with an odd number permutes the residues; two tokens of one domain at one position are
therefore equal exactly when their numbers are. Prompts that share ids share tokens; no other two requests ever do, so a
simulated cache has no false hit. The ids are no vocabulary's: only their equality means something.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from expediter.core.request import TokenArray

_PAYLOAD_MASK: Final = (1 << 29) - 1
_ODD: Final = 0x1E3779B1 | 1  # spreads neighbouring numbers over the payload; any odd number is correct
MAX_NUMBERS: Final = 1 << 29
"""Distinct ids, or requests, that can be told apart."""
VOCAB_SIZE: Final = 3 << 29
"""Synthetic tokens lie in [0, VOCAB_SIZE)."""

_SHARED: Final = 0
_TAIL: Final = 1 << 29
_OUTPUT: Final = 2 << 29


def prompt_tokens(number: int, num_tokens: int, prefix_ids: npt.NDArray[np.int64], block_tokens: int) -> TokenArray:
    """Return a prompt: blocks named by `prefix_ids`, then a tail that no other request has.

    Args:
        number: of the request, unique in its trace.
        num_tokens: length of the prompt; ids beyond it are cut.
        prefix_ids: int64 in [0, MAX_NUMBERS), shape [num_blocks].
        block_tokens: tokens per id.
    Returns:
        int32, shape [num_tokens].
    """
    num_shared = min(len(prefix_ids) * block_tokens, num_tokens)
    tokens = np.empty(num_tokens, np.int32)
    if num_shared:
        bases: TokenArray = (prefix_ids * _ODD & _PAYLOAD_MASK).astype(np.int32)[:, None]
        blocks: TokenArray = np.add(bases, np.arange(block_tokens, dtype=np.int32))
        blocks &= _PAYLOAD_MASK
        tokens[:num_shared] = blocks.ravel()[:num_shared]
    if num_shared < num_tokens:
        tail: TokenArray = np.arange(num_shared, num_tokens, dtype=np.int32)
        tail += number * _ODD & _PAYLOAD_MASK
        tail &= _PAYLOAD_MASK
        tail |= _TAIL
        tokens[num_shared:] = tail
    return tokens


def output_base(number: int) -> int:
    """Return the base of a sequence's output tokens; see `output_tokens`."""
    return number * _ODD & _PAYLOAD_MASK


def output_tokens(bases: npt.NDArray[np.int32], positions: npt.NDArray[np.int32], num_steps: int) -> TokenArray:
    """Return output tokens of successive steps.

    Args:
        bases: `output_base` of each sequence, shape [n].
        positions: in the sequence, prompt included, of its first output token here, shape [n].
    Returns:
        int32, shape [num_steps, n].
    """
    tokens: TokenArray = np.arange(num_steps, dtype=np.int32)[:, None] + (bases + positions)
    tokens &= _PAYLOAD_MASK
    tokens |= _OUTPUT
    return tokens
