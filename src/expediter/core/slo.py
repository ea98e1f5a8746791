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


@dataclass(frozen=True, slots=True, kw_only=True)
class SloClass:
    """What a request gets that names this class, where it gives no target of its own.

    Args:
        ttft_s, tpot_s, e2e_s: targets, as in `Slo`.
        value: weight of such a request in goodput, relative to others.
        refuse_late: who cannot be in time any more wants to be refused instead of being served late.
    Raises:
        ConfigurationError: a target or the value is not a finite number above 0.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    value: float = 1.0
    refuse_late: bool = False

    def __post_init__(self) -> None:
        self.with_targets(NO_SLO)  # checks the targets
        if not (math.isfinite(self.value) and self.value > 0):
            raise ConfigurationError(f"the value of an SLO class must be a finite number above 0, not {self.value}")

    def with_targets(self, own: Slo) -> Slo:
        """Return a request's own targets, with this class's where it has none."""
        return Slo(
            ttft_s=self.ttft_s if own.ttft_s is None else own.ttft_s,
            tpot_s=self.tpot_s if own.tpot_s is None else own.tpot_s,
            e2e_s=self.e2e_s if own.e2e_s is None else own.e2e_s,
        )


def parse_slo(text: str) -> Slo:
    """Return the SLO that `ttft=SECONDS,tpot=SECONDS,e2e=SECONDS` names; any part may be absent.

    Raises:
        ConfigurationError: the text is not of that form.
    """
    targets: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in {"ttft", "tpot", "e2e"} or name in targets:
            raise ConfigurationError(f"SLO {text!r} is not of the form ttft=SECONDS,tpot=SECONDS,e2e=SECONDS")
        try:
            targets[name] = float(value)
        except ValueError as error:
            raise ConfigurationError(f"SLO {name} must be a number of seconds, not {value!r}") from error
    return Slo(ttft_s=targets.get("ttft"), tpot_s=targets.get("tpot"), e2e_s=targets.get("e2e"))
