"""OpenTelemetry spans of requests, made from their records; the only file that knows OpenTelemetry.

A request is a span of kind SERVER, a child of the client's; its wait in the central queue and each attempt at a backend
are children. The ids are chosen when the request comes, since the backend is told which span is its parent while that
span is still to be written. Names of attributes are those of the GenAI semantic conventions where there is one, of an
attribute or a metric; what has none is called `expediter.*`. The conventions are in development: those here are of the
package opentelemetry-semantic-conventions, see https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Decision
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from expediter import __version__
from expediter.telemetry.exchanges import Attempt, ExchangeRecord, Outcome
from expediter.telemetry.trace_context import TraceContext, new_id, parse_traceparent

_NAME: Final = "expediter"
_OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
_OTHER_OPERATION: Final = "generate_content"
_ERRORS: Final = frozenset({Outcome.NO_CAPACITY, Outcome.LATE, Outcome.EXPIRED, Outcome.FAILED})
"""Outcomes that are the server's fault; by the conventions of HTTP, a client's is no error of a SERVER span."""

Attributes = Mapping[str, str | int | float | bool]


class Tracing:
    """Chooses the ids of requests' spans, and writes the spans of those that are sampled (`ExchangeSink`).

    Which are is decided by OTEL_TRACES_SAMPLER, by default as the client's trace is, and all that have none.

    Args:
        processor: takes the spans; `exporting_to` makes one.
    """

    def __init__(self, processor: SpanProcessor) -> None:
        self._sampler = TracerProvider(shutdown_on_exit=False).sampler  # what the environment asks for
        self._ids = _ChosenIds()
        resource = Resource.create({SERVICE_NAME: _NAME, SERVICE_VERSION: __version__})
        self._provider = TracerProvider(ALWAYS_ON, resource, shutdown_on_exit=False, id_generator=self._ids)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer(_NAME, __version__)

    def begin(self, traceparent: bytes | None) -> TraceContext:
        """Return the place of a request that has come with this header."""
        client = None if traceparent is None else parse_traceparent(traceparent)
        trace_id = new_id(128) if client is None else client.trace_id
        parent = None if client is None else _context(trace_id, client.span_id, is_sampled=client.is_sampled)
        verdict = self._sampler.should_sample(parent, trace_id, _NAME, SpanKind.SERVER)
        return TraceContext(
            trace_id,
            new_id(64),
            None if client is None else client.span_id,
            verdict.decision is Decision.RECORD_AND_SAMPLE,
        )

    def record(self, record: ExchangeRecord) -> None:
        place = record.trace
        if place is None or not place.is_sampled:
            return
        epoch_ns = time.time_ns() - time.monotonic_ns()
        parent = None if place.parent_span_id is None else _context(place.trace_id, place.parent_span_id)
        self._ids.choose(place.trace_id, place.span_id)
        operation = _OPERATIONS.get(record.path, _OTHER_OPERATION)
        span = self._tracer.start_span(
            f"{operation} {record.model}".rstrip(),
            parent or Context(),
            SpanKind.SERVER,
            _attributes(record, operation),
            start_time=_ns(record.arrived_s, epoch_ns),
        )
        if record.outcome in _ERRORS:
            span.set_status(Status(StatusCode.ERROR, record.outcome.value))
        own = _context(place.trace_id, place.span_id)
        queue_s = record.queue_s
        if record.queued_s is not None and queue_s is not None:
            self._queued(record, own, _ns(record.queued_s, epoch_ns), _ns(record.queued_s + queue_s, epoch_ns))
        for number, attempt in enumerate(record.attempts):
            self._attempted(attempt, f"{operation} {record.model}", number, own, epoch_ns)
        span.end(_ns(record.ended_s, epoch_ns))

    def close(self) -> None:
        """Send what is still here; returns when that is done, or has failed."""
        self._provider.shutdown()

    def _queued(self, record: ExchangeRecord, own: Context, start_ns: int, end_ns: int) -> None:
        behind: Attributes = {
            "expediter.queue.requests": record.queued_behind_requests,
            "expediter.queue.tokens": record.queued_behind_tokens,
        }
        self._ids.choose(0, new_id(64))
        self._tracer.start_span("queue", own, attributes=behind, start_time=start_ns).end(end_ns)

    def _attempted(self, attempt: Attempt, name: str, number: int, own: Context, epoch_ns: int) -> None:
        attributes: dict[str, str | int] = {"expediter.backend": attempt.backend}
        if number:
            attributes["http.request.resend_count"] = number
        if attempt.failure is not None:
            attributes["error.type"] = attempt.failure
        self._ids.choose(0, attempt.span_id or new_id(64))
        start_ns = _ns(attempt.dispatched_s, epoch_ns)
        span = self._tracer.start_span(name, own, SpanKind.CLIENT, attributes, start_time=start_ns)
        if attempt.failure is not None:
            span.set_status(Status(StatusCode.ERROR, attempt.failure))
        span.end(_ns(attempt.ended_s, epoch_ns))


def exporting_to(endpoint: str) -> SpanProcessor:
    """Return what sends spans to an OTLP/HTTP endpoint: in batches, from its own thread; it drops what is too much.

    Args:
        endpoint: URL of the traces, such as http://127.0.0.1:4318/v1/traces. Headers, compression and time-outs come
            from OpenTelemetry's own environment variables.
    """
    return BatchSpanProcessor(OTLPSpanExporter(endpoint))


class _ChosenIds(IdGenerator):
    """Hands out the ids that were chosen for the span that is started next."""

    def __init__(self) -> None:
        self._trace_id = self._span_id = 0

    def choose(self, trace_id: int, span_id: int) -> None:
        """Choose ids; a span with a parent takes its trace's."""
        self._trace_id, self._span_id = trace_id, span_id

    def generate_trace_id(self) -> int:
        return self._trace_id

    def generate_span_id(self) -> int:
        return self._span_id


def _context(trace_id: int, span_id: int, *, is_sampled: bool = True) -> Context:
    flags = TraceFlags(TraceFlags.SAMPLED if is_sampled else TraceFlags.DEFAULT)
    return trace.set_span_in_context(NonRecordingSpan(SpanContext(trace_id, span_id, True, flags)), Context())


def _ns(seconds: float, epoch_ns: int) -> int:
    return int(seconds * 1e9) + epoch_ns


def _attributes(record: ExchangeRecord, operation: str) -> Attributes:
    attributes: dict[str, str | int | float | bool] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": _NAME,
        "gen_ai.request.model": record.model,
        "gen_ai.request.stream": record.is_stream,
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.output_tokens": record.num_output_tokens,
        "http.route": record.path,
        "http.response.status_code": record.status,
        "expediter.request_id": record.request_id,
        "expediter.tenant": record.tenant,
        "expediter.outcome": record.outcome.value,
    }
    optional = {
        "gen_ai.usage.cache_read.input_tokens": record.num_cached_tokens,
        "gen_ai.response.time_to_first_chunk": record.ttft_s,
        "gen_ai.server.time_to_first_token": record.ttft_s,
        "gen_ai.server.time_per_output_token": record.tpot_s,
        "expediter.expected_time_to_first_token": record.predicted_ttft_s,
        "expediter.backend": record.backend or None,
        "expediter.slo_class": record.slo_class or None,
        "expediter.slo_met": record.met_slo,
        "error.type": (record.error_code or record.outcome.value) if record.outcome in _ERRORS else None,
    }
    return attributes | {name: value for name, value in optional.items() if value is not None}
