"""Puts together what is seen of a server: metrics, traces, log lines, explanations and the live page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
from prometheus_client import CollectorRegistry

from expediter.core.errors import ConfigurationError
from expediter.core.slo import SloClass
from expediter.gateway.backends.registry import Backends
from expediter.gateway.backends.status import BackendStatus
from expediter.gateway.dashboard.feed import Feeder
from expediter.gateway.dashboard.slow import SlowReasons
from expediter.gateway.explanations import AskBackend, Explanations, OwnReplicas
from expediter.gateway.observation import Observation
from expediter.gateway.siblings import Siblings
from expediter.telemetry.exchanges import ExchangeRecord, ExchangeSink
from expediter.telemetry.gateway_metrics import GatewayMetrics
from expediter.telemetry.history import History
from expediter.telemetry.late_records import LateRecords
from expediter.telemetry.logging_setup import LogFormat, RequestLog
from expediter.telemetry.process_place import ProcessPlace
from expediter.telemetry.recent_exchanges import RecentExchanges
from expediter.telemetry.shown_backend import ShownBackend
from expediter.telemetry.trace_context import Tracer

if TYPE_CHECKING:
    from expediter.telemetry.tracing import Tracing

Sink = TypeVar("Sink")

PROCESS: Final = "gateway"
"""Name of the process in its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservingConfig:
    """What is written besides what can be asked for.

    Args:
        log_format: "json" for objects, and one per request among them.
        otlp_traces_endpoint: URL that spans are sent to; None for no traces.
    """

    log_format: LogFormat = "text"
    otlp_traces_endpoint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPoolSeen:
    """The server's own replicas, to be asked: one backend of the door's.

    Args:
        name: of that backend.
        entries: what held their requests.
        shown: how they are.
    """

    name: str
    entries: OwnReplicas
    shown: Callable[[], Sequence[ShownBackend]]


class Observing:
    """All that hears of requests in one process, and the routes for who asks.

    Args:
        registry: of all metrics of this process.
        metrics: those of the gateway, in the registry.
        live: the requests under way that a tenant means by a name.
        ask: a foreign backend what held a request.
        shows_all: whether the main listener may show everybody's figures to whoever asks.
    Raises:
        ConfigurationError: traces are asked for, and OpenTelemetry is not installed.
    """

    def __init__(
        self,
        config: ObservingConfig,
        *,
        registry: CollectorRegistry,
        metrics: GatewayMetrics,
        backends: Backends,
        own: OwnPoolSeen | None,
        slo_classes: Callable[[], Mapping[str, SloClass]],
        live: Callable[[str, str], list[ExchangeRecord]],
        ask: AskBackend,
        shows_all: Callable[[], bool],
        place: ProcessPlace,
    ) -> None:
        self._backends = backends
        self._own = own
        history, recent = History(), RecentExchanges()

        def requests(tenant: str, name: str) -> list[ExchangeRecord]:
            return [self._named(r) for r in (*live(tenant, name), *self._settled(recent).find(tenant, name))]

        self._siblings = Siblings(requests, lambda since: self._settled(history).since(since), place)
        self._tracing = None if config.otlp_traces_endpoint is None else _tracing(config.otlp_traces_endpoint)
        sinks: list[ExchangeSink] = [metrics, history, recent]
        if config.log_format == "json":
            sinks.append(RequestLog(PROCESS))
        if self._tracing is not None:
            sinks.append(self._tracing)
        self.records = LateRecords(sinks)
        metrics.before_reading = self.records.settle
        explanations = Explanations(
            self._siblings,
            None if own is None else own.entries,
            ask,
            lambda name: own is not None and name == own.name,
        )
        feeder = Feeder(
            self._siblings,
            metrics.at_gateway,
            self.shown,
            lambda: backends.models,
            slo_classes,
            SlowReasons(explanations),
        )
        self.main = Observation(registry, explanations, feeder, shows_all)
        self.admin = Observation(registry, explanations, feeder, lambda: True)

    @property
    def tracer(self) -> Tracer | None:
        """Who chooses the ids of spans; None if no traces are kept."""
        return self._tracing

    def _settled(self, sink: Sink) -> Sink:
        """Return who hears of requests once it has heard of all that have ended."""
        self.records.settle()
        return sink

    def _named(self, record: ExchangeRecord) -> ExchangeRecord:
        """Return a record with the names of those that its route compared: their numbers are this process's own."""
        if record.route is None:
            return record
        return msgspec.structs.replace(record, route_backends=self._backends.names(record.route.candidates))

    def shown(self) -> list[ShownBackend]:
        """Return what is shown of each backend, and of each of the server's own replicas."""
        own = self._own
        foreign = [_shown(status) for status in self._backends.status() if own is None or status.name != own.name]
        return foreign if own is None else [*own.shown(), *foreign]

    async def start(self) -> None:
        """Answer the other processes."""
        await self._siblings.__aenter__()

    async def stop(self) -> None:
        await self._siblings.__aexit__()
        if self._tracing is not None:
            self._tracing.close()


def _tracing(endpoint: str) -> Tracing:
    try:
        from expediter.telemetry.tracing import Tracing, exporting_to  # noqa: PLC0415 - an extra: needed for traces only
    except ImportError as error:
        raise ConfigurationError(
            f"traces need OpenTelemetry, which is not installed: pip install 'expediter[otel]' ({error})"
        ) from error
    return Tracing(exporting_to(endpoint))


def _shown(status: BackendStatus) -> ShownBackend:
    return ShownBackend(
        name=status.name,
        models=status.models,
        state=status.state,
        num_in_flight=status.num_in_flight,
        max_requests=status.max_requests,
        num_pending_tokens=status.num_pending_tokens,
        num_running=status.num_running,
        num_waiting=status.num_waiting,
        kv_usage=status.kv_use,
        metrics_age_s=status.reported_age_s,
    )
