"""Asking a live server why a request waited, early refusal, and whose request it is."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer, Reply, start_fake_server, wait_until

from expediter.gateway.recent import RecentRequests
from expediter.gateway.tenants import hash_of

CONFIG = """
[slo_classes.interactive]
ttft_s = 0.1
refuse_late = true
[slo_classes.batch]
e2e_s = 600
"""
TENANTS = "".join(
    f'[tenants.{name}]\nkey_hashes = ["{hash_of(key)}"]\n' for name, key in (("alice", "key-a"), ("bob", "key-b"))
)
ALICE, BOB, OPERATOR = ({"Authorization": f"Bearer {key}"} for key in ("key-a", "key-b", "op"))


@pytest.fixture(scope="module")
def one_slot(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """One sequence at a time, 5 ms a token, the SLO order, two tenants."""
    file = tmp_path_factory.mktemp("config") / "expediter.toml"
    file.write_text(CONFIG + TENANTS)
    flags = (
        "--model",
        "toy",
        "--step-s",
        "0.005",
        "--max-num-seqs",
        "1",
        "--ordering",
        "slo",
        "--config",
        str(file),
        "--api-key",
        "op",
    )
    with start_fake_server(model_folder, *flags) as live:
        live.metrics_headers = OPERATOR
        yield live


class Background:
    """A request that runs while the test does something else."""

    def __init__(self, server: LiveServer, headers: dict[str, str], **fields: Any) -> None:
        self.reply: Reply | None = None
        body = {"prompt": "occupying", "ignore_eos": True, **fields}
        self._thread = threading.Thread(target=self._run, args=(server, headers, body))
        self._thread.start()

    def _run(self, server: LiveServer, headers: dict[str, str], body: dict[str, Any]) -> None:
        self.reply = server.post("/v1/completions", body, headers=headers)

    def join(self) -> Reply:
        self._thread.join(30)
        assert self.reply is not None
        return self.reply


def occupy(server: LiveServer, num_tokens: int = 200) -> Background:
    running = Background(server, {**ALICE, "X-Request-Id": "occupier"}, max_tokens=num_tokens)
    wait_until(lambda: last_reason(server, ALICE, "occupier") in ("prefilling", "decoding"), what="the slot is taken")
    return running


def last_reason(server: LiveServer, headers: dict[str, str], name: str) -> str | None:
    reply = server.get(f"/requests/{name}", headers=headers)
    entries = reply.json["requests"] if reply.status == 200 else []
    return entries[0]["spans"][-1]["reason"] if entries else None


def test_why_a_request_waits_and_waited(one_slot: LiveServer) -> None:
    occupier = occupy(one_slot)
    waiter = Background(one_slot, {**BOB, "X-Request-Id": "mine"}, max_tokens=2, slo_class="batch", prompt="secret")
    wait_until(lambda: last_reason(one_slot, BOB, "mine") == "no_slot", what="it was tried")
    spans = one_slot.get("/requests/mine", headers=BOB).json["requests"][0]["spans"]
    assert spans[-1]["to_s"] is None
    assert "no slot was free" in spans[-1]["text"]
    assert "first in line" in spans[-1]["text"]
    waited = one_slot.metric("expediter:num_requests_waiting_by_reason", reason="no_slot")
    assert waited == 1
    assert occupier.join().status == 200
    reply = waiter.join()
    assert reply.status == 200
    for name in ("mine", reply.json["id"]):
        answer = one_slot.get(f"/requests/{name}", headers=BOB)
        assert "secret" not in answer.body.decode()
        (entry,) = answer.json["requests"]
        assert [span["reason"] for span in entry["spans"]][-3:] == ["prefilling", "decoding", "ended"]
        assert entry["spans"][0]["from_s"] == 0
        ends = [span["to_s"] for span in entry["spans"]]
        assert ends == sorted(ends)
        assert one_slot.get(f"/requests/{entry['request_id']}", headers=BOB).json["requests"] == [entry]
    assert one_slot.metric("expediter:request_held_seconds_total", reason="no_slot") > 0.05
    assert one_slot.metric("expediter:request_slo_total", slo_class="batch", tenant="bob", met="true") == 1
    assert one_slot.metric("expediter:gateway_request_slo_total", slo_class="batch", tenant="bob", met="true") == 1
    assert one_slot.metric("expediter:tenant_prompt_tokens_total", tenant="bob") == len("secret")
    alices, bobs = (one_slot.get("/metrics", headers=headers).body for headers in (ALICE, BOB))
    assert b'tenant="bob"' not in alices, "a tenant's figures are its own"
    assert b'tenant="bob"' in bobs


def test_a_request_is_its_tenants(one_slot: LiveServer) -> None:
    done = one_slot.complete(["x", "y"], headers={**ALICE, "X-Request-Id": "same"}, max_tokens=1)
    ids = [entry["request_id"] for entry in one_slot.get("/requests/same", headers=ALICE).json["requests"]]
    assert len(ids) == 2
    for name in ("same", done.json["id"], *ids):
        assert one_slot.get(f"/requests/{name}", headers=ALICE).status == 200
        reply = one_slot.get(f"/requests/{name}", headers=BOB)
        assert (reply.status, reply.json["error"]["code"]) == (404, "request_not_found")
    assert one_slot.get("/requests/same").status == 401
    assert one_slot.get("/requests/nobody", headers=ALICE).status == 404
    assert one_slot.get("/requests/%FF/..", headers=ALICE).status == 404


def test_the_last_ones_are_kept(one_slot: LiveServer) -> None:
    one_slot.complete("x", headers={**ALICE, "X-Request-Id": "old"}, max_tokens=1)
    for _ in range(8):  # the fake server's limit
        assert last_reason(one_slot, ALICE, "old") == "ended"
        one_slot.complete("x", headers=ALICE, max_tokens=1)
    told = one_slot.get("/requests/old", headers=ALICE).json
    assert told["requests"] == [], "the replica has forgotten it"
    assert told["gateway"][0]["spans"][-1]["reason"] == "ended", "the gateway keeps more, of less"


@pytest.mark.parametrize("stream", [False, True])
def test_who_asked_for_it_is_refused_as_soon_as_it_is_late(one_slot: LiveServer, stream: bool) -> None:
    occupier = occupy(one_slot, 300)
    started_s = time.monotonic()
    reply = one_slot.complete("x", headers={**BOB, "X-Request-Id": "hasty"}, slo_class="interactive", stream=stream)
    took_s = time.monotonic() - started_s
    assert (reply.status, reply.headers["retry-after"]) == (503, "1")
    assert reply.headers["content-type"] == "application/json"
    assert reply.json["error"]["code"] == "late"
    assert "targets" in reply.json["error"]["message"]
    assert 0.1 <= took_s < 1.2, "after its target of 0.1 s, before the other has ended"
    assert last_reason(one_slot, BOB, "hasty") == "rejected"
    assert occupier.reply is None
    assert occupier.join().status == 200
    assert one_slot.metric("expediter:request_rejected_total", reason="late") >= 1
    assert one_slot.metric("expediter:request_slo_total", slo_class="interactive", tenant="bob", met="false") >= 1


def test_who_did_not_ask_is_served_late(one_slot: LiveServer) -> None:
    occupier = occupy(one_slot, 100)
    for stream in (False, True):
        fields = {"slo_class": "interactive", "refuse_late": False, "stream": stream, "max_tokens": 1}
        assert one_slot.complete("x", headers=BOB, **fields).status == 200
    occupier.join()


def test_who_can_be_in_time_is_streamed(one_slot: LiveServer) -> None:
    fields = {"ttft_ms": 20_000, "refuse_late": True, "stream": True, "max_tokens": 2, "ignore_eos": True}
    reply = one_slot.complete("x", headers=BOB, **fields)
    assert (reply.status, reply.events[-1]) == (200, "[DONE]")


def test_recent_requests_are_bounded() -> None:
    recent = RecentRequests(5)
    for number in range(4):
        recent.remember("t", ["same", f"name{number}"], [f"r{number}"])
    assert recent.find("t", "same") == ("r3",)
    assert recent.find("t", "name3") == recent.find("t", "r3") == ("r3",)
    assert recent.find("u", "r3") == recent.find("t", "r1") == ()
    assert len(recent._meanings) == 5
