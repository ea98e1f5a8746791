"""How a participant is asked: a line of JSON in, a line of JSON out. Standard library only, peers import it as well.

Requests: `{"case": NAME, "samples": N}`; the answer is `{"samples": [microseconds of the thread's CPU time, ...]}`. A
case is set up when it is first asked for and stays set up, so that later rounds only measure. Cases that yield a number
that is no time answer with that number.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping

Case = Callable[[int], list[float]]
"""Takes a number of samples and returns them."""

LENGTHS = (1024, 8192, 32768)
CHAIN = 32
RUNNING = (1, 16, 64, 256, 1024)
BLOCK_SIZE = 16
NUM_SEQUENCES = 10_000
DECODE_PROMPT_TOKENS = 512
VOCAB_SIZE = 30_000


def cpu_us(function: Callable[[], object]) -> float:
    """Return the CPU time of this thread that one call takes, in microseconds."""
    start = time.thread_time_ns()
    function()
    return (time.thread_time_ns() - start) / 1e3


def serve(make_cases: Mapping[str, Callable[[], Case]]) -> None:
    """Answer on standard output until standard input ends; whatever else the process prints goes to standard error.

    Args:
        make_cases: what sets each case up, by its name.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    ready: dict[str, Case] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        name = asked["case"]
        if name not in ready:
            ready.clear()  # one case at a time: a large heap of another slows this one down
            ready[name] = make_cases[name]()
        answers.write(json.dumps({"samples": ready[name](asked["samples"])}) + "\n")
        answers.flush()
