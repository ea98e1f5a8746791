"""How fast a replica is, found out from its own steps, or from its answers where nobody sees its steps."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from expediter.control.speed import Speed
from expediter.core.plan import StepFeatures
from expediter.scheduling.least_squares import LeastSquares
from expediter.scheduling.step_time import OnlineStepTime

_FIRST_STEPS: Final = 32
_EVERY_STEPS: Final = 256


class LearnedSpeed:
    """Fits a replica's step times while it serves."""

    def __init__(self) -> None:
        self._model = OnlineStepTime()
        self._num_seen = 0

    def observe(self, step_id: int, features: StepFeatures, elapsed_s: float, budget_tokens: int) -> Speed | None:
        """Learn from a step; return the speed whenever enough is new, None in between."""
        if not self._model.wants(step_id):
            return None
        self._model.observe(features, elapsed_s)
        self._num_seen += 1
        is_due = self._num_seen % _EVERY_STEPS == 0 or self._num_seen == _FIRST_STEPS
        return Speed.of(self._model, budget_tokens) if is_due else None


class Answer(NamedTuple):
    """What one request said of a replica's speed.

    Attributes:
        num_ahead: prompt tokens that were pending there when it was sent. `num_new`: its own that had to be computed.
        num_beside: requests that were decoding there.
        num_output: tokens that were generated before the first byte came: 0 for a stream, all for a plain response.
        elapsed_s: from the dispatch to the first byte of the body.
    """

    num_ahead: int
    num_new: int
    num_beside: int
    num_output: int
    elapsed_s: float


_FIRST_ANSWERS: Final = 16
_SURE_ANSWERS: Final = 128
_FORGETTING: Final = 0.995
_PACE_RATE: Final = 0.1
_MAX_RATIO: Final = 10.0
_LEAST_S: Final = 1e-5
_MOST_S: Final = 1e5
"""What takes less or more has gone wrong, and teaches nothing."""
_STEP_SHARE: Final = 0.25
"""Without any, a short prompt would be thought to cost those who decode nothing, however many they are."""
_SCALE: Final = np.array([1.0, 1e-4, 1e-2, 1e-2])
"""Brings features near 1: constant, prompt tokens, requests beside it, output tokens."""
_LEAST_TOKEN_S: Final = 1e-9
"""A replica never computes a prompt for nothing, or it would get them all."""


def _no_idea() -> LeastSquares:
    return LeastSquares(np.zeros(len(_SCALE)), 1e4, _FORGETTING)


class LearnedTtft:
    """Fits a replica's time to the first token to what was sent there: overhead + tokens * time + decodes * time.

    Least squares on relative errors (`scheduling/least_squares.py`), as `OnlineStepTime` does with steps. What is
    fitted says how the parts compare. How fast the replica is at the moment, a smoothed ratio of what answers take to
    what was fitted says: slow answers weigh little in relative errors, and somebody else's burst shall count while it
    lasts.
    """

    def __init__(self) -> None:
        self._fit = _no_idea()
        self._fitted: list[float] = [0.0] * len(_SCALE)
        self._num_seen = 0
        self._pace = 1.0

    @property
    def is_enough(self) -> bool:
        """Whether enough was seen for `speed` to say something."""
        return self._num_seen >= _FIRST_ANSWERS

    @property
    def is_sure(self) -> bool:
        """Whether so much was seen that not every answer need be learned from."""
        return self._num_seen >= _SURE_ANSWERS

    def observe(self, answer: Answer) -> None:
        """Learn from an answer."""
        ahead, new, beside, output, elapsed_s = answer
        if not _LEAST_S <= elapsed_s <= _MOST_S:
            return
        self._num_seen += 1
        constant, token_s, decode_s, output_s = self._fitted
        expected_s = constant + (ahead + new) * token_s + beside * decode_s + output * output_s
        if self.is_enough and expected_s > 0:
            ratio = min(_MAX_RATIO, max(1 / _MAX_RATIO, elapsed_s / expected_s))
            self._pace += _PACE_RATE * (ratio - self._pace)
        self._learn(answer)

    def speed(self) -> Speed:
        """Return what is known. How much of the overhead is a step's own time cannot be told from answers; some is."""
        overhead_s, token_s, decode_s, _ = self._fitted
        overhead_s *= self._pace
        return Speed(
            step_s=overhead_s * _STEP_SHARE,
            token_s=max(_LEAST_TOKEN_S, token_s * self._pace),
            decode_s=decode_s * self._pace,
            context_s=0.0,
            budget_tokens=1 << 30,
            overhead_s=overhead_s * (1 - _STEP_SHARE),
            is_known=True,
        )

    def _learn(self, answer: Answer) -> None:
        row = np.array((1.0, answer.num_ahead + answer.num_new, answer.num_beside, answer.num_output))
        row *= _SCALE / answer.elapsed_s
        self._fit.observe(row)
        fitted: list[float] = np.maximum(self._fit.weights * _SCALE, 0.0).tolist()
        if math.isfinite(sum(fitted)):
            self._fitted = fitted
        else:  # numbers too far apart for the arithmetic: what was known stays until enough is learned anew
            self._fit = _no_idea()


_SURE_S: Final = 30.0
_ALIKE: Final = 1.4
"""Two replicas that are equal may seem to differ by so much, from what they happened to be sent."""

_Parts = tuple[float, float, float, float]


def _parts(speed: Speed) -> _Parts:
    return speed.step_s, speed.overhead_s, speed.token_s, speed.decode_s


def _with_parts(speed: Speed, parts: Sequence[float]) -> Speed:
    step_s, overhead_s, token_s, decode_s = parts
    return replace(speed, step_s=step_s, overhead_s=overhead_s, token_s=token_s, decode_s=decode_s)


def _means(speeds: Sequence[Speed]) -> list[float]:
    # fsum does not depend on the order: replicas that are alike have equal speeds to the last bit.
    return [math.fsum(column) / len(speeds) for column in zip(*map(_parts, speeds), strict=True)]


class Rivals:
    """Replicas that compete for the same requests, and what to think of the speed of each beside the others.

    *Hope:* one that was slow once gets nothing while others are free, and would never be seen to have recovered. So
    after 30 s of silence its gap to the fastest halves every 30 s, until it is tried again and says for itself.

    *Likeness:* those that hardly differ count as equally fast, as the mean of them. Otherwise the one of two equal
    replicas that seems a little faster would get every prompt that nobody holds, until its cache overflows.

    Args:
        speeds: as learned, of all who are known; they differ in what is learned only.
        num_tokens: of a typical prompt, for which they are compared.
    Cost: O(n log n) to think of all n of them where most are alike.
    """

    def __init__(self, speeds: Sequence[Speed], num_tokens: float) -> None:
        self._num_tokens = num_tokens
        self._speeds = sorted(speeds, key=self._first_s)
        self._firsts_s = [self._first_s(each) for each in self._speeds]
        self._best = [min(column) for column in zip(*map(_parts, speeds), strict=True)]
        self._mean_of: dict[tuple[int, int], Speed] = {}

    @property
    def fastest(self) -> Speed | None:
        """The one that computes a typical prompt soonest, None if nobody is known."""
        return self._speeds[0] if self._speeds else None

    def thought(self, speed: Speed, unheard_s: float) -> Speed:
        """Return what to think of one of them that has said nothing for some time.

        Args:
            speed: the very one that was given.
        """
        hoped = self._hoped(speed, unheard_s)
        first_s = self._first_s(hoped)
        place = bisect_left(self._firsts_s, first_s / _ALIKE), bisect_right(self._firsts_s, first_s * _ALIKE)
        close = self._speeds[slice(*place)]
        if hoped is not speed:
            return _with_parts(speed, _means([hoped, *(each for each in close if each is not speed)]))
        mean = self._mean_of.get(place)
        if mean is None:
            mean = self._mean_of[place] = _with_parts(speed, _means(close))
        return mean

    def _hoped(self, speed: Speed, unheard_s: float) -> Speed:
        if unheard_s <= _SURE_S:
            return speed
        kept: float = 0.5 ** ((unheard_s - _SURE_S) / _SURE_S)
        parts = zip(_parts(speed), self._best, strict=True)
        return _with_parts(speed, [min(own, best + (own - best) * kept) for own, best in parts])

    def _first_s(self, speed: Speed) -> float:
        return speed.overhead_s + speed.prefill_s(self._num_tokens, 0)
