"""A door before another Expediter, both as processes: what is told of requests, and what is never told."""

from __future__ import annotations

import json
import shlex
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer, start_fake_server, start_process, wait_until
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from expediter.gateway.tenants import hash_of

KEY, OTHER_KEY, BACKEND_KEY = "sk-door-0123456789", "sk-other-0123456789", "sk-behind-0123456789"
PROMPT = "the prompt that nobody may read elsewhere"
ALICE, BOB, CAROL = ({"Authorization": f"Bearer {key}"} for key in (KEY, OTHER_KEY, "sk-carol-0123456789"))
CLIENT_TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TENANTS = "".join(
    f'[tenants.{name}]\nkey_hashes = ["{hash_of(key)}"]\n' for name, key in (("alice", KEY), ("bob", OTHER_KEY))
)
TENANTS += f'[tenants.carol]\nkey_hashes = ["{hash_of("sk-carol-0123456789")}"]\nmax_requests_per_minute = 1\n'


@contextmanager
def logged_door(log: Path, *flags: str) -> Iterator[LiveServer]:
    """`expediter serve` with its standard error in a file."""
    main = "import sys; from expediter.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", main, "serve", "--port", "0", *flags]
    with start_process("bash", "-c", f"exec {shlex.join(command)} 2> {shlex.quote(str(log))}") as door:
        yield door


class Collector:
    """Takes spans over HTTP."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def spans(self) -> list[Span]:
        requests = [ExportTraceServiceRequest.FromString(body) for body in self.bodies]
        return [span for r in requests for of in r.resource_spans for scope in of.scope_spans for span in scope.spans]


@dataclass
class Chain:
    """A door, the Expediter behind it, and what they wrote."""

    door: LiveServer
    behind: LiveServer
    log: Path
    collector: Collector


@pytest.fixture(scope="module")
def chain(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chain]:
    folder = tmp_path_factory.mktemp("chain")
    config = folder / "expediter.toml"
    collector = Collector()
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("BEHIND_KEY", BACKEND_KEY)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    flags = ("--model", "toy", "--step-s", "0.005", "--max-num-seqs", "1", "--api-key", BACKEND_KEY)
    try:
        with start_fake_server(model_folder, *flags) as behind:
            backend = f'[[backends]]\nurl = "{behind.url}"\nname = "behind"\napi_key_env = "BEHIND_KEY"\n'
            backend += "max_requests = 1\n"
            config.write_text(TENANTS + backend)
            traces = ("--otlp-traces-endpoint", collector.url)
            door_flags = ("--config", str(config), "--log-format", "json", *traces, "--routing", "predicted_ttft")
            with logged_door(folder / "log", *door_flags) as door:
                yield Chain(door, behind, folder / "log", collector)
    finally:
        monkeypatch.undo()
        collector.close()


def ask(chain: Chain, headers: dict[str, str], **fields: Any) -> Any:
    if fields.get("stream"):
        fields["stream_options"] = {"include_usage": True}
    reply = chain.door.complete(
        PROMPT, headers=headers, **{"model": "fake", "max_tokens": 4, "ignore_eos": True} | fields
    )
    assert reply.status == 200, reply.body
    return reply


def lines(chain: Chain) -> list[dict[str, Any]]:
    return [json.loads(line) for line in chain.log.read_text().splitlines()]


def test_one_story_across_gateway_and_replica(chain: Chain) -> None:
    ask(chain, {**ALICE, "X-Request-Id": "mine"}, stream=True)
    told = chain.door.get("/requests/mine", headers=ALICE).json
    (gateway,) = told["gateway"]
    assert gateway["outcome"] == "ok"
    texts = [span["text"] for span in gateway["spans"]]
    assert texts[0].startswith("sent to behind: ")
    assert texts[1].startswith("at behind; the answer began after")
    assert texts[-1] == "ended: ok after 4 tokens"
    inner, replica = told["requests"]
    assert (inner["backend"], replica["backend"]) == ("behind", "behind/own")
    assert 0 < inner["from_s"] < replica["from_s"] < gateway["spans"][-1]["to_s"]
    assert inner["client_request_id"] == gateway["request_id"], "the inner door knows it by the outer one's id"
    assert [span["reason"] for span in replica["spans"]][-3:] == ["prefilling", "decoding", "ended"]
    assert chain.door.get(f"/requests/{gateway['request_id']}", headers=ALICE).json["gateway"] == [gateway]


def test_while_it_waits_at_the_gateway(chain: Chain) -> None:
    def spans_of(name: str) -> list[dict[str, Any]]:
        reply = chain.door.get(f"/requests/{name}", headers=ALICE)
        return reply.json["gateway"][0]["spans"] if reply.status == 200 else []

    def start(name: str, num_tokens: int) -> threading.Thread:
        headers = {**ALICE, "X-Request-Id": name}
        thread = threading.Thread(target=ask, args=(chain, headers), kwargs={"max_tokens": num_tokens, "stream": True})
        thread.start()
        return thread

    running = start("occupier", 600)
    wait_until(lambda: [span["reason"] for span in spans_of("occupier")] == ["routed", "forwarded"], what="it runs")
    assert spans_of("occupier")[-1]["to_s"] is None
    waiting = [start("waiter-0", 1)]
    wait_until(lambda: [span["reason"] for span in spans_of("waiter-0")] == ["queued"], what="the first waits")
    waiting.append(start("waiter-1", 1))
    wait_until(lambda: [span["reason"] for span in spans_of("waiter-1")] == ["queued"], what="the second waits")
    (span,) = spans_of("waiter-1")
    assert span["to_s"] is None
    assert span["details"]["requests"] == 1
    chain.door.metrics_headers = ALICE
    assert chain.door.metric("expediter:gateway_queue_requests") == 2
    for thread in (running, *waiting):
        thread.join(60)
    spans = spans_of("waiter-1")
    assert [span["reason"] for span in spans] == ["queued", "routed", "forwarded", "ended"]
    assert spans[0]["to_s"] > 0.1
    assert "1 request with" in spans[0]["text"]
    assert chain.door.metric("expediter:gateway_queue_seconds_count") == 2


def test_two_clients_with_one_id_are_not_mixed_up(chain: Chain) -> None:
    for headers, num_tokens in ((ALICE, 2), (BOB, 3)):
        ask(chain, {**headers, "X-Request-Id": "same"}, max_tokens=num_tokens)
    for headers, num_tokens in ((ALICE, 2), (BOB, 3)):
        told = chain.door.get("/requests/same", headers=headers).json
        assert [gateway["spans"][-1]["details"]["output_tokens"] for gateway in told["gateway"]] == [num_tokens]
        assert {entry["spans"][-1]["details"]["output_tokens"] for entry in told["requests"]} == {num_tokens}
    assert chain.door.get("/requests/mine-not", headers=BOB).status == 404


def test_a_client_cannot_take_an_id_of_the_gateways(chain: Chain) -> None:
    ask(chain, {**ALICE, "X-Request-Id": "first"})
    (gateway,) = chain.door.get("/requests/first", headers=ALICE).json["gateway"]
    ask(chain, {**BOB, "X-Request-Id": "thief", "X-Expediter-Request-Id": gateway["request_id"]}, max_tokens=2)
    again = chain.door.get("/requests/first", headers=ALICE).json
    assert again["gateway"] == [gateway]
    assert {entry["spans"][-1]["details"]["output_tokens"] for entry in again["requests"]} == {4}


def test_a_line_per_request_and_no_secret_anywhere(chain: Chain) -> None:
    ask(chain, {**ALICE, "X-Request-Id": "logged"})
    secret_path = chain.door.request("POST", f"/v1/{KEY}?key={KEY}", {"prompt": PROMPT}, headers=ALICE)
    assert secret_path.status == 404
    wrong = chain.door.complete(PROMPT, headers={"Authorization": f"Bearer {KEY}x"})
    assert wrong.status == 401
    broken = chain.door.post("/v1/completions", f'{{"prompt": "{PROMPT}", '.encode(), headers=ALICE)
    assert broken.status == 400
    unknown = chain.door.complete(PROMPT, headers={**ALICE, "X-Request-Id": "unknown-model"}, model=PROMPT)
    assert unknown.status == 404
    wait_until(lambda: any(line.get("client_request_id") == "unknown-model" for line in lines(chain)), what="the line")
    (line,) = [line for line in lines(chain) if line.get("client_request_id") == "logged"]
    wanted = {"tenant": "alice", "model": "fake", "backend": "behind", "outcome": "ok", "status": 200, "attempts": 1}
    assert {name: line[name] for name in wanted} == wanted
    assert line["output_tokens"] == 4
    (unknown_line,) = [line for line in lines(chain) if line.get("client_request_id") == "unknown-model"]
    assert (unknown_line["model"], unknown_line["status"]) == ("", 404)
    wait_until(lambda: any(b"logged" not in body for body in chain.collector.bodies), what="spans")
    told = chain.door.get("/requests/logged", headers=ALICE).body + chain.door.get("/metrics", headers=ALICE).body
    written = [chain.log.read_bytes(), told, *chain.collector.bodies]
    for secret in (KEY, OTHER_KEY, BACKEND_KEY, PROMPT, hash_of(KEY)):
        for text in written:
            assert secret.encode() not in text, secret


def test_limits_and_keys_are_counted_by_kind(chain: Chain) -> None:
    unauthorized = chain.door.complete(PROMPT, headers={"Authorization": "Bearer nobody's"})
    assert unauthorized.status == 401
    refused = [chain.door.complete("x", headers=CAROL, model="fake", max_tokens=2).status for _ in range(3)]
    assert 429 in refused
    chain.door.metrics_headers = CAROL
    assert chain.door.metric("expediter:gateway_limited_total", tenant="carol", limit="requests") == refused.count(429)
    assert chain.door.metric("expediter:gateway_unauthorized_total") >= 1


def test_the_trace_goes_through(chain: Chain) -> None:
    parent = f"00-{CLIENT_TRACE}-00f067aa0ba902b7-01"
    ask(chain, {**ALICE, "traceparent": parent}, stream=True)
    trace = bytes.fromhex(CLIENT_TRACE)
    wait_until(lambda: len([s for s in chain.collector.spans if s.trace_id == trace]) >= 2, what="both spans")
    root, at_backend = sorted(
        (span for span in chain.collector.spans if span.trace_id == trace), key=lambda span: span.kind
    )
    assert (root.kind, at_backend.kind) == (Span.SPAN_KIND_SERVER, Span.SPAN_KIND_CLIENT)
    assert root.parent_span_id == bytes.fromhex("00f067aa0ba902b7")
    assert at_backend.parent_span_id == root.span_id
    attributes = {pair.key: pair.value for pair in root.attributes}
    assert attributes["gen_ai.request.model"].string_value == "fake"
    assert attributes["gen_ai.usage.output_tokens"].int_value == 4
    assert attributes["gen_ai.server.time_to_first_token"].double_value > 0


def test_with_keys_the_live_page_is_not_on_the_main_listener(chain: Chain) -> None:
    for path in ("/dashboard", "/dashboard/feed"):
        assert chain.door.get(path).status == 401
        reply = chain.door.get(path, headers=ALICE)
        assert (reply.status, reply.json["error"]["code"]) == (403, "on_admin_listener")


def test_backends_in_the_metrics(chain: Chain) -> None:
    chain.door.metrics_headers = ALICE
    assert chain.door.metric("expediter:backend_state", backend="behind", state="up") == 1
    assert chain.door.metric("expediter:gateway_requests_total", tenant="alice", outcome="ok", backend="behind") >= 1
    assert chain.door.metric("expediter:gateway_requests_in_flight") == 0
    assert chain.door.metric("expediter:gateway_tokens_total", kind="output", tenant="alice") >= 4
    assert b'tenant="bob"' not in chain.door.get("/metrics", headers=ALICE).body


def test_without_keys_the_live_page_is_there(model_folder: Path) -> None:
    with start_fake_server(model_folder, "--replicas", "2") as server:
        server.complete("x", stream=True)
        assert server.get("/dashboard").status == 200
        told = server.get("/dashboard/feed").json
        assert [backend["name"] for backend in told["backends"]] == ["replica 0", "replica 1"]
        assert {backend["state"] for backend in told["backends"]} == {"up"}
        assert sum(of["ended"] for point in told["points"] for of in point["tenants"].values()) == 1
        (slow,) = [slow for point in told["points"] for slow in point["slow"]]
        assert "at own until the first token" in slow["why"]


def test_tokens_of_own_replicas_are_exact(model_folder: Path) -> None:
    with start_fake_server(model_folder) as server:
        usage = server.complete("hello there", max_tokens=3).json["usage"]
        server.complete("hello there", max_tokens=3, stream=True)  # which says nothing of its tokens
        wait_until(lambda: server.metric("expediter:gateway_requests_total") == 2, what="both are counted")
        assert server.metric("expediter:gateway_tokens_total", kind="prompt") == 2 * usage["prompt_tokens"]
        assert server.metric("expediter:gateway_tokens_total", kind="output") == 2 * usage["completion_tokens"]
        assert server.metric("expediter:gateway_tokens_total", kind="cached") == server.metric(
            "vllm:prefix_cache_hits_total"
        )
