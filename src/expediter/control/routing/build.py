"""Routing policies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from expediter.control.routing.base import Router
from expediter.control.routing.simple import LeastLoad, RoundRobin
from expediter.core.errors import ConfigurationError

ROUTINGS: Final[Mapping[str, Callable[[], Router]]] = {
    "least_load": LeastLoad,
    "round_robin": RoundRobin,
}


def make_router(name: str) -> Router:
    """Return a fresh router by name.

    Raises:
        ConfigurationError: there is none of that name; the message lists those that exist.
    """
    if name not in ROUTINGS:
        raise ConfigurationError(f"no routing policy {name!r}; there are: {', '.join(ROUTINGS)}")
    return ROUTINGS[name]()
