"""Readable prompts with a trace's shared prefixes, for servers that take text.

A trace knows lengths and prefix ids, not words. Each prefix id becomes one sentence, drawn from the id, so that equal
ids give equal text; what lies behind the last id is drawn from the request's own number. Common English words are one
token each for most tokenizers, so a text has about as many tokens as words; what it really has, the server says.
"""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt

from expediter.sim.trace import Trace

_TEXT = (
    "the people of this small town open their market early when light comes over water and every old house near "
    "river keeps its door wide for friends who bring fresh bread milk fruit or news from places far away some talk "
    "about weather others ask what price was paid last week children run between tables while their parents choose "
    "white paper blue cloth green glass and good wood before noon most work is done then music starts slow at first "
    "later with many voices one man tells how he built a boat by hand another woman reads letters sent long ago they "
    "listen laugh think remember walk home again under trees where evening air feels cool until night falls"
)
_WORDS = _TEXT.split()


def _sentence(seed: int, num_words: int) -> list[str]:
    draw = random.Random(seed)  # noqa: S311 - words to fill a prompt, no secret
    words = draw.choices(_WORDS, k=max(num_words - 1, 1))
    words[0] = words[0].capitalize()
    if num_words > 1:
        words[-1] += "."
    return words


def prompt_text(number: int, num_words: int, prefix_ids: npt.NDArray[np.int64] | list[int], words_per_id: int) -> str:
    """Return a prompt of about `num_words` tokens; equal leading `prefix_ids` give an equal beginning.

    Args:
        number: of the request; draws what no other request shares.
        words_per_id: tokens that a prefix id stands for.
    """
    words: list[str] = []
    left = num_words
    for prefix_id in prefix_ids:
        if left < words_per_id:
            break
        words += _sentence(2 * int(prefix_id), words_per_id)
        left -= words_per_id
    if left > 0:
        words += _sentence(2 * number + 1, left)
    return " ".join(words)


def trace_texts(trace: Trace, length_scale: float) -> list[str]:
    """Return a prompt per request of the trace, lengths times `length_scale`, prefixes shared as in the trace."""
    words_per_id = max(1, round(trace.prefix_block_tokens * length_scale))
    texts: list[str] = []
    for row in range(len(trace)):
        ids = trace.prefix_ids[trace.prefix_offsets[row] : trace.prefix_offsets[row + 1]]
        texts.append(prompt_text(row, max(1, round(int(trace.input_tokens[row]) * length_scale)), ids, words_per_id))
    return texts
