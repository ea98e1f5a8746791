"""The backends behind the door: who there is, who gets a request, and what came of it.

Each model has a fleet and a router of its own; a backend that serves several is in several fleets, with one load. What
was sent where is kept in one index for all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from expediter.control.draining import is_hopeless
from expediter.control.health import Failure, FleetHealth, HealthConfig
from expediter.control.kv_contents import News
from expediter.control.routing.base import Candidate, Placement
from expediter.control.routing.build import RoutingConfig
from expediter.core.errors import ConfigurationError
from expediter.core.ports import Clock
from expediter.core.request import Request, TokenArray
from expediter.gateway.backends.backend import (
    Backend,
    BackendStatus,
    Chosen,
    Dispatch,
    Ending,
    Kind,
    Reported,
)
from expediter.gateway.backends.config import Address, BackendConfig
from expediter.gateway.backends.fleets import ModelFleets
from expediter.gateway.backends.prompts import PromptSource, token_ids
from expediter.gateway.backends.sharing import Placed, SharedLoads
from expediter.gateway.backends.speeds import Speeds
from expediter.telemetry.exchanges import BackendEvents

if TYPE_CHECKING:  # an extra: only models with a tokenizer need it
    from expediter.engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

DEFAULT_ROUTING: Final = RoutingConfig(name="predicted_ttft", keep_sessions=True, index_block_tokens=128)
"""Of a server with backends."""
_OWN_ADDRESS: Final = Address("localhost", 0)


class Busy(NamedTuple):
    """Everybody who is up has as many requests as it takes: wait for `Backends.on_room`."""


class NobodyUp(NamedTuple):
    """Nobody can take the request now, and waiting for room would not help.

    Attributes:
        retry_after_s: when somebody is probed next, at least.
    """

    retry_after_s: float
    message: str = "no backend is up"


def _tokenizer(config: BackendConfig) -> Tokenizer:
    try:
        from expediter.engine.tokenizer import Tokenizer  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigurationError(f"backend {config.url!r}: tokenizer needs pip install 'expediter[engine]'") from error
    return Tokenizer.from_folder(Path(config.tokenizer))


def _nothing() -> None:
    """Nobody waits for room."""


def _always(_: float) -> bool:
    """Nobody bounds retries."""
    return True


def _nobody(_: Backend) -> None:
    """Nobody minds."""


class Backends:
    """All backends of one door; lives on its event loop, in one thread.

    Args:
        routing: of every model.
        environment: where backends' keys are, by the names in their configurations.
        events: hears of ejections and probes.
        shared: with the other processes of this gateway; None if it is the only one.
        seed: of jitter; None to draw one, so that processes differ.
    Attributes:
        on_room: called when a backend takes requests again that did not: it had no room, or was not up.
        on_ejected: called when a backend is ejected that was in use; what waits there for its first byte may be sent
            elsewhere.
        on_placed: called at each dispatch with a message for `placed_elsewhere` of the other processes; None if there
            are none.
        can_retry: whether a request that begins now could be tried again if it fails; if not, it is rather not used to
            find out whether a backend is well again.
        on_gone: called when a backend is removed; who keeps connections to it closes those that are idle.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        routing: RoutingConfig = DEFAULT_ROUTING,
        health: HealthConfig | None = None,
        environment: Mapping[str, str] | None = None,
        events: BackendEvents | None = None,
        shared: SharedLoads | None = None,
        seed: int | None = None,
    ) -> None:
        self.on_room: Callable[[], None] = _nothing
        self.on_ejected: Callable[[Backend], None] = _nobody
        self.on_gone: Callable[[Backend], None] = _nobody
        self.on_placed: Callable[[bytes], None] | None = None
        self.can_retry: Callable[[float], bool] = _always
        self.health = FleetHealth(health or HealthConfig(), np.random.default_rng(seed))
        self._clock = clock
        self._fleets = ModelFleets(routing, self.health)
        self._speeds = Speeds(self._fleets.say_speed)
        self._environment = environment or {}
        self._events = events
        self._shared = shared
        self._backends: dict[int, Backend] = {}
        self._texts: dict[str, Tokenizer] = {}
        self._next_id = 0

    # ---- who there is

    @property
    def models(self) -> list[str]:
        """All models that somebody serves, in the order in which they were found."""
        return self._fleets.models

    def knows(self, model: str) -> bool:
        return self._fleets.knows(model)

    def __iter__(self) -> Iterator[Backend]:
        return iter(self._backends.values())

    def named(self, name: str) -> Backend | None:
        return next((backend for backend in self if backend.name == name), None)

    def add(self, config: BackendConfig) -> Backend:
        """Take a backend in. It gets requests as soon as its models are known, at once if the configuration says them.

        Raises:
            ConfigurationError: its name is taken, the variable with its key is not set, its tokenizer cannot be read,
                or what its KV events need is not installed.
        """
        if config.kv_events and find_spec("zmq") is None:
            raise ConfigurationError(f"backend {config.url!r}: kv_events needs pip install 'expediter[kv-events]'")
        authorization = None
        if config.api_key_env:
            key = self._environment.get(config.api_key_env, "")
            if not key:
                raise ConfigurationError(f"backend {config.url!r}: {config.api_key_env} is not set")
            authorization = f"Bearer {key}".encode()
        if config.tokenizer and config.tokenizer not in self._texts:
            self._texts[config.tokenizer] = _tokenizer(config)
        backend = self._enter(config, config.shown_name, config.address)
        backend.authorization = authorization
        self.serves(backend, config.models)
        return backend

    def add_own(
        self,
        name: str,
        models: Iterable[str],
        is_ready: Callable[[], bool],
        *,
        up_in_s: Callable[[], float] | None = None,
        max_requests: int | None = None,
    ) -> Backend:
        """Take in the pool of our own replicas, which counts as one backend and is never ejected.

        Args:
            is_ready: whether it takes requests.
            up_in_s: when it is likely to take some if it does not.
            max_requests: most at once; None for no limit.
        """
        backend = self._enter(BackendConfig(url="unix:/own"), name, _OWN_ADDRESS)
        backend.kind, backend.is_ready, backend.up_in_s = Kind.OWN, is_ready, up_in_s
        backend.max_requests = max_requests
        self.serves(backend, tuple(models))
        return backend

    def drain(self, backend: Backend) -> None:
        """Send a backend no new requests; what is in flight goes on."""
        backend.is_draining = True
        self._fleets.sync(backend)

    def remove(self, backend: Backend) -> None:
        """Forget a backend; what is in flight there goes on, and counts for nothing."""
        backend.is_draining = True
        self.serves(backend, ())
        self.health.leave(backend.replica_id)
        self._speeds.leave(backend)
        if self._backends.pop(backend.replica_id, None) is not None:
            self._fleets.forget(backend)
            self.on_gone(backend)

    def serves(self, backend: Backend, models: Sequence[str]) -> None:
        """Say which models a backend serves now."""
        if backend.replica_id not in self._backends:
            return
        texts = self._texts.get(backend.config.tokenizer)
        if self._fleets.serves(backend, models, texts) and not backend.is_draining:
            self.on_room()

    def limits(self, backend: Backend, *, max_kv_tokens: int | None) -> None:
        """Say what a backend's KV cache holds, in its own tokens."""
        if max_kv_tokens is None or max_kv_tokens == backend.profile.max_kv_tokens:
            return
        backend.profile = replace(backend.profile, max_kv_tokens=max_kv_tokens)
        self._hold(backend, max_kv_tokens)

    def reported(self, backend: Backend, reported: Reported | None) -> None:
        """Say what a backend's metrics said, or None that they are too old to count."""
        backend.reported = reported
        self._fleets.mark(backend)

    def holds(self, backend: Backend, num_tokens: int, *, has_dropped: bool) -> None:
        """Say what a backend's cache holds, in its own tokens; once it drops something, it holds no more than that."""
        backend.num_cache_tokens = num_tokens
        if has_dropped:
            self._hold(backend, num_tokens)

    def kv_news(self, backend: Backend, news: News) -> None:
        """Take in what a backend's KV events say of prompts of the model that it serves first."""
        if news.is_lost:
            self.forget_prefixes(backend)
        if self.kv_root(backend) is not None:
            model = backend.models[0]
            for keys in news.stored:
                self._fleets.note(backend, model, keys)
            self._fleets.drop(backend, model, news.dropped)

    def kv_root(self, backend: Backend) -> int | None:
        """Return the number of the empty prefix of the model that a backend serves first.

        None if its prompts are not compared by token ids, or the backend serves nothing yet.
        """
        if not backend.models or self._fleets.texts(backend.models[0]) is None:
            return None
        return self._fleets.root(backend.models[0])

    def prompt_tokens(self, model: str, prompt: PromptSource) -> TokenArray:
        """Return a prompt as it is compared and counted for a model: its token ids where they can be known."""
        texts = self._fleets.texts(model)
        tokens = None if texts is None else token_ids(texts, prompt)
        return prompt.prompt_tokens() if tokens is None else tokens

    def forget_prefixes(self, backend: Backend) -> None:
        """Say that a backend's cache is empty."""
        if backend.replica_id in self._backends:
            self._fleets.forget(backend)

    def _hold(self, backend: Backend, num_tokens: int) -> None:
        if backend.replica_id in self._backends:
            self._fleets.limit(backend, round(num_tokens * self._speeds.tokens_ratio(backend)))

    # ---- requests

    def choose(
        self, request: Request, model: str, now_s: float, *, excluded: Container[int] = ()
    ) -> Chosen | Busy | NobodyUp:
        """Return who gets a request. Whoever is chosen is taken to get it: say so with `dispatched` at once.

        Args:
            request: its prompt in whatever tokens the door counts in.
            excluded: numbers of backends that have failed it already.
        Cost: some 20 microseconds with four backends; see docs/routing.md.
        """
        if not self._fleets.knows(model):
            return NobodyUp(1.0, "no backend serves this model")
        if self._shared is not None:
            self.look_around()
        if self.health.awaits_trials and not excluded:
            tried = self._fleets.on_trial(request, model, now_s, can_retry=self.can_retry(now_s))
            if tried is not None:
                chosen = self._chosen(tried, request, model)
                predicted_s = chosen.predicted_ttft_s
                if predicted_s is None or not is_hopeless(request, predicted_s, now_s):
                    return chosen
        decision = self._fleets.route(request, model, now_s, excluded)
        if decision is None:
            if self._fleets.is_full(model, excluded):
                return Busy()
            return NobodyUp(min((self._back_in_s(each, now_s) for each in self._fleets.members(model)), default=1.0))
        return self._chosen(decision, request, model)

    def _chosen(self, decision: Placement, request: Request, model: str) -> Chosen:
        backend = self._backends[decision.replica_id]
        speed, num_cached, predicted_s = backend.profile.speed, decision.num_cached_tokens, None
        if speed.is_known:
            own_s = speed.prefill_s(request.num_prompt_tokens - num_cached, num_cached)
            predicted_s = self._fleets.queue_s(model, backend) + own_s
        return Chosen(backend, decision, model, predicted_s)

    def _back_in_s(self, backend: Backend, now_s: float) -> float:
        """Return in how many seconds a backend that cannot be chosen may take requests."""
        return self.health.back_in_s(backend.replica_id, now_s) if backend.up_in_s is None else backend.up_in_s()

    def dispatched(self, chosen: Chosen, request: Request, now_s: float, *, is_stream: bool) -> Dispatch:
        """Count a request where it goes, before a byte of it is sent."""
        backend, num_tokens = chosen.backend, request.num_prompt_tokens
        num_new = num_tokens - chosen.decision.num_cached_tokens
        dispatch = Dispatch(
            backend=backend,
            model=chosen.model,
            is_stream=is_stream,
            at_s=now_s,
            num_tokens=num_tokens,
            num_new=num_new,
            num_ahead=backend.num_pending_tokens,
            num_beside=backend.num_running,
            is_trial=(self.health.num_out > 0 or self.health.awaits_trials) and self.health.began(backend.replica_id),
            predicted_ttft_s=chosen.predicted_ttft_s,
            book=self,
            progress_s=now_s,
        )
        if not backend.live:
            backend.progress_s = now_s
        backend.live.add(dispatch)
        backend.num_dispatched += 1
        backend.num_pending_tokens += num_new
        backend.num_context_tokens += num_tokens
        self._fleets.dispatched(backend)
        if self._shared is not None:
            self._shared.publish(backend.name, backend.counts)
        if self.on_placed is not None:
            self.on_placed(Placed(chosen.model, backend.name, self._fleets.keys(chosen.model, request)).message())
        if not backend.has_room:
            self._fleets.sync(backend)
        return dispatch

    def look_around(self) -> None:
        """See what the other processes have dispatched and ended since the last look."""
        if self._shared is None:
            return
        for backend in self:
            counts = self._shared.others(backend.name)
            if counts != backend.elsewhere:
                had_room, backend.elsewhere = backend.has_room, counts
                self._fleets.mark(backend)
                if backend.has_room != had_room:
                    self._fleets.sync(backend)
                    if not had_room:
                        self.on_room()

    def placed_elsewhere(self, message: bytes) -> None:
        """Note where another process has sent a prompt; what is no such message changes nothing."""
        placed = Placed.of(message)
        backend = None if placed is None else self.named(placed.backend)
        if placed is not None and backend is not None and placed.model in backend.models:
            self._fleets.note(backend, placed.model, placed.keys)

    def answered(self, dispatch: Dispatch, now_s: float) -> None:
        """Hear of a dispatch's first byte; called by the dispatch."""
        backend = dispatch.backend
        backend.progress_s = now_s
        if dispatch.is_stream:
            self.settle(dispatch)
        self._heard(backend, self.health.answered, now_s)

    def over(self, dispatch: Dispatch, ending: Ending, now_s: float) -> None:
        """Hear that a dispatch has ended; called by the dispatch, once."""
        backend, failure = dispatch.backend, ending.failure
        had_room = backend.has_room
        backend.live.discard(dispatch)
        backend.num_context_tokens -= dispatch.num_tokens
        if dispatch.is_settled:
            backend.num_answered -= 1
        else:
            backend.num_pending_tokens -= dispatch.num_new
        self._changed(backend)
        if (
            dispatch.is_trial
            and self._events is not None
            and (failure is not None or dispatch.first_byte_s is not None)
        ):
            self._events.probed(backend.name, succeeded=failure is None)
        if failure is not None:
            backend.outcomes[failure.value] += 1
            is_foreign = not backend.is_own  # whose supervisor knows how they are, and says so by `is_ready`
            if is_foreign and self.health.failed(backend.replica_id, failure, now_s, is_trial=dispatch.is_trial):
                self.ejected(backend, failure)
        else:
            assert ending.outcome is not None
            backend.outcomes[ending.outcome.value] += 1
            if dispatch.first_byte_s is not None:
                backend.progress_s = now_s
                self._heard(backend, self.health.succeeded, now_s)
                self._speeds.learn(dispatch, ending.usage)
            elif dispatch.is_trial:
                self.health.abandoned(backend.replica_id)
        if not had_room and not backend.is_draining:
            self._fleets.sync(backend)
            self.on_room()

    def settle(self, dispatch: Dispatch) -> None:
        """Take a dispatch's prompt off what is pending, once: it is computed, for all we know."""
        if not dispatch.is_settled and not dispatch.is_over:
            dispatch.is_settled = True
            dispatch.backend.num_pending_tokens -= dispatch.num_new
            dispatch.backend.num_answered += 1
            self._changed(dispatch.backend)

    def look_at_the_clock(self, now_s: float) -> None:
        """Settle what must have been computed by now, and think of speeds what is to be thought by now."""
        for backend in self:
            for dispatch in backend.live:
                expected_s = dispatch.predicted_ttft_s
                # The first byte of a plain response comes with its last.
                if not dispatch.is_stream and expected_s is not None and now_s >= dispatch.at_s + expected_s:
                    self.settle(dispatch)
        if self.health.awaits_trials:
            self.on_room()  # who waits because all others are full may be tried there
        self._speeds.compare(now_s)

    def _changed(self, backend: Backend) -> None:
        """Say that what we have at a backend has changed."""
        self._fleets.mark(backend)
        if self._shared is not None:
            self._shared.publish(backend.name, backend.counts)

    # ---- health

    def ejected(self, backend: Backend, failure: Failure) -> None:
        """Hear that a backend that was in use is ejected."""
        logger.warning("backend %s is ejected: %s", backend.name, failure.value)
        if self._events is not None:
            self._events.ejected(backend.name)
        if failure is Failure.CONNECT:
            # Its process is gone, and its cache with it; whoever comes in its place may be faster or slower.
            self.forget_prefixes(backend)
            self._speeds.begin_anew(backend)
        self._fleets.sync(backend)
        self.on_ejected(backend)

    def probed(self, backend: Backend, failure: Failure | None, now_s: float) -> None:
        """Hear how a probe of a backend went."""
        is_trial = not self.health.serves(backend.replica_id)
        if is_trial and self._events is not None:
            self._events.probed(backend.name, succeeded=failure is None)
        if failure is None:
            self._heard(backend, lambda replica_id, at_s: self.health.probed(replica_id, None, at_s), now_s)
        elif self.health.probed(backend.replica_id, failure, now_s):
            self.ejected(backend, failure)

    def doubt(self, backend: Backend, now_s: float) -> None:
        """Say that a backend with requests has been silent for too long: a probe is due."""
        self.health.doubt(backend.replica_id, now_s)

    def due_probes(self, now_s: float) -> list[Backend]:
        """Return who is to be probed now; `probed` must follow for each."""
        due = [self._backends[replica_id] for replica_id in self.health.due_probes(now_s)]
        for backend in due:
            if backend.is_own:  # its supervisor knows how it is
                self.health.probed(backend.replica_id, None, now_s)
        return [backend for backend in due if not backend.is_own]

    def _heard(self, backend: Backend, tell: Callable[[int, float], object], now_s: float) -> None:
        """Tell something good; if that brings the backend back, there is room."""
        was_out = self.health.num_out
        did_serve = not was_out or self.health.serves(backend.replica_id)
        tell(backend.replica_id, now_s)
        if self.health.num_out < was_out:
            if not did_serve:
                logger.info("backend %s is up again", backend.name)
            self._fleets.sync(backend)
            self.on_room()

    def _enter(self, config: BackendConfig, name: str, address: Address) -> Backend:
        if self.named(name) is not None:
            raise ConfigurationError(f"there is a backend {name!r} already")
        taken = {each.slot for each in self}
        slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
        backend = Backend(self._next_id, slot, config, name, address, max_requests=config.max_requests)
        self._next_id += 1
        self._backends[backend.replica_id] = backend
        self._speeds.join(backend)
        self.health.join(backend.replica_id, self._clock.now())
        return backend

    # ---- what there is to see

    def names(self, candidates: Iterable[Candidate]) -> tuple[str, ...]:
        """Return the names of those that were compared; "" for one that is gone."""
        here = self._backends
        return tuple([here[each.replica_id].name if each.replica_id in here else "" for each in candidates])

    @property
    def index_bytes(self) -> int:
        """Memory of the index of prefixes."""
        return self._fleets.index_bytes

    def status(self) -> list[BackendStatus]:
        """Return what there is to know of each backend."""
        return [self._status(backend) for backend in self]

    def _status(self, backend: Backend) -> BackendStatus:
        num_known_tokens = self._fleets.num_known_tokens(backend)
        return BackendStatus.of(backend, self._state(backend), num_known_tokens, self._clock.now())

    def _state(self, backend: Backend) -> str:
        if backend.is_draining:
            return "draining"
        if not backend.models:
            return "unknown"
        if backend.is_ready is not None:
            return "up" if backend.is_ready() else "ejected"
        return "up" if self.health.serves(backend.replica_id) else self.health.state(backend.replica_id).value
