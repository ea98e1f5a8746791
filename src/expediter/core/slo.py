"""Service-level objectives: the targets that a request meets or misses."""

from __future__ import annotations

import math
from dataclasses import dataclass

from expediter.core.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Targets of a request; None is no target.

    Args:
        ttft_s: arrival to first output token, at most.
        tpot_s: mean time per output token after the first, at most; a request of one token cannot miss it.
        e2e_s: arrival to last output token, at most.
    Raises:
        ConfigurationError: a target is not a finite number above 0.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("ttft", self.ttft_s), ("tpot", self.tpot_s), ("e2e", self.e2e_s)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigurationError(f"SLO {name} must be a finite number of seconds above 0, not {value}")

    def is_met(self, ttft_s: float, tpot_s: float | None, e2e_s: float) -> bool:
        """Return whether a finished request met its targets; `tpot_s` is None if it had one output token."""
        if self.ttft_s is not None and ttft_s > self.ttft_s:
            return False
        if self.e2e_s is not None and e2e_s > self.e2e_s:
            return False
        return self.tpot_s is None or tpot_s is None or tpot_s <= self.tpot_s


NO_SLO = Slo()
"""No targets: always met."""


def parse_slo(text: str) -> Slo:
    """Return the SLO that `ttft=SECONDS,tpot=SECONDS` names; either part may be absent.

    Raises:
        ConfigurationError: the text is not of that form.
    """
    targets: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in {"ttft", "tpot"} or name in targets:
            raise ConfigurationError(f"SLO {text!r} is not of the form ttft=SECONDS,tpot=SECONDS")
        try:
            targets[name] = float(value)
        except ValueError as error:
            raise ConfigurationError(f"SLO {name} must be a number of seconds, not {value!r}") from error
    return Slo(ttft_s=targets.get("ttft"), tpot_s=targets.get("tpot"))
