"""How fast each backend is, learned from what it was sent and when it answered."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from expediter.control.learning import Answer, LearnedTtft, alike, hopeful
from expediter.control.speed import Speed
from expediter.gateway.backends.backend import Backend, Dispatch, Usage

_SMOOTHING: Final = 0.05
_A_PROMPT: Final = 512.0
_LEARN_EVERY_S: Final = 0.05
"""Per backend, once its speed is known: however many answer, learning costs next to nothing."""
_COMPARE_EVERY_S: Final = 0.05
"""Comparing costs more than learning."""


@dataclass(slots=True, eq=False)
class _Learner:
    """What is learned of one backend.

    Attributes:
        heard_s: when it last said something about its speed that was learned.
        tokens_ratio: tokens of prompts as the door counts them for each one of its own, smoothed.
    """

    backend: Backend
    learned: LearnedTtft = field(default_factory=LearnedTtft)
    heard_s: float = 0.0
    tokens_ratio: float = 1.0


class Speeds:
    """Learns, and tells the routers what is to be thought of each backend's speed."""

    def __init__(self) -> None:
        self._learners: dict[int, _Learner] = {}
        self._typical_tokens = _A_PROMPT
        self._compared_s = -_COMPARE_EVERY_S

    def join(self, backend: Backend) -> None:
        self._learners[backend.replica_id] = _Learner(backend)

    def leave(self, backend: Backend) -> None:
        self._learners.pop(backend.replica_id, None)

    def begin_anew(self, backend: Backend) -> None:
        """Forget how fast a backend was: another process answers there from now on."""
        learner = self._learners.get(backend.replica_id)
        if learner is not None:
            learner.learned = LearnedTtft()

    def tokens_ratio(self, backend: Backend) -> float:
        """Return how many tokens of the door's there are to one of the backend's."""
        learner = self._learners.get(backend.replica_id)
        return 1.0 if learner is None else learner.tokens_ratio

    def learn(self, dispatch: Dispatch, usage: Usage | None) -> None:
        """Learn from the time until a dispatch's first byte; a plain response's says something with its usage only."""
        learner = self._learners.get(dispatch.backend.replica_id)
        if learner is None or dispatch.first_byte_s is None or (usage is None and not dispatch.is_stream):
            return
        if learner.learned.is_sure and dispatch.first_byte_s < learner.heard_s + _LEARN_EVERY_S:
            return
        learner.heard_s = dispatch.first_byte_s
        num_new, num_output = dispatch.num_new, 0
        if usage is not None:
            if usage.num_prompt_tokens > 0:
                ratio = dispatch.num_tokens / usage.num_prompt_tokens
                learner.tokens_ratio += _SMOOTHING * (ratio - learner.tokens_ratio)
                if usage.num_cached_tokens is not None:
                    share = 1 - min(1.0, usage.num_cached_tokens / usage.num_prompt_tokens)
                    num_new = round(dispatch.num_tokens * share)
            num_output = 0 if dispatch.is_stream else usage.num_output_tokens
        self._typical_tokens += _SMOOTHING * (num_new - self._typical_tokens)
        elapsed_s = dispatch.first_byte_s - dispatch.at_s
        answer = Answer(dispatch.num_ahead, num_new, dispatch.num_beside, num_output, elapsed_s)
        learner.learned.observe(answer)
        if dispatch.first_byte_s >= self._compared_s + _COMPARE_EVERY_S:
            self.compare(dispatch.first_byte_s)

    def compare(self, now_s: float) -> None:
        """Say what to think of everybody, as seen beside its rivals.

        Those who differ by no more than what is learned may be wrong by are taken to be equally fast. Who was slow and
        has said nothing for long looks better with time, and who is new looks like the fastest: so both are tried.
        """
        self._compared_s = now_s
        known = {each: each.learned.speed() for each in self._learners.values() if each.learned.is_enough}
        if not known:
            return
        for learner in self._learners.values():
            rivals = [speed for other, speed in known.items() if other is not learner and _compete(learner, other)]
            own = known.get(learner)
            if own is not None:
                _say(learner.backend, self._thought(own, rivals, now_s - learner.heard_s))
            elif rivals:
                fastest = min(rivals, key=lambda speed: speed.prefill_s(self._typical_tokens, 0) + speed.overhead_s)
                _say(learner.backend, replace(fastest, is_known=False))

    def _thought(self, own: Speed, rivals: Iterable[Speed], unheard_s: float) -> Speed:
        rivals = list(rivals)
        return alike(hopeful(own, rivals, unheard_s), rivals, self._typical_tokens)


def _say(backend: Backend, speed: Speed) -> None:
    if speed == backend.profile.speed:
        return
    backend.profile = replace(backend.profile, speed=speed)
    for seat in backend.seats:
        seat.fleet.learned(backend.replica_id, speed)


def _compete(one: _Learner, other: _Learner) -> bool:
    return not set(one.backend.models).isdisjoint(other.backend.models)
