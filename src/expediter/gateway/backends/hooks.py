"""What the door wants to hear from its backends, and what they ask of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from expediter.gateway.backends.backend import Backend


def _nothing() -> None:
    """Nobody waits for room."""


def _nobody(_: Backend) -> None:
    """Nobody minds."""


def _always(_: float) -> bool:
    """Nobody bounds retries."""
    return True


@dataclass(slots=True, eq=False)
class Hooks:
    """Whoever dispatches requests puts its own in place of these.

    Attributes:
        on_room: called when a backend takes requests again that did not: it had no room, or was not up.
        on_ejected: called when a backend is ejected that was in use; what waits there for its first byte may be sent
            elsewhere.
        on_gone: called when a backend is removed; who keeps connections to it closes those that are idle.
        can_retry: asked whether a request that begins now could be tried again if it fails; if not, it is rather not
            used to find out whether a backend is well again.
    """

    on_room: Callable[[], None] = _nothing
    on_ejected: Callable[[Backend], None] = _nobody
    on_gone: Callable[[Backend], None] = _nobody
    can_retry: Callable[[float], bool] = _always
