"""The backends behind the door: who there is, and what each of them serves.

The parts keep what else there is to know: `dispatcher` who gets requests, `health` who is well, `contents` what caches
hold, `speeds` who is how fast, `sharing` what other processes of this gateway do. Each model has a fleet and a router
of its own; a backend that serves several is in several fleets, with one load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Final

import numpy as np

from expediter.control.health import FleetHealth, HealthConfig
from expediter.control.routing.base import Candidate
from expediter.control.routing.build import RoutingConfig, make_router
from expediter.core.errors import ConfigurationError
from expediter.core.ports import Clock
from expediter.gateway.backends.backend import Backend, Kind, Reported
from expediter.gateway.backends.config import Address, BackendConfig
from expediter.gateway.backends.contents import Contents
from expediter.gateway.backends.dispatcher import Dispatcher
from expediter.gateway.backends.health import BackendHealth
from expediter.gateway.backends.hooks import Hooks
from expediter.gateway.backends.model_fleet import ModelFleet
from expediter.gateway.backends.sharing import SharedLoads, Sharing
from expediter.gateway.backends.speeds import Speeds
from expediter.gateway.backends.status import BackendStatus
from expediter.telemetry.exchanges import BackendEvents

DEFAULT_ROUTING: Final = RoutingConfig(name="predicted_ttft", keep_sessions=True, index_block_tokens=128)
"""Of a server with backends."""
_OWN_ADDRESS: Final = Address("localhost", 0)


class Backends:
    """All backends of one door; lives on its event loop, in one thread.

    Args:
        routing: of every model.
        environment: where backends' keys are, by the names in their configurations.
        events: hears of ejections and probes.
        loads: shared with the other processes of this gateway; None if it is the only one.
        seed: of jitter; None to draw one, so that processes differ.
    Attributes:
        hooks: what the door wants to hear.
        sharing: None if this process is the only one.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        routing: RoutingConfig = DEFAULT_ROUTING,
        health: HealthConfig | None = None,
        environment: Mapping[str, str] | None = None,
        events: BackendEvents | None = None,
        loads: SharedLoads | None = None,
        seed: int | None = None,
    ) -> None:
        self.hooks = Hooks()
        self.speeds = Speeds()
        self._clock = clock
        self._routing = routing
        self._environment = environment or {}
        self._backends: dict[int, Backend] = {}
        self._fleets: dict[str, ModelFleet] = {}
        self._next_id = 0
        judge = FleetHealth(health or HealthConfig(), np.random.default_rng(seed))
        self.contents = Contents(routing, self.speeds.tokens_ratio)
        self.health = BackendHealth(judge, self._backends, self.contents, self.speeds, self.hooks, events)
        self.sharing = None if loads is None else Sharing(loads, self._backends, self.contents, self.hooks)
        self.dispatcher = Dispatcher(self._backends, self._fleets, self.health, self.speeds, self.hooks, self.sharing)

    # ---- who there is

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
        self.contents.read_tokenizer(config)
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
        max_model_len: int | None = None,
    ) -> Backend:
        """Take in the pool of our own replicas, which counts as one backend and is never ejected.

        Args:
            is_ready: whether it takes requests.
            up_in_s: when it is likely to take some if it does not.
            max_requests: most at once; None for no limit.
            max_model_len: longest prompt and output together, in tokens.
        """
        backend = self._enter(BackendConfig(url="unix:/own"), name, _OWN_ADDRESS)
        backend.kind, backend.is_ready, backend.up_in_s = Kind.OWN, is_ready, up_in_s
        backend.max_requests, backend.max_model_len = max_requests, max_model_len
        self.serves(backend, tuple(models))
        return backend

    def drain(self, backend: Backend) -> None:
        """Send a backend no new requests; what is in flight goes on."""
        backend.is_draining = True
        backend.standing_changed()

    def remove(self, backend: Backend) -> None:
        """Forget a backend; what is in flight there goes on, and counts for nothing."""
        if backend.is_gone:
            return
        backend.is_draining = True
        self.serves(backend, ())
        self.contents.forget(backend)
        backend.is_gone = True
        self.health.judge.leave(backend.replica_id)
        self.speeds.leave(backend)
        del self._backends[backend.replica_id]
        self.hooks.on_gone(backend)

    def _enter(self, config: BackendConfig, name: str, address: Address) -> Backend:
        if self.named(name) is not None:
            raise ConfigurationError(f"there is a backend {name!r} already")
        taken = {each.slot for each in self}
        slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
        backend = Backend(self._next_id, slot, config, name, address, max_requests=config.max_requests)
        self._next_id += 1
        self._backends[backend.replica_id] = backend
        self.speeds.join(backend)
        self.health.judge.join(backend.replica_id, self._clock.now())
        return backend

    # ---- what they say of themselves

    @property
    def models(self) -> list[str]:
        """All models that somebody serves, in the order in which they were found."""
        return list(self._fleets)

    def knows(self, model: str) -> bool:
        return model in self._fleets

    def serves(self, backend: Backend, models: Sequence[str]) -> None:
        """Say which models a backend serves now."""
        if backend.is_gone:
            return
        before, backend.models = backend.models, tuple(dict.fromkeys(models))
        for model in before:
            if model not in backend.models:
                self._leave(model, backend)
        added = [model for model in backend.models if model not in before]
        for model in added:
            self._join(model, backend)
        backend.seats = [self._fleets[model] for model in backend.models]
        if added and not backend.is_draining:
            self.hooks.on_room()

    def limits(self, backend: Backend, max_requests: int | None) -> None:
        """Say how many requests a backend takes at once, None for no limit, unless its configuration says it."""
        if backend.config.max_requests is None and max_requests != backend.max_requests:
            backend.max_requests = max_requests
            backend.standing_changed()
            self.hooks.on_room()

    def reported(self, backend: Backend, reported: Reported | None) -> None:
        """Say what a backend's metrics said, or None that they are too old to count."""
        backend.reported = reported
        backend.load_changed()

    def _join(self, model: str, backend: Backend) -> None:
        fleet = self._fleets.get(model)
        if fleet is None:
            caches = self.contents.open(model, backend.config.tokenizer)
            fleet = self._fleets[model] = ModelFleet(make_router(self._routing, caches), self.health.judge)
        fleet.join(backend)

    def _leave(self, model: str, backend: Backend) -> None:
        fleet = self._fleets[model]
        fleet.leave(backend)
        if not fleet.members:
            del self._fleets[model]
            self.contents.close(model)

    def look_at_the_clock(self, now_s: float) -> None:
        """See to what time alone changes; to be called some times a second."""
        self.dispatcher.settle_expected(now_s)
        self.speeds.compare(now_s)
        if self.health.judge.awaits_trials:
            self.hooks.on_room()  # who waits because all others are full may be tried there

    # ---- what there is to see

    def names(self, candidates: Iterable[Candidate]) -> tuple[str, ...]:
        """Return the names of those that were compared; "" for one that is gone."""
        here = self._backends
        return tuple([here[each.replica_id].name if each.replica_id in here else "" for each in candidates])

    def status(self) -> list[BackendStatus]:
        """Return what there is to know of each backend."""
        now_s, judge = self._clock.now(), self.health.judge
        return [BackendStatus.of(each, judge, self.contents.num_known_tokens(each), now_s) for each in self]
