"""What each request of a simulation is judged by: its own targets, its class's, or those of the simulation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from expediter.core.errors import ConfigurationError
from expediter.core.request import Request
from expediter.core.slo import NO_SLO, Slo, SloClass
from expediter.sim.trace import Trace


@dataclass(frozen=True, slots=True)
class Targets:
    """Gives requests the targets that they lack: schedulers must know what requests are judged by.

    Args:
        slo: of requests that have none and name no class.
        slo_classes: by name.
    """

    slo: Slo
    slo_classes: Mapping[str, SloClass]

    def check(self, trace: Trace) -> None:
        """Verify that the classes of a trace are known.

        Raises:
            ConfigurationError: a request names one that is not, and has no targets of its own.
        """
        slos = trace.slos or (NO_SLO,) * len(trace)
        for pair in sorted({(name, slo == NO_SLO) for name, slo in zip(trace.slo_classes or (), slos, strict=False)}):
            self._class_of(*pair)

    def groups(self, requests: Trace | Iterable[Request]) -> Iterator[Sequence[Request]]:
        """Yield the requests with their sequences and targets.

        Raises:
            ConfigurationError: as `check`.
        """
        if not isinstance(requests, Trace):
            return ((self._with_targets(request),) for request in requests)
        if requests.slos is None and requests.slo_classes is None:  # all have the same: none needs a look of its own
            return replace(requests, slos=(self.slo,) * len(requests)).groups()
        return (tuple(map(self._with_targets, group)) for group in requests.groups())

    def _with_targets(self, request: Request) -> Request:
        chosen = self._class_of(request.slo_class, request.slo == NO_SLO)
        if chosen is None:
            return replace(request, slo=self.slo) if request.slo == NO_SLO else request
        targets = chosen.with_targets(request.slo)
        return replace(request, slo=targets, value=chosen.value, refuse_late=chosen.refuse_late)

    def _class_of(self, name: str, has_no_targets: bool) -> SloClass | None:
        known = self.slo_classes
        if name and name not in known and has_no_targets:
            there = f"there are: {', '.join(sorted(known))}" if known else "none are configured"
            raise ConfigurationError(f"no SLO class {name!r}; {there}")
        return known.get(name)
