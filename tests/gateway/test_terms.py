"""Targets at the edge: body over header over class, and the name of what is wrong."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_server import LiveServer

from expediter.core.slo import NO_SLO, Slo, SloClass
from expediter.gateway.api.completions import CompletionBody
from expediter.gateway.bodies import decode_body
from expediter.gateway.door.bodies import decode_door_body
from expediter.gateway.errors import ApiError
from expediter.gateway.tenants import Tenant
from expediter.gateway.terms import Terms, terms_of

DECODER = msgspec.json.Decoder(CompletionBody)
CLASSES = {
    "interactive": SloClass(ttft_s=0.5, tpot_s=0.05, value=2.0, refuse_late=True),
    "batch": SloClass(e2e_s=60.0),
}
ALICE = Tenant(name="alice", slo_classes=CLASSES)


def terms(headers: dict[str, str] | None = None, **fields: object) -> Terms:
    body = decode_body(msgspec.json.encode({"prompt": "x", **fields}), DECODER)
    return terms_of(body, raw(headers or {}), ALICE)


def raw(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode()) for name, value in headers.items()]


def test_nothing_given() -> None:
    assert terms() == Terms(tenant="alice", cache_salt="alice/")
    assert terms().slo == NO_SLO


def test_a_class_brings_its_targets() -> None:
    made = terms(slo_class="interactive")
    assert made == Terms(
        tenant="alice",
        cache_salt="alice/",
        slo=Slo(ttft_s=0.5, tpot_s=0.05),
        slo_class="interactive",
        value=2.0,
        refuse_late=True,
    )
    assert terms({"X-SLO-Class": "batch"}).slo == Slo(e2e_s=60.0)


def test_the_body_wins_over_headers_and_both_over_the_class() -> None:
    headers = {"X-SLO-Class": "batch", "X-SLO-TTFT-Ms": "900", "X-SLO-TPOT-Ms": "70.5", "X-Deadline-Ms": "5000"}
    made = terms(headers, slo_class="interactive", ttft_ms=250, refuse_late=False)
    assert made.slo_class == "interactive"
    assert made.slo == Slo(ttft_s=0.25, tpot_s=0.0705, e2e_s=5.0)
    assert not made.refuse_late


def test_a_session_comes_from_the_body_or_a_header() -> None:
    assert terms({"X-Session-Id": " a "}).session == "a"
    assert terms({"X-Session-Id": "a"}, prompt_cache_key="b").session == "b"
    with pytest.raises(ApiError, match="X-Session-Id must have at most 256 characters"):
        terms({"X-Session-Id": "x" * 257})


def test_sessions_by_the_names_that_clients_give_them() -> None:
    for name in ("X-Session-Id", "X-Session-Affinity", "session_id"):
        assert terms({name: "s"}).session == "s"
        with pytest.raises(ApiError, match=f"{name} must have at most"):
            terms({name: "x" * 257})
    assert terms({"session_id": "c", "X-Session-Affinity": "b"}).session == "b"
    assert terms({"session_id": "c", "X-Session-Affinity": "b", "X-Session-Id": "a"}).session == "a"
    assert terms({"session_id": "c"}, prompt_cache_key="k").session == "k"


def test_what_the_tenant_decides() -> None:
    tenant = Tenant(name="bob", slo_classes=CLASSES, slo_class="batch", priority=3)
    body = decode_body(b'{"prompt": "x", "priority": -9, "cache_salt": "alice/"}', DECODER)
    made = terms_of(body, (), tenant)
    assert (made.tenant, made.priority, made.cache_salt) == ("bob", 3, "bob/alice/")
    assert (made.slo_class, made.slo) == ("batch", Slo(e2e_s=60.0))
    assert made.deadline_s is None, "a class's target is no deadline"
    assert terms_of(body, raw({"X-SLO-Class": "interactive"}), tenant).slo_class == "interactive"
    made = terms_of(decode_body(b'{"prompt": "x", "priority": 7}', DECODER), (), Tenant(name="carol"))
    assert (made.priority, made.slo, made.cache_salt) == (7, NO_SLO, "carol/")


def test_a_deadline_is_the_requests_own() -> None:
    assert terms({"X-Deadline-Ms": "1500"}).deadline_s == 1.5
    assert terms({"X-Deadline-Ms": "1500"}, slo_class="batch", deadline_ms=500).deadline_s == 0.5
    assert terms(slo_class="batch").deadline_s is None


@pytest.mark.parametrize("name", ["ttft_ms", "tpot_ms", "deadline_ms"])
@pytest.mark.parametrize("value", [b"0", b"-1", b"1e10", b"1e400"])
def test_the_door_asks_as_much_of_bodies_that_it_does_not_know(name: str, value: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        terms_of(decode_door_body(b'{"%b": %b}' % (name.encode(), value)), (), ALICE)
    assert caught.value.status == 400
    assert name in f"{caught.value.param} {caught.value.message}" or value == b"1e400"  # no JSON decoder takes it


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *(({"ttft_ms": wrong}, "ttft_ms") for wrong in (0, -1, True, "500", 1e10, [])),
        ({"tpot_ms": 0}, "tpot_ms"),
        ({"deadline_ms": "soon"}, "deadline_ms"),
        ({"refuse_late": 1}, "refuse_late"),
        *(({"prompt_cache_key": wrong}, "prompt_cache_key") for wrong in ("", "x" * 257, 3)),
        *(({"slo_class": wrong}, "slo_class") for wrong in ("gold", "", 3)),
    ],
)
def test_wrong_fields(fields: dict[str, object], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        terms(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("name", ["X-SLO-TTFT-Ms", "X-SLO-TPOT-Ms", "X-Deadline-Ms"])
@pytest.mark.parametrize("value", ["", "0", "-1", "nan", "inf", "1e400", "1_0", "0x10", "٣", "1,5", "9" * 12])
def test_wrong_headers(name: str, value: str) -> None:
    headers = raw({name: value})
    body = decode_body(b'{"prompt": "x", "ttft_ms": 1, "tpot_ms": 1, "deadline_ms": 1}', DECODER)
    with pytest.raises(ApiError) as caught:
        terms_of(body, headers, ALICE)
    assert (caught.value.status, caught.value.param) == (400, name)


def test_an_unknown_class_in_the_header_and_a_header_given_twice() -> None:
    with pytest.raises(ApiError, match="batch, interactive"):
        terms({"X-SLO-Class": "gold"})
    twice = [(b"x-deadline-ms", b"5"), (b"x-deadline-ms", b"5")]
    with pytest.raises(ApiError, match="more than once"):
        terms_of(decode_body(b'{"prompt": "x"}', DECODER), twice, ALICE)


@given(st.floats(0.001, 1e9), st.floats(0.001, 1e9))
def test_milliseconds_become_seconds(in_body: float, in_header: float) -> None:
    text = f"{in_header:.6f}"
    assert terms({"X-Deadline-Ms": text}).slo.e2e_s == float(text) / 1000
    assert terms({"X-Deadline-Ms": text}, deadline_ms=in_body).slo.e2e_s == in_body / 1000


def test_over_the_wire(server: LiveServer) -> None:
    assert server.complete("hi", ttft_ms=60_000).status == 200
    assert server.complete("hi", headers={"X-SLO-TPOT-Ms": "5000"}).status == 200
    for reply in (server.complete("hi", slo_class="gold"), server.complete("hi", headers={"X-SLO-Class": "gold"})):
        assert reply.status == 400
        assert "none configured" in reply.json["error"]["message"]
    assert server.complete("hi", tpot_ms=-1).json["error"]["param"] == "tpot_ms"
