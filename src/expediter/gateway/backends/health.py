"""What is thought of the backends' health, and what follows from it.

What to think is decided in `control.health`; here it is told what happens, and who is ejected loses what waits there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from expediter.control.health import Failure, FleetHealth
from expediter.gateway.backends.backend import Backend, Dispatch
from expediter.gateway.backends.contents import Contents
from expediter.gateway.backends.hooks import Hooks
from expediter.gateway.backends.speeds import Speeds
from expediter.telemetry.exchanges import BackendEvents

logger = logging.getLogger(__name__)


class BackendHealth:
    """Tells what requests and probes say of backends.

    Args:
        judge: decides; whoever takes a backend in or removes it tells it so.
        backends: by number.
        events: hears of ejections and probes.
    """

    def __init__(
        self,
        judge: FleetHealth,
        backends: Mapping[int, Backend],
        contents: Contents,
        speeds: Speeds,
        hooks: Hooks,
        events: BackendEvents | None,
    ) -> None:
        self.judge = judge
        self._backends = backends
        self._contents = contents
        self._speeds = speeds
        self._hooks = hooks
        self._events = events

    # ---- requests

    def began(self, backend: Backend) -> bool:
        """Hear that a request is sent to a backend; return whether it is on trial."""
        return not self.judge.is_calm and self.judge.began(backend.replica_id)

    def answered(self, backend: Backend, now_s: float) -> None:
        """Hear the first byte of a response below 500."""
        if self.judge.is_calm:
            self.judge.answered(backend.replica_id, now_s)
        else:
            self._heard(backend, self.judge.answered, now_s)

    def succeeded(self, dispatch: Dispatch, now_s: float) -> None:
        """Hear that a request was answered to its end."""
        if dispatch.is_trial:
            self._tried(dispatch, succeeded=True)
        if self.judge.is_calm:
            self.judge.succeeded(dispatch.backend.replica_id, now_s)
        else:
            self._heard(dispatch.backend, self.judge.succeeded, now_s)

    def abandoned(self, dispatch: Dispatch) -> None:
        """Hear that a request was given up before a first byte, for reasons that say nothing about the backend."""
        if dispatch.is_trial:
            self.judge.abandoned(dispatch.backend.replica_id)

    def failed(self, dispatch: Dispatch, failure: Failure, now_s: float) -> None:
        """Hear that a backend has failed a request."""
        backend = dispatch.backend
        if dispatch.is_trial:
            self._tried(dispatch, succeeded=False)
        # An own pool's supervisor knows how it is, and says so by `is_ready`.
        if not backend.is_own and self.judge.failed(backend.replica_id, failure, now_s, is_trial=dispatch.is_trial):
            self._ejected(backend, failure)

    # ---- probes

    def doubt(self, backend: Backend, now_s: float) -> None:
        """Say that a backend with requests has been silent for too long: a probe is due."""
        self.judge.doubt(backend.replica_id, now_s)

    def due_probes(self, now_s: float) -> list[Backend]:
        """Return who is to be probed now; `probed` must follow for each."""
        due = [self._backends[replica_id] for replica_id in self.judge.due_probes(now_s)]
        for backend in due:
            if backend.is_own:
                self.judge.probed(backend.replica_id, None, now_s)
        return [backend for backend in due if not backend.is_own]

    def probed(self, backend: Backend, failure: Failure | None, now_s: float) -> None:
        """Hear how a probe of a backend went, None if well."""
        if not self.judge.serves(backend.replica_id) and self._events is not None:
            self._events.probed(backend.name, succeeded=failure is None)
        if failure is None:
            self._heard(backend, lambda replica_id, at_s: self.judge.probed(replica_id, None, at_s), now_s)
        elif self.judge.probed(backend.replica_id, failure, now_s):
            self._ejected(backend, failure)

    # ---- what follows

    def _heard(self, backend: Backend, tell: Callable[[int, float], object], now_s: float) -> None:
        """Tell something good; if that brings the backend back, there is room."""
        was_out, did_serve = self.judge.num_out, self.judge.serves(backend.replica_id)
        tell(backend.replica_id, now_s)
        if self.judge.num_out < was_out:
            if not did_serve:
                logger.info("backend %s is up again", backend.name)
            self._hooks.on_room()

    def _tried(self, dispatch: Dispatch, *, succeeded: bool) -> None:
        if self._events is not None:
            self._events.probed(dispatch.backend.name, succeeded=succeeded)

    def _ejected(self, backend: Backend, failure: Failure) -> None:
        logger.warning("backend %s is ejected: %s", backend.name, failure.value)
        if self._events is not None:
            self._events.ejected(backend.name)
        if failure is Failure.CONNECT:
            # Its process is gone, and its cache with it; whoever comes in its place may be faster or slower.
            self._contents.forget(backend)
            self._speeds.begin_anew(backend)
        self._hooks.on_ejected(backend)
