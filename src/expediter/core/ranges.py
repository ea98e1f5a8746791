"""Checks of the numbers in configurations; each names the field that is wrong. None is in every range."""

from __future__ import annotations

import math

from expediter.core.errors import ConfigurationError


def require_at_least(least: float, config: object, *fields: str) -> None:
    """Raise `ConfigurationError` if one of a configuration's fields is below a bound, or no finite number."""
    for field in fields:
        value = getattr(config, field)
        if value is not None and not least <= value < math.inf:
            raise ConfigurationError(f"{field} must be at least {least:g}, not {value}")


def require_above_zero(config: object, *fields: str) -> None:
    """Raise `ConfigurationError` if one of a configuration's fields is not above 0, or no finite number."""
    for field in fields:
        value = getattr(config, field)
        if value is not None and not 0 < value < math.inf:
            raise ConfigurationError(f"{field} must be above 0, not {value}")


def require_not_negative(config: object, *fields: str) -> None:
    """Raise `ConfigurationError` if one of a configuration's fields is below 0, or no finite number."""
    for field in fields:
        value = getattr(config, field)
        if value is not None and not 0 <= value < math.inf:
            raise ConfigurationError(f"{field} must not be negative, not {value}")


def require_share(config: object, *fields: str) -> None:
    """Raise `ConfigurationError` if one of a configuration's fields does not lie in [0, 1]."""
    for field in fields:
        value = getattr(config, field)
        if value is not None and not 0 <= value <= 1:
            raise ConfigurationError(f"{field} must lie between 0 and 1, not {value}")
