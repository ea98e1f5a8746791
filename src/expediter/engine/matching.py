"""The grammars' masks: made by threads while the model computes, so that the step waits for them only if they are late.

Making a mask takes some 10 to 100 microseconds as a rule. A grammar can be written so that one takes much longer: such
a one is given up, with the request that brought it, and the thread that is stuck in it is left behind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from expediter.core.request import Grammar
from expediter.engine.structured import CompiledGrammars, readable

MaskArray = npt.NDArray[np.uint8]
"""Allowed tokens, uint8, shape [num_rows, 4 * ceil(vocab_size / 32)]: token t is bit t % 8 of byte t // 8."""

_PATIENCE_S: Final = 1.0
"""For one mask, or for the replay of one output. llguidance's own limits end nearly all of them within 0.1 s."""
_MIN_ROWS_PER_THREAD: Final = 4
"""Below it, handing rows to one more thread costs more than it gains."""


class Matchers:
    """What each slot's grammar allows next.

    Args:
        grammars: prepared ones.
        vocab_size: of the logits.
        num_threads: that make masks.
        patience_s: for one mask.
    """

    def __init__(
        self, grammars: CompiledGrammars, vocab_size: int, num_threads: int, *, patience_s: float = _PATIENCE_S
    ) -> None:
        self._grammars = grammars
        self._num_mask_bytes = -(-vocab_size // 32) * 4
        self._num_threads = num_threads
        self._patience_s = patience_s
        self._pool = self._new_pool()
        self._jobs: list[_Job] = []
        self._of_slot: dict[int, _Sequence] = {}

    def admit(self, slot: int, grammar: Grammar, output: Sequence[int]) -> None:
        """Give the slot to a sequence, which may have output already: its matcher is brought to where that ends."""
        sequence = self._of_slot[slot] = _Sequence(self._num_mask_bytes)
        begin = partial(sequence.begin, partial(self._grammars.matcher, grammar), list(output))
        self._submit([(sequence, begin)])

    def advance(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Record the token that each of these sequences was given; their next masks are made meanwhile."""
        sequences = [self._of_slot[slot] for slot in slots]
        work: list[_Work] = [
            (sequence, partial(sequence.go_on, token)) for sequence, token in zip(sequences, tokens, strict=True)
        ]
        num_jobs = min(self._num_threads, -(-len(work) // _MIN_ROWS_PER_THREAD))
        for number in range(num_jobs):
            self._submit(work[number::num_jobs])

    def masks(self, slots: Sequence[int]) -> tuple[MaskArray, dict[int, str]]:
        """Return the mask of each slot, and by row what went wrong; such a row's mask means nothing."""
        sequences = [self._of_slot[slot] for slot in slots]
        for sequence in sequences:
            while not sequence.is_ready and not sequence.error:
                self._wait(sequence.job)
        errors = {row: sequence.error for row, sequence in enumerate(sequences) if sequence.error}
        return np.stack([sequence.mask for sequence in sequences]), errors

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _new_pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._num_threads, "matcher")

    def _submit(self, work: list[_Work]) -> None:
        job = _Job(work)
        self._jobs = [other for other in self._jobs if not other.future.done()]
        self._jobs.append(job)
        for sequence, _ in work:
            sequence.is_ready, sequence.job = False, job
        job.future = self._pool.submit(job.run)

    def _wait(self, job: _Job) -> None:
        try:
            job.future.result(self._patience_s / 2)
        except TimeoutError:
            self._leave_behind()

    def _leave_behind(self) -> None:
        """Give up what threads are stuck in, and have others do what lies behind it; who gets on is left alone."""
        since_s = time.monotonic() - self._patience_s
        stuck = [job for job in self._jobs if job.is_stuck(since_s)]
        if not stuck:
            return
        old, self._pool = self._pool, self._new_pool()
        moved = [job for job in self._jobs if job in stuck or not job.has_begun]
        self._jobs = [job for job in self._jobs if job not in moved]
        for job in moved:
            rest = job.abandon()
            if rest:
                self._submit(rest)
        old.shutdown(wait=False)


class _Sequence:
    """A sequence's matcher and mask. One thread at a time works on it, and nobody looks until it is ready."""

    __slots__ = ("error", "is_ready", "job", "mask", "matcher")

    matcher: LLMatcher
    job: _Job

    def __init__(self, num_mask_bytes: int) -> None:
        self.mask: npt.NDArray[np.uint8] = np.zeros(num_mask_bytes, np.uint8)
        self.error = ""
        self.is_ready = False

    def begin(self, new_matcher: Callable[[], LLMatcher], output: list[int]) -> None:
        self.matcher = new_matcher()
        if output:
            self.matcher.consume_tokens(output)
        self._make_mask()

    def go_on(self, token: int) -> None:
        self.matcher.consume_token(token)
        self._make_mask()

    def _make_mask(self) -> None:
        self.matcher.unsafe_compute_mask_ptr(self.mask.ctypes.data, self.mask.nbytes)
        if self.matcher.is_error():
            self.error = f"the output cannot follow the grammar any further: {readable(self.matcher.get_error())}"
        self.is_ready = True


_Work = tuple[_Sequence, Callable[[], None]]


class _Job:
    """Work on several sequences, one after the other, in one thread."""

    __slots__ = ("_began_s", "_index", "_is_abandoned", "_lock", "_work", "future")

    future: Future[None]

    def __init__(self, work: list[_Work]) -> None:
        self._work = work
        self._index = -1
        self._began_s = 0.0
        self._is_abandoned = False
        self._lock = threading.Lock()

    @property
    def has_begun(self) -> bool:
        return self._index >= 0

    def is_stuck(self, since_s: float) -> bool:
        """Whether it has been busy with one sequence since then, by the monotonic clock."""
        with self._lock:
            return self.has_begun and self._began_s < since_s and not self.future.done()

    def run(self) -> None:
        for index, (sequence, step) in enumerate(self._work):
            with self._lock:
                if self._is_abandoned:
                    return
                self._index, self._began_s = index, time.monotonic()
            try:
                step()
            except BaseException as error:  # a panic of llguidance is no Exception; only this request fails
                sequence.error = f"the output cannot follow the grammar: {readable(str(error))}"

    def abandon(self) -> list[_Work]:
        """Fail the sequence that the job is busy with, if it has begun; return what it has not come to."""
        with self._lock:
            self._is_abandoned = True
            begun = self._index
        if begun >= 0:
            sequence, _ = self._work[begun]
            if not sequence.is_ready and not sequence.error:
                sequence.error = "the grammar takes too long to follow"
        return self._work[begun + 1 :]
