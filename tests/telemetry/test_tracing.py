"""Spans of requests, as OpenTelemetry's SDK hands them to an exporter."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from exchange_records import answered
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import error_attributes, gen_ai_attributes, http_attributes
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics
from opentelemetry.trace import SpanKind, StatusCode

from expediter.telemetry.exchanges import Attempt, Outcome
from expediter.telemetry.trace_context import TraceContext, parse_traceparent
from expediter.telemetry.tracing import Tracing, exporting_to

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CLIENT = f"00-{TRACE}-{SPAN}-01".encode()


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracing(exporter: InMemorySpanExporter) -> Iterator[Tracing]:
    tracing = Tracing(SimpleSpanProcessor(exporter))
    yield tracing
    tracing.close()


def spans_of(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {("queue" if span.name == "queue" else span.kind.name): span for span in exporter.get_finished_spans()}


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_a_request_in_a_clients_trace(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    place = tracing.begin(CLIENT)
    header = place.traceparent(77)
    attempt = Attempt(backend="b0", dispatched_s=100.5, ended_s=102.0, span_id=77)
    tracing.record(answered(trace=place, attempts=(attempt,)))
    spans = spans_of(exporter)
    assert len(spans) == len(exporter.get_finished_spans()) == 3
    root, queue, at_backend = spans["SERVER"], spans["queue"], spans["CLIENT"]
    assert root.parent is not None
    assert (root.context.trace_id, root.parent.span_id) == (int(TRACE, 16), int(SPAN, 16))
    for child in (queue, at_backend):
        assert child.parent is not None
        assert (child.context.trace_id, child.parent.span_id) == (int(TRACE, 16), root.context.span_id)
    assert header == f"00-{TRACE}-{at_backend.context.span_id:016x}-01".encode(), "the backend's parent is this span"
    assert (root.name, root.kind, at_backend.name) == ("chat m", SpanKind.SERVER, "chat m")
    assert [round(seconds(span), 3) for span in (root, queue, at_backend)] == [2.0, 0.5, 1.5]
    assert root.attributes is not None
    wanted = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.request.stream": True,
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.output_tokens": 11,
        "gen_ai.usage.cache_read.input_tokens": 60,
        "gen_ai.response.time_to_first_chunk": 1.0,
        "gen_ai.server.time_to_first_token": 1.0,
        "gen_ai.server.time_per_output_token": pytest.approx(0.1),
        "expediter.slo_met": True,
        "http.response.status_code": 200,
    }
    assert {name: root.attributes[name] for name in wanted} == wanted
    assert root.status.status_code is StatusCode.UNSET
    assert root.resource.attributes["service.name"] == "expediter"


def test_names_are_the_conventions(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    modules = (error_attributes, gen_ai_attributes, http_attributes, gen_ai_metrics)
    known = {value for module in modules for value in vars(module).values() if isinstance(value, str)}
    failed = Attempt(backend="b1", dispatched_s=100.1, ended_s=100.2, failure="connect")
    last = Attempt(backend="b2", dispatched_s=100.3, ended_s=100.4, failure="timeout")
    tracing.record(answered(trace=tracing.begin(None), attempts=(failed, last), outcome=Outcome.FAILED, status=502))
    used = {name for span in exporter.get_finished_spans() for name in span.attributes or ()}
    assert {"error.type", "http.request.resend_count"} < used
    assert {name for name in used if not name.startswith("expediter.")} <= known


def test_failures(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    failed = Attempt(backend="b1", dispatched_s=100.1, ended_s=100.2, failure="connect")
    tracing.record(answered(trace=tracing.begin(None), attempts=(failed, *answered().attempts)))
    tracing.record(answered(trace=tracing.begin(None), attempts=(), outcome=Outcome.NO_CAPACITY, status=503))
    tracing.record(answered(trace=tracing.begin(None), attempts=(), outcome=Outcome.OVER_LIMIT, status=429))
    spans = exporter.get_finished_spans()
    attempts = [span for span in spans if span.kind is SpanKind.CLIENT]
    assert [span.status.status_code for span in attempts] == [StatusCode.ERROR, StatusCode.UNSET]
    roots = [span for span in spans if span.kind is SpanKind.SERVER]
    assert [span.status.status_code for span in roots] == [StatusCode.UNSET, StatusCode.ERROR, StatusCode.UNSET]
    assert len({span.context.trace_id for span in roots}) == 3
    assert all(span.parent is None for span in roots)


def test_who_is_not_sampled_leaves_nothing(
    tracing: Tracing, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tracing.begin(CLIENT[:-1] + b"0")
    assert not place.is_sampled
    assert place.traceparent(5).endswith(b"-00"), "and the backend hears that it is not"
    tracing.record(answered(trace=place))
    tracing.record(answered(trace=None))
    assert not exporter.get_finished_spans()
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    quiet = Tracing(SimpleSpanProcessor(exporter))
    assert not quiet.begin(None).is_sampled
    assert quiet.begin(CLIENT).is_sampled
    quiet.close()


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"garbage",
        b"00-" + b"0" * 32 + b"-00f067aa0ba902b7-01",
        b"00-" + TRACE.encode() + b"-" + b"0" * 16 + b"-01",
        b"ff-" + CLIENT[3:],
        CLIENT + b"-more",
        CLIENT.upper(),
        CLIENT + b"\n",
    ],
)
def test_a_malformed_parent_begins_a_new_trace(tracing: Tracing, header: bytes) -> None:
    assert parse_traceparent(header) is None
    place = tracing.begin(header)
    assert place.parent_span_id is None
    assert place.trace_id != int(TRACE, 16)


def test_later_versions_are_read_as_far_as_they_are_known() -> None:
    parsed = parse_traceparent(b"01" + CLIENT[2:] + b"-more")
    assert parsed is not None
    assert parsed.trace_id == int(TRACE, 16)
    assert TraceContext(1, 2, None, True).traceparent(3) == b"00-" + b"0" * 31 + b"1-" + b"0" * 15 + b"3-01"


def test_spans_reach_an_endpoint() -> None:
    received: list[ExportTraceServiceRequest] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        tracing = Tracing(exporting_to(f"http://127.0.0.1:{server.server_port}/v1/traces"))
        tracing.record(answered(trace=tracing.begin(None)))
        tracing.close()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    names = [s.name for r in received for rs in r.resource_spans for ss in rs.scope_spans for s in ss.spans]
    assert sorted(names) == ["chat m", "chat m", "queue"]
