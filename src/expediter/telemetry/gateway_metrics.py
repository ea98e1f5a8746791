"""Prometheus metrics of the gateway: what became of requests, what was decided about them, and who computed them.

`docs/observe.md` explains each. What is counted per request is a handful of additions in memory that the gateway's
processes share; text is made when somebody asks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from expediter.control.health import Failure
from expediter.control.routing.base import Placement
from expediter.telemetry.counter_rows import CounterRows, Key, read_rows, summed
from expediter.telemetry.exchanges import ExchangeRecord, Outcome
from expediter.telemetry.gateway_families import (
    BACKEND_GAUGES,
    BACKEND_STATE,
    BYTES,
    COUNTED,
    E2E,
    EJECTIONS,
    FAILURES,
    HITS,
    IN_FLIGHT,
    JUDGED,
    LATENCY_BUCKETS_S,
    LIMITED,
    PREDICTED,
    PREDICTIONS,
    PROBES,
    QUEUE,
    QUEUE_LENGTH,
    QUEUE_TOKENS,
    REQUESTS,
    RETRIES,
    ROUTED,
    TOKENS,
    TPOT,
    TPOT_BUCKETS_S,
    TTFT,
    UNAUTHORIZED,
    Family,
)
from expediter.telemetry.process_place import ALONE, ProcessPlace
from expediter.telemetry.shown_backend import STATES, ShownBackend

_COUNTERS: Final = "counters"
_OTHER: Final = "other"
_MAX_SERIES: Final = 4096
"""Sets of labels of requests; what comes after them counts as tenant, SLO class and model "other"."""
_SPARE: Final = 64 << 10
"""Bytes kept for the rows of what has no room for rows of its own."""

_LATENCY_SUM: Final = len(LATENCY_BUCKETS_S) + 1
_TPOT_SUM: Final = len(TPOT_BUCKETS_S) + 1
"""Where a histogram's sum is, behind its buckets and the one above them."""

_Shape = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


def _nothing() -> None:
    """Nobody keeps anything back."""


@dataclass(frozen=True, slots=True)
class AtGateway:
    """What is at the gateway at a moment; tokens are those of prompts, estimated."""

    num_in_flight: int
    queue_requests: int
    queue_tokens: int


class GatewayMetrics:
    """Counts what one process of the gateway does, and shows what all of them did.

    Args:
        registry: where the metrics are shown.
        backends: asked when somebody looks.
        policy: name of the routing that chooses among them.
        place: of this process.
    Attributes:
        before_reading: called before what was counted is shown, to have the newest counted.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        backends: Callable[[], Sequence[ShownBackend]] = tuple,
        *,
        policy: str = "",
        place: ProcessPlace = ALONE,
    ) -> None:
        self.before_reading: Callable[[], None] = _nothing
        self._rows = CounterRows(place.own(_COUNTERS))
        self._others = place.others(_COUNTERS)
        self._values = self._rows.values
        self._policy = policy
        self._series: dict[tuple[str, str, str, Outcome, str], _Series] = {}
        self._places: dict[Key, int] = {}
        self._in_flight, self._queue_length, self._queue_tokens = (
            self._place(family) for family in (IN_FLIGHT, QUEUE_LENGTH, QUEUE_TOKENS)
        )
        self._expected, self._actual, self._error = (
            self._place(PREDICTED, kind) for kind in ("expected", "actual", "absolute_error")
        )
        self._predictions = self._place(PREDICTIONS)
        self._causes: dict[str, int] = {}
        self._hits: dict[str, int] = {}
        for gauge in (self._in_flight, self._queue_length, self._queue_tokens):
            self._values[gauge] = 0.0  # what a predecessor held went down with it
        registry.register(_Shown(self.rows, backends))

    # ---- what happens

    def entered(self) -> None:
        """Count a request in."""
        self._values[self._in_flight] += 1.0

    def left(self) -> None:
        """Count a request out."""
        self._values[self._in_flight] -= 1.0

    def unauthorized(self) -> None:
        """Count a request that had no valid key; nothing more is known of it."""
        self._add(UNAUTHORIZED)

    def queue(self, num_requests: int, num_tokens: int) -> None:
        """Show the central queue."""
        self._values[self._queue_length] = num_requests
        self._values[self._queue_tokens] = num_tokens

    def ejected(self, backend: str) -> None:
        self._add(EJECTIONS, backend)

    def probed(self, backend: str, *, succeeded: bool) -> None:
        self._add(PROBES, backend, "success" if succeeded else "failure")

    def record(self, record: ExchangeRecord) -> None:
        """Count a request that has ended."""
        backend = record.backend
        key = (record.model, record.tenant, backend, record.outcome, record.slo_class)
        series = self._series.get(key)
        if series is None:
            series = self._resolve(key)
        values = self._values
        values[series.requests] += 1.0
        values[series.bytes_in] += record.num_bytes_in
        values[series.bytes_out] += record.num_bytes_out
        met = record.met_slo
        if met is not None:
            values[series.met if met else series.missed] += 1.0
        if record.outcome is Outcome.OK:
            self._answered(series, record)
        queue_s = record.queue_s
        if queue_s is not None:
            place = self._place(QUEUE, series.model)
            values[place + bisect_left(LATENCY_BUCKETS_S, queue_s)] += 1.0
            values[place + _LATENCY_SUM] += queue_s
        if record.outcome is Outcome.OVER_LIMIT:
            self._add(LIMITED, series.tenant, record.error_code or _OTHER)
        if record.route is not None:
            self._routed(record.route, backend)
        attempts = record.attempts
        if len(attempts) > 1 or (attempts and attempts[0].failure is not None):
            self._attempted(record)

    def _routed(self, route: Placement, backend: str) -> None:
        cause = cause_of(route)
        place = self._causes.get(cause)
        if place is None:
            place = self._causes[cause] = self._place(ROUTED, self._policy, cause)
        self._values[place] += 1.0
        if route.num_cached_tokens:
            place = self._hits.get(backend)
            if place is None:
                place = self._hits[backend] = self._place(HITS, backend)
            self._values[place] += route.num_cached_tokens

    def _answered(self, series: _Series, record: ExchangeRecord) -> None:
        values = self._values
        values[series.prompt_tokens] += record.num_prompt_tokens
        values[series.output_tokens] += record.num_output_tokens
        if record.num_cached_tokens:
            values[series.cached_tokens] += record.num_cached_tokens
        e2e_s = record.ended_s - record.arrived_s
        values[series.e2e + bisect_left(LATENCY_BUCKETS_S, e2e_s)] += 1.0
        values[series.e2e + _LATENCY_SUM] += e2e_s
        ttft_s = record.ttft_s if record.is_stream else None
        if ttft_s is None:
            return
        tpot_s = record.tpot_s
        values[series.ttft + bisect_left(LATENCY_BUCKETS_S, ttft_s)] += 1.0
        values[series.ttft + _LATENCY_SUM] += ttft_s
        if tpot_s is not None:
            values[series.tpot + bisect_left(TPOT_BUCKETS_S, tpot_s)] += 1.0
            values[series.tpot + _TPOT_SUM] += tpot_s
        expected_s = record.predicted_ttft_s
        if expected_s is not None:
            # The prediction was made when a backend was chosen; the time before that is no fault of its.
            since_s = record.arrived_s if record.dispatched_s is None else record.dispatched_s
            actual_s = record.arrived_s + ttft_s - since_s
            values[self._predictions] += 1.0
            values[self._expected] += expected_s
            values[self._actual] += actual_s
            values[self._error] += abs(expected_s - actual_s)

    def _attempted(self, record: ExchangeRecord) -> None:
        failure: str | None = None
        for attempt in record.attempts:
            if failure is not None:
                self._add(RETRIES, failure)
            failure = attempt.failure
            if failure is not None:
                self._add(FAILURES, attempt.backend, failure)

    # ---- where it is counted

    def _add(self, family: Family, *labels: str) -> None:
        self._values[self._place(family, *labels)] += 1.0

    def _place(self, family: Family, *labels: str) -> int:
        key = (family.name, *labels)
        place = self._places.get(key)
        if place is not None:
            return place
        place = self._rows.place(key, family.num_values, spare=_SPARE)
        if place is not None:
            self._places[key] = place
            return place
        # Labels come from bounded sets; should one not, its family is still counted, under a name that says so.
        place = self._rows.place((family.name, *(_OTHER for _ in family.labels)), family.num_values)
        assert place is not None, "what is spare holds such a row for every family"
        return place

    def _resolve(self, key: tuple[str, str, str, Outcome, str]) -> _Series:
        model, tenant, backend, outcome, slo_class = key
        if len(self._series) >= _MAX_SERIES:
            model = tenant = slo_class = _OTHER
            known = self._series.get((model, tenant, backend, outcome, slo_class))
            if known is not None:
                return known
            key = (model, tenant, backend, outcome, slo_class)
        place = self._place
        series = self._series[key] = _Series(
            model=model,
            tenant=tenant,
            requests=place(REQUESTS, model, tenant, backend, outcome.value),
            bytes_in=place(BYTES, "in"),
            bytes_out=place(BYTES, "out"),
            met=place(JUDGED, slo_class, tenant, "true"),
            missed=place(JUDGED, slo_class, tenant, "false"),
            prompt_tokens=place(TOKENS, model, tenant, "prompt"),
            output_tokens=place(TOKENS, model, tenant, "output"),
            cached_tokens=place(TOKENS, model, tenant, "cached"),
            e2e=place(E2E, model, backend),
            ttft=place(TTFT, model, backend),
            tpot=place(TPOT, model, backend),
        )
        return series

    # ---- what is shown

    def rows(self) -> dict[Key, list[float]]:
        """Return the sums over all processes."""
        self.before_reading()
        others = [read_rows(path) for path in self._others if path.exists()]
        return summed([self._rows.rows(), *others])

    def at_gateway(self) -> AtGateway:
        """Return what is at all processes now."""
        rows = self.rows()
        return AtGateway(*(int(rows[(family.name,)][0]) for family in (IN_FLIGHT, QUEUE_LENGTH, QUEUE_TOKENS)))


def cause_of(route: Placement) -> str:
    """Return why a backend was chosen: "bounded" (a better one was held back), "cached", "cost" or "turn"."""
    if route.is_held_back:
        return "bounded"
    if route.num_cached_tokens:
        return "cached"
    return "cost" if route.candidates else "turn"


@dataclass(frozen=True, slots=True)
class _Series:
    """Where what is known of a request's labels is counted."""

    model: str
    tenant: str
    requests: int
    bytes_in: int
    bytes_out: int
    met: int
    missed: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    e2e: int
    ttft: int
    tpot: int


class _Shown(Collector):
    """Makes Prometheus' families of rows and of the backends' states, when it is asked."""

    def __init__(
        self, rows: Callable[[], dict[Key, list[float]]], backends: Callable[[], Sequence[ShownBackend]]
    ) -> None:
        self._rows = rows
        self._backends = backends

    def describe(self) -> list[Metric]:
        return []  # nothing is asked of anybody while the server is put together

    def collect(self) -> Iterator[Metric]:
        metrics = {family.name: (family, _empty(family)) for family in COUNTED}
        rows, backends = self._rows(), self._backends()
        for key in _foreseen(backends):
            rows.setdefault(key, [0.0])
        for (name, *labels), values in rows.items():
            family, metric = metrics[name]
            _add_row(metric, family, labels, values)
        yield from (metric for _, metric in metrics.values())
        yield from _of_backends(backends)


def _foreseen(backends: Sequence[ShownBackend]) -> Iterator[Key]:
    """Yield the rows of which already the first count is news.

    They are shown from the start: a rate does not see the value that a counter begins with.
    """
    yield (UNAUTHORIZED.name,)
    yield from ((RETRIES.name, failure.value) for failure in Failure)
    for backend in backends:
        if not backend.is_own:
            yield (EJECTIONS.name, backend.name)
            yield from ((PROBES.name, backend.name, result) for result in ("success", "failure"))
            yield from ((FAILURES.name, backend.name, failure.value) for failure in Failure)


def _empty(family: Family) -> _Shape:
    kinds: dict[str, type[_Shape]] = {
        "counter": CounterMetricFamily,
        "gauge": GaugeMetricFamily,
        "histogram": HistogramMetricFamily,
    }
    return kinds[family.kind](family.name, family.text, labels=family.labels)


def _add_row(
    metric: _Shape,
    family: Family,
    labels: Sequence[str],
    values: list[float],
) -> None:
    if not isinstance(metric, HistogramMetricFamily):
        metric.add_metric(labels, values[0])
        return
    count, buckets = 0.0, []
    for bound, number in zip((*family.buckets, float("inf")), values, strict=False):
        count += number
        buckets.append(("+Inf" if bound == float("inf") else str(bound), count))
    metric.add_metric(labels, buckets, values[-1])


def _of_backends(backends: Sequence[ShownBackend]) -> Iterator[Metric]:
    states = GaugeMetricFamily(BACKEND_STATE, "1 for the state that it is in.", labels=("backend", "state"))
    for backend in backends:
        for state in STATES:
            states.add_metric((backend.name, state), float(backend.state == state))
    yield states
    for name, (text, value_of) in BACKEND_GAUGES.items():
        gauge = GaugeMetricFamily(name, text, labels=("backend",))
        for backend in backends:
            value = value_of(backend)
            if value is not None:
                gauge.add_metric((backend.name,), value)
        yield gauge
