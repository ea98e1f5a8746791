"""Skip-join multi-level feedback: short jobs first without knowing which are short."""

from __future__ import annotations

from expediter.core.request import RequestState
from expediter.scheduling.lazy_heap import Key
from expediter.scheduling.ordering.base import KeyOrdering

_FIRST_QUANTUM_TOKENS = 256
_NUM_LEVELS = 8


class FeedbackQueue(KeyOrdering):
    """Levels whose quanta double; who has used a level's quantum belongs to the next one.

    A request joins the level whose quantum covers its prompt, skipping those that its first step would use up anyway. A
    waiting request of a lower level displaces a running one of a higher level, and takes the budget before its prompt.
    Bound: a request that arrived 30 s ago goes ahead of all levels, oldest first. Source: FastServe (2305.05920), with
    tokens as the measure of service and age since arrival, not since the last turn, as that of starvation.
    """

    max_wait_s = 30.0
    is_static = False  # running requests sink while they decode
    displaces = True
    interleaves = True

    def __init__(self) -> None:
        super().__init__()
        self._clock = 0
        self._decoding_since: dict[int, int] = {}

    def level(self, state: RequestState) -> int:
        """Return the level of a request by what it has got so far, its whole prompt included."""
        since = self._decoding_since.get(state.sequence)
        running = 0 if since is None else self._clock - since
        served = state.num_known_tokens + running
        return min(_NUM_LEVELS - 1, max(0, (served - 1) // _FIRST_QUANTUM_TOKENS).bit_length())

    def key(self, state: RequestState, now_s: float) -> Key:  # noqa: ARG002 - fixed while it waits
        return (self.level(state), state.request.arrival_s)

    def outranks(self, waiting: RequestState, running: RequestState) -> bool:
        return self.level(waiting) < self.level(running)

    def tick(self, decode_clock: int) -> None:
        self._clock = decode_clock

    def joined(self, state: RequestState, decode_clock: int) -> None:
        self._clock = decode_clock
        self._decoding_since[state.sequence] = decode_clock

    def left(self, state: RequestState, decode_clock: int) -> None:
        self._clock = decode_clock
        self._decoding_since.pop(state.sequence, None)
