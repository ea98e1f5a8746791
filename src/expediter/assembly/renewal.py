"""Backends come and go with the tables of a configuration file."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from expediter.core.errors import ConfigurationError
from expediter.gateway.backends.config import BackendConfig
from expediter.gateway.backends.registry import Backends
from expediter.runtime.clock import MonotonicClock

logger = logging.getLogger(__name__)


def renew_backends(
    backends: Backends, before: Sequence[BackendConfig], now: Sequence[BackendConfig], environment: Mapping[str, str]
) -> list[str]:
    """Let go of those whose table is gone, and take in those that have one now; return the names of both.

    One that is described otherwise than before is let go of and taken in. What has been added, drained or removed in
    another way stays so, and what is in flight goes on.

    Args:
        before, now: tables of the file.
        environment: where keys of backends are.
    Raises:
        ConfigurationError: one cannot be taken in; nothing has changed.
    """
    gone = [config for config in before if config not in now]
    new = [config for config in now if config not in before]
    trial = Backends(clock=MonotonicClock(), environment=environment)
    for config in new:
        trial.add(config)
    going = {config.shown_name for config in gone}
    for config in new:
        if config.shown_name not in going and backends.named(config.shown_name) is not None:
            raise ConfigurationError(f"there is a backend {config.shown_name!r} already")
    for config in gone:
        backend = backends.named(config.shown_name)
        if backend is not None and backend.config == config:
            backends.remove(backend)
            logger.info("backend %s is gone from the file", backend.name)
    for config in new:
        logger.info("backend %s is new in the file", backends.add(config).name)
    return [config.shown_name for config in (*gone, *new)]
