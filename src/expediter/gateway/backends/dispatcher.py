"""Who gets a request, and the account of what was sent where: on the path of every request."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import NamedTuple

from expediter.control.draining import is_hopeless
from expediter.control.health import Failure
from expediter.control.routing.base import Placement
from expediter.core.request import Request
from expediter.gateway.backends.backend import Backend, Dispatch, Usage
from expediter.gateway.backends.health import BackendHealth
from expediter.gateway.backends.hooks import Hooks
from expediter.gateway.backends.model_fleet import ModelFleet
from expediter.gateway.backends.sharing import Sharing
from expediter.gateway.backends.speeds import Speeds
from expediter.telemetry.exchanges import Outcome


class Chosen(NamedTuple):
    """Who gets a request.

    Attributes:
        predicted_ttft_s: None as long as the backend's speed is not known.
    """

    backend: Backend
    decision: Placement
    model: str
    predicted_ttft_s: float | None


class Busy(NamedTuple):
    """Everybody who is up has as many requests as it takes: wait for `Hooks.on_room`."""


class NobodyUp(NamedTuple):
    """Nobody can take the request now, and waiting for room would not help.

    Attributes:
        retry_after_s: when somebody is probed next, at least.
    """

    retry_after_s: float
    message: str = "no backend is up"


class Dispatcher:
    """Chooses backends for requests and counts what they have; the `Book` of its dispatches.

    Args:
        backends: by number.
        fleets: by model.
        sharing: with the other processes of this gateway; None if there are none.
    """

    def __init__(
        self,
        backends: Mapping[int, Backend],
        fleets: Mapping[str, ModelFleet],
        health: BackendHealth,
        speeds: Speeds,
        hooks: Hooks,
        sharing: Sharing | None,
    ) -> None:
        self._backends = backends
        self._fleets = fleets
        self._health = health
        self._speeds = speeds
        self._hooks = hooks
        self._sharing = sharing

    # ---- before

    def choose(
        self, request: Request, model: str, now_s: float, *, excluded: Container[int] = ()
    ) -> Chosen | Busy | NobodyUp:
        """Return who gets a request. Whoever is chosen is taken to get it: say so with `dispatched` at once.

        Args:
            request: its prompt in whatever tokens the door counts in.
            excluded: numbers of backends that have failed it already.
        Cost: that of the router, and some microseconds; see docs/routing.md.
        """
        model_fleet = self._fleets.get(model)
        if model_fleet is None:
            return NobodyUp(1.0, "no backend serves this model")
        if self._sharing is not None:
            self._sharing.look(now_s)
        if self._health.judge.awaits_trials and not excluded:
            tried = model_fleet.on_trial(request, now_s, can_retry=self._hooks.can_retry(now_s))
            if tried is not None:
                chosen = self._chosen(tried, request, model, model_fleet)
                predicted_s = chosen.predicted_ttft_s
                if predicted_s is None or not is_hopeless(request, predicted_s, now_s):
                    return chosen
        decision = model_fleet.route(request, now_s, excluded)
        if decision is not None:
            return self._chosen(decision, request, model, model_fleet)
        if model_fleet.is_full(excluded):
            return Busy()
        return NobodyUp(min((self._back_in_s(each, now_s) for each in model_fleet.members.values()), default=1.0))

    def _chosen(self, decision: Placement, request: Request, model: str, model_fleet: ModelFleet) -> Chosen:
        backend = model_fleet.members[decision.replica_id]
        speed, predicted_s = backend.profile.speed, None
        if speed.is_known:
            num_cached = decision.num_cached_tokens
            own_s = speed.prefill_s(request.num_prompt_tokens - num_cached, num_cached)
            predicted_s = model_fleet.fleet.queue_s(decision.replica_id) + own_s
        return Chosen(backend, decision, model, predicted_s)

    def _back_in_s(self, backend: Backend, now_s: float) -> float:
        """Return in how many seconds a backend that cannot be chosen may take requests."""
        if backend.up_in_s is not None:
            return backend.up_in_s()
        return self._health.judge.back_in_s(backend.replica_id, now_s)

    def dispatched(self, chosen: Chosen, request: Request, now_s: float, *, is_stream: bool) -> Dispatch:
        """Count a request where it goes, before a byte of it is sent."""
        backend, decision, model, predicted_s = chosen
        num_tokens = request.num_prompt_tokens
        num_new = num_tokens - decision.num_cached_tokens
        dispatch = Dispatch(
            backend,
            model,
            is_stream,
            now_s,
            num_tokens,
            num_new,
            backend.num_pending_tokens,
            backend.num_running,
            self._health.began(backend),
            predicted_s,
            self,
            now_s,
        )
        if not backend.live:
            backend.progress_s = now_s
        backend.live.add(dispatch)
        backend.num_dispatched += 1
        backend.num_pending_tokens += num_new
        backend.num_context_tokens += num_tokens
        for seat in backend.seats:
            seat.fleet.dispatched(backend.replica_id)
        if backend.max_requests is not None and not backend.has_room:
            backend.standing_changed()
        if self._sharing is not None:
            self._sharing.dispatched(backend, model, request)
        return dispatch

    # ---- the book

    def answered(self, dispatch: Dispatch, now_s: float) -> None:
        """Hear of a dispatch's first byte."""
        backend = dispatch.backend
        backend.progress_s = now_s
        if dispatch.is_stream:
            self._settle(dispatch)
        # The end of a plain response comes with its beginning, and says as much unless somebody waits for news.
        if dispatch.is_stream or not self._health.judge.is_calm:
            self._health.answered(backend, now_s)

    def done(self, dispatch: Dispatch, outcome: Outcome, usage: Usage | None, now_s: float) -> None:
        """Hear of an end that the backend is not to blame for."""
        backend = dispatch.backend
        has_new_room = self._take_off(dispatch)
        backend.outcomes[outcome.value] += 1
        if dispatch.first_byte_s is None:
            self._health.abandoned(dispatch)
        else:
            backend.progress_s = now_s
            self._health.succeeded(dispatch, now_s)
            self._speeds.learn(dispatch, usage)
        if has_new_room:
            self._hooks.on_room()

    def failed(self, dispatch: Dispatch, failure: Failure, now_s: float) -> None:
        """Hear that a backend has failed a request."""
        has_new_room = self._take_off(dispatch)
        dispatch.backend.outcomes[failure.value] += 1
        self._health.failed(dispatch, failure, now_s)
        if has_new_room:
            self._hooks.on_room()

    def settle_expected(self, now_s: float) -> None:
        """Settle what must have been computed by now: the first byte of a plain response comes with its last."""
        for backend in self._backends.values():
            for dispatch in backend.live:
                expected_s = dispatch.predicted_ttft_s
                if not dispatch.is_stream and expected_s is not None and now_s >= dispatch.at_s + expected_s:
                    self._settle(dispatch)

    def _settle(self, dispatch: Dispatch) -> None:
        """Take a dispatch's prompt off what is pending, once: it is computed, for all we know."""
        if not dispatch.is_settled and not dispatch.is_over:
            dispatch.is_settled = True
            backend = dispatch.backend
            backend.num_pending_tokens -= dispatch.num_new
            backend.num_answered += 1
            self._load_changed(backend)

    def _take_off(self, dispatch: Dispatch) -> bool:
        """Take a dispatch off its backend's load; return whether there is room that there was not."""
        backend = dispatch.backend
        was_full = backend.max_requests is not None and not backend.has_room
        backend.live.discard(dispatch)
        backend.num_context_tokens -= dispatch.num_tokens
        if dispatch.is_settled:
            backend.num_answered -= 1
        else:
            backend.num_pending_tokens -= dispatch.num_new
        self._load_changed(backend)
        if was_full:
            backend.standing_changed()
        return was_full and not backend.is_draining

    def _load_changed(self, backend: Backend) -> None:
        backend.load_changed()
        if self._sharing is not None:
            self._sharing.load_changed(backend)
