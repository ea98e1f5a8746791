"""How fast each backend is, learned from what it was sent and when it answered."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from expediter.control.learning import Answer, LearnedTtft, Rivals
from expediter.control.speed import Speed
from expediter.gateway.backends.backend import Backend, Dispatch, Usage

_SMOOTHING: Final = 0.05
_A_PROMPT: Final = 512.0
_LEARN_EVERY_S: Final = 0.05
"""Per backend, once its speed is known: however many answer, learning costs next to nothing."""
_COMPARE_EVERY_S: Final = 0.05
_COMPARE_ONE_EVERY_S: Final = 1e-3
"""Comparing costs more than learning: some 40 us for each backend, so it is done the less often the more there are."""


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
        self._compare_s = 0.0

    def join(self, backend: Backend) -> None:
        self._learners[backend.replica_id] = _Learner(backend)

    def leave(self, backend: Backend) -> None:
        self._learners.pop(backend.replica_id, None)

    def begin_anew(self, backend: Backend) -> None:
        """Forget how fast a backend was: another process answers there from now on."""
        learner = self._learners.get(backend.replica_id)
        if learner is not None:
            learner.learned = LearnedTtft()
            self._compare_s = 0.0

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
        self.compare(dispatch.first_byte_s)

    def compare(self, now_s: float) -> None:
        """Say what to think of everybody, as seen beside its rivals, unless that was done a moment ago.

        Those who differ by no more than what is learned may be wrong by are taken to be equally fast. Who was slow and
        has said nothing for long looks better with time, and who is new looks like the fastest: so both are tried.
        """
        if now_s < self._compare_s:
            return
        self._compare_s = now_s + max(_COMPARE_EVERY_S, _COMPARE_ONE_EVERY_S * len(self._learners))
        known = {each: each.learned.speed() for each in self._learners.values() if each.learned.is_enough}
        if not known:
            return
        for models, those in self._by_models().items():
            serving = [speed for each, speed in known.items() if not models.isdisjoint(each.backend.models)]
            rivals = Rivals(serving, self._typical_tokens)
            for learner in those:
                own = known.get(learner)
                if own is not None:
                    _say(learner.backend, rivals.thought(own, now_s - learner.heard_s))
                elif rivals.fastest is not None:
                    _say(learner.backend, replace(rivals.fastest, is_known=False))

    def _by_models(self) -> dict[frozenset[str], list[_Learner]]:
        """Return those who serve anything by what they serve: they have the same rivals."""
        found: dict[frozenset[str], list[_Learner]] = {}
        for learner in self._learners.values():
            if learner.backend.models:
                found.setdefault(frozenset(learner.backend.models), []).append(learner)
        return found


def _say(backend: Backend, speed: Speed) -> None:
    if speed == backend.profile.speed:
        return
    backend.profile = replace(backend.profile, speed=speed)
    for seat in backend.seats:
        seat.fleet.learned(backend.replica_id, speed)
