"""The command that gives the same answer again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import pairwise

_LEFT_OUT = ("--html", "--json", "--workers")


def command_again(words: Sequence[str], html: str) -> str:
    """Return the command as it was given, but for what changes nothing in the answer.

    Args:
        words: all words behind `expediter`.
        html: name for the page that it shall write.
    """
    kept = [
        word
        for before, word in pairwise(["expediter", *words])
        if before not in _LEFT_OUT and word.partition("=")[0] not in _LEFT_OUT
    ]
    return shlex.join(["expediter", *kept, "--html", html])
