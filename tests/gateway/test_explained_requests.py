"""What held a request at the gateway, joined with what its replica says."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from expediter.control.routing.base import Candidate, Placement
from expediter.core.errors import CapacityError
from expediter.core.slo import Slo
from expediter.gateway.dashboard.slow import SlowReasons, at_gateway, longest_wait, missed_targets
from expediter.gateway.explanations import Entry, Explanations
from expediter.gateway.siblings import Siblings
from expediter.telemetry.exchanges import Attempt, ExchangeRecord, Outcome
from expediter.telemetry.recent_exchanges import RecentExchanges

REPLICA = {
    "request_id": "r-7",
    "spans": [
        {
            "from_s": 0.0,
            "to_s": 0.3,
            "reason": "no_slot",
            "details": {},
            "text": "it was its turn, but no slot was free",
        },
        {"from_s": 0.3, "to_s": 0.5, "reason": "prefilling", "details": {}, "text": "runs"},
    ],
}


def exchange(**fields: Any) -> ExchangeRecord:
    """Return a request that waited for 0.5 s, failed at b1, and was answered by b0 0.9 s after its arrival."""
    failed = Attempt(backend="b1", dispatched_s=10.5, ended_s=10.6, failure="connect")
    answered = Attempt(backend="b0", dispatched_s=10.6, ended_s=12.0)
    defaults: dict[str, Any] = {
        "request_id": "req-1",
        "client_request_id": "mine",
        "tenant": "alice",
        "model": "m",
        "path": "/v1/completions",
        "is_stream": True,
        "slo": Slo(ttft_s=0.5),
        "arrived_s": 10.0,
        "queued_s": 10.0,
        "queued_behind_requests": 7,
        "queued_behind_tokens": 19_700,
        "dispatched_s": 10.6,
        "first_byte_s": 10.9,
        "ended_s": 12.0,
        "attempts": (failed, answered),
        "route": Placement(
            replica_id=3, because="it is idle", candidates=(Candidate(3, 0.25, 0), Candidate(4, 0.5, 0))
        ),
        "route_backends": ("b0", "b2"),
        "status": 200,
        "outcome": Outcome.OK,
        "num_output_tokens": 11,
        "predicted_ttft_s": 0.2,
    }
    return ExchangeRecord(**{**defaults, **fields})


class OwnPool:
    """Knows one request, by the gateway's id and by its own."""

    def door_id(self, tenant: str, name: str) -> str:
        return "req-1" if tenant == "alice" and name in ("req-1", "r-7", "cmpl-1") else ""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    async def entries(self, tenant: str, name: str) -> list[Entry]:
        self.asked.append((tenant, name))
        return [dict(REPLICA)] if tenant == "alice" and name in ("req-1", "r-7", "cmpl-1") else []


def explanations(*records: ExchangeRecord, answers: Mapping[str, object] | None = None, own: str = "") -> Explanations:
    recent = RecentExchanges()
    for record in records:
        recent.record(record)

    async def ask(backend: str, path: str) -> object:
        return (answers or {}).get(f"{backend}{path}")

    pool = OwnPool() if own else None
    return Explanations(Siblings(recent.find, lambda _: []), pool, ask, lambda name: name == own)


def explain(of: Explanations, tenant: str, name: str) -> Any:
    return asyncio.run(of.explain(tenant, name))


def test_what_the_gateway_did() -> None:
    told = explain(explanations(exchange()), "alice", "mine")
    (gateway,) = told["gateway"]
    assert (gateway["request_id"], gateway["client_request_id"], gateway["outcome"]) == ("req-1", "mine", "ok")
    spans = gateway["spans"]
    assert [span["reason"] for span in spans] == ["queued", "forwarded", "routed", "forwarded", "ended"]
    assert [round(span["from_s"], 3) for span in spans] == [0.0, 0.5, 0.6, 0.6, 2.0]
    assert [span["text"] for span in spans] == [
        "queued; 7 requests with 19700 tokens waited when it came; held 0.500 s by no slot being free",
        "sent to b1, which failed: connect",
        "sent to b0: it is idle; at cost 0.25, b2 at 0.5",
        "at b0; the answer began after 0.300 s, expected after 0.200 s",
        "ended: ok after 11 tokens",
    ]
    assert told["requests"] == [], "a foreign backend that tells nothing"


def test_only_its_tenant_hears() -> None:
    of = explanations(exchange(), own="b0")
    for name in ("mine", "req-1", "r-7"):
        assert explain(of, "alice", name) is not None
        assert explain(of, "bob", name) is None
        assert explain(of, "", name) is None
    assert explain(of, "alice", "other") is None


def test_one_id_of_two_clients_stays_two() -> None:
    bobs = exchange(request_id="req-2", tenant="bob", outcome=Outcome.FAILED, status=502)
    of = explanations(exchange(), bobs, own="b0")
    assert [gateway["request_id"] for gateway in explain(of, "bob", "mine")["gateway"]] == ["req-2"]
    assert [gateway["request_id"] for gateway in explain(of, "alice", "mine")["gateway"]] == ["req-1"]


def test_joined_with_an_own_replica() -> None:
    of = explanations(exchange(), own="b0")
    (entry,) = explain(of, "alice", "mine")["requests"]
    assert entry == {"backend": "b0", "from_s": pytest.approx(0.6), **REPLICA}
    by_response = explain(of, "alice", "cmpl-1")
    assert [gateway["request_id"] for gateway in by_response["gateway"]] == ["req-1"]
    assert by_response["requests"] == [entry]
    forgotten = explain(explanations(own="b0"), "alice", "cmpl-1")
    assert (forgotten["gateway"], forgotten["requests"]) == ([], [REPLICA])


def test_a_busy_replica_leaves_what_the_gateway_knows() -> None:
    class Busy(OwnPool):
        async def entries(self, tenant: str, name: str) -> list[Entry]:
            raise CapacityError("the replica is busy")

    recent = RecentExchanges()
    recent.record(exchange())
    of = Explanations(Siblings(recent.find, lambda _: []), Busy(), None, lambda name: name == "b0")
    told = explain(of, "alice", "mine")
    assert told["gateway"][0]["outcome"] == "ok"
    assert (told["requests"][0]["error"], told["requests"][0]["spans"]) == ("the replica is busy", [])
    assert "the first token" in asyncio.run(SlowReasons(of).of(exchange()))


def test_joined_with_an_expediter_behind_it() -> None:
    inner = {"id": "req-1", "gateway": [{"request_id": "req-9", "spans": []}], "requests": [REPLICA]}
    of = explanations(exchange(), answers={"b0/requests/req-1": inner})
    entries = explain(of, "alice", "mine")["requests"]
    assert [entry["request_id"] for entry in entries] == ["req-9", "r-7"]
    assert all(entry["backend"] == "b0" for entry in entries)


@pytest.mark.parametrize("answer", [None, [], "text", {"error": {}}, {"requests": 5}, {"requests": [1]}])
def test_whatever_a_backend_answers(answer: object) -> None:
    of = explanations(exchange(), answers={"b0/requests/req-1": answer})
    assert explain(of, "alice", "mine")["requests"] == []


def test_while_it_goes_on() -> None:
    waiting = exchange(attempts=(), route=None, dispatched_s=None, first_byte_s=None, outcome=Outcome.OPEN, status=0)
    (span,) = explain(explanations(waiting), "alice", "mine")["gateway"][0]["spans"]
    assert (span["reason"], span["to_s"]) == ("queued", None)
    running = exchange(outcome=Outcome.OPEN, status=0, first_byte_s=None)
    spans = explain(explanations(running), "alice", "mine")["gateway"][0]["spans"]
    assert (spans[-1]["reason"], spans[-1]["to_s"]) == ("forwarded", None)
    assert spans[-1]["text"] == "at b0, nothing has come from there"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"outcome": Outcome.OVER_LIMIT, "error_code": "tokens"}, "refused: over limit (tokens)"),
        ({"outcome": Outcome.EXPIRED, "error_code": "deadline_exceeded"}, "refused: expired (deadline_exceeded)"),
        ({"outcome": Outcome.NO_CAPACITY}, "refused: no capacity"),
    ],
)
def test_who_was_never_sent(fields: dict[str, Any], text: str) -> None:
    record = exchange(attempts=(), route=None, first_byte_s=None, dispatched_s=None, **fields)
    spans = explain(explanations(record), "alice", "mine")["gateway"][0]["spans"]
    assert (spans[-1]["reason"], spans[-1]["text"]) == ("rejected", text)


def test_why_in_a_sentence() -> None:
    pool = explanations(exchange(), own="b0")
    told = asyncio.run(SlowReasons(pool).of(exchange()))
    assert told == (
        "late: 900 ms until the first token (target 500 ms); "
        "500 ms in the gateway's queue behind 7 requests, no backend being free; 100 ms lost at b1: connect; "
        "300 ms at b0 until the first token, where 200 ms were expected; "
        "there 300 ms: it was its turn, but no slot was free"
    )
    gone = exchange(attempts=(), first_byte_s=None, outcome=Outcome.EXPIRED, error_code="deadline_exceeded")
    assert "its deadline passed while it waited (deadline_exceeded)" in asyncio.run(SlowReasons(pool).of(gone))
    broken = exchange(outcome=Outcome.FAILED, error_code="backend_error")
    assert "broke off after its answer had begun" in asyncio.run(SlowReasons(pool).of(broken))
    never_begun = exchange(outcome=Outcome.FAILED, first_byte_s=None)
    assert "failed, and nobody could take over" in asyncio.run(SlowReasons(pool).of(never_begun))
    assert longest_wait([]) == ""


@pytest.mark.parametrize(
    ("slo", "told"),
    [
        (Slo(ttft_s=1.0, tpot_s=0.125, e2e_s=3.0), ""),
        (Slo(ttft_s=0.899), "late: 900 ms until the first token (target 899 ms)"),
        (Slo(ttft_s=2.0, tpot_s=0.0625), "late: 110 ms per output token (target 62.5 ms)"),
        (
            Slo(ttft_s=0.5, e2e_s=1.75),
            "late: 900 ms until the first token (target 500 ms), 2 s until the end (target 1.75 s)",
        ),
    ],
)
def test_which_target_was_missed(slo: Slo, told: str) -> None:
    record = exchange(slo=slo)
    assert (record.met_slo is False) == bool(told)
    assert missed_targets(record) == told


def test_a_wait_between_two_attempts() -> None:
    lost = Attempt(backend="b1", dispatched_s=10.0, ended_s=10.2, failure="connect")
    attempts = (lost, Attempt(backend="b0", dispatched_s=10.7, ended_s=12.0))
    at_b0 = "200 ms at b0 until the first token, where 200 ms were expected"
    paused = exchange(attempts=attempts, dispatched_s=10.7, queued_s=None)
    assert at_gateway(paused) == ["200 ms lost at b1: connect", "500 ms until the next attempt", at_b0]
    queued = exchange(attempts=attempts, dispatched_s=10.7, queued_s=10.2)
    assert queued.queue_s == pytest.approx(0.5), "not what lies between that and the first attempt, which is below 0"
    in_queue = "500 ms in the gateway's queue behind 7 requests, no backend being free"
    assert at_gateway(queued) == ["200 ms lost at b1: connect", in_queue, at_b0]
    spans = explain(explanations(queued), "alice", "mine")["gateway"][0]["spans"]
    assert [span["reason"] for span in spans] == ["forwarded", "queued", "routed", "forwarded", "ended"]
    expired = exchange(attempts=(lost,), queued_s=10.2, first_byte_s=None, outcome=Outcome.EXPIRED, ended_s=11.0)
    assert at_gateway(expired)[1].startswith("800 ms in the gateway's queue")


def test_a_replica_is_asked_once_about_a_request() -> None:
    recent, pool = RecentExchanges(), OwnPool()
    reasons = SlowReasons(Explanations(Siblings(recent.find, lambda _: []), pool, None, lambda _: True))
    for _ in range(3):
        asyncio.run(reasons.of(exchange()))
    assert pool.asked == [("alice", "req-1")]
