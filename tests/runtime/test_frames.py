"""Frames survive the wire unchanged; whatever else comes in is a `ReplicaError`, never anything worse."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expediter.core.errors import ReplicaError
from expediter.core.events import (
    Admitted,
    Finished,
    FirstToken,
    PreemptCause,
    Preempted,
    Queued,
    Rejected,
    RejectReason,
    Tokens,
)
from expediter.core.explanation import Reason, Span
from expediter.core.plan import StepFeatures, TokenLogprobs
from expediter.core.request import CacheHint, Carried, FinishReason, Grammar, Request, RequestState, SamplingParams
from expediter.core.slo import Slo
from expediter.runtime import frames, step_frames
from expediter.runtime.frames import (
    AbortFrame,
    DrainFrame,
    ExplainFrame,
    ExplanationFrame,
    FrameSplitter,
    Stats,
    StepFrame,
    TokensFrame,
    decode_gateway_frame,
    decode_replica_frame,
    decode_tokens,
    encode_frame,
)
from expediter.runtime.loop import StepRecord
from expediter.runtime.request_frames import requests_of, resume_frame, resumed_of, submit_frame
from expediter.runtime.step_frames import events_of, step_frame

STATS = Stats(num_running=1, num_waiting=2, num_pending_tokens=3, num_blocks=4, num_used_blocks=5, num_cached_blocks=6)


def make_request(request_id: str = "r1") -> Request:
    return Request(
        request_id=request_id,
        prompt=np.array([1, 2, 2**31 - 1], np.int32),
        max_tokens=5,
        min_tokens=1,
        stop_token_ids=(7,),
        sampling=SamplingParams(temperature=0.5, seed=-3, logit_bias=((1, -2.0),), logprobs=2),
        priority=-1,
        cache_salt="salt",
        cache_hint=CacheHint(pin_s=30.0),
        tenant="t",
        slo=Slo(ttft_s=0.5, tpot_s=0.05, e2e_s=9.0),
        slo_class="interactive",
        value=2.0,
        refuse_late=True,
        arrival_s=1.25,
    )


def body_of(frame: frames.GatewayFrame | frames.ReplicaFrame) -> bytes:
    (body,) = FrameSplitter().feed(encode_frame(frame))
    return body


def test_a_request_crosses_unchanged() -> None:
    request = make_request()
    (back,) = requests_of(decode_gateway_frame(body_of(submit_frame([request]))))  # type: ignore[arg-type]
    for name in Request.__slots__:
        want, got = getattr(request, name), getattr(back, name)
        assert np.array_equal(want, got) if name == "prompt" else want == got
    assert back.prompt.dtype == np.int32


def test_a_grammar_crosses_once_for_all_sequences() -> None:
    one = Grammar("{}ü")
    group = [replace(make_request(), grammar=one), replace(make_request(), request_id="r2", grammar=one)]
    back = requests_of(decode_gateway_frame(body_of(submit_frame(group))))  # type: ignore[arg-type]
    assert back[0].grammar is not None
    assert back[0].grammar.text == one.text
    assert back[0].grammar is back[1].grammar
    resumed, _ = resumed_of(decode_gateway_frame(body_of(resume_frame(group[0], Carried()))))  # type: ignore[arg-type]
    assert resumed.grammar is not None
    assert resumed.grammar.text == one.text
    with pytest.raises(ReplicaError):
        requests_of(msgspec.structs.replace(submit_frame([make_request()]), grammar=""))


def test_a_group_crosses_in_one_frame() -> None:
    group = [make_request(), replace(make_request(), request_id="r2", sampling=SamplingParams(seed=9))]
    back = requests_of(decode_gateway_frame(body_of(submit_frame(group))))  # type: ignore[arg-type]
    assert [(r.request_id, r.sampling) for r in back] == [(r.request_id, r.sampling) for r in group]
    assert back[0].prompt is back[1].prompt


@pytest.mark.parametrize("change", [{"samplings": (SamplingParams(),) * 2}, {"request_ids": ()}, {"samplings": ()}])
def test_groups_that_are_none(change: dict[str, object]) -> None:
    frame = msgspec.structs.replace(submit_frame([make_request()]), **change)
    with pytest.raises(ReplicaError):
        requests_of(decode_gateway_frame(body_of(frame)))  # type: ignore[arg-type]


def test_a_resumed_request_crosses_with_its_output() -> None:
    carried = Carried(
        output=(5, 0, 2**31 - 1), first_scheduled_s=2.0, first_token_s=3.5, num_cached_tokens=4, num_preemptions=1
    )
    request, back = resumed_of(decode_gateway_frame(body_of(resume_frame(make_request(), carried))))  # type: ignore[arg-type]
    assert all(getattr(back, name) == getattr(carried, name) for name in Carried.__slots__)
    assert request.request_id == make_request().request_id
    assert request.prompt.tolist() == make_request().prompt.tolist()


def test_what_cannot_be_resumed() -> None:
    whole = resume_frame(make_request(), Carried(output=(1,) * make_request().max_tokens))
    group = [make_request(), replace(make_request(), request_id="r2")]
    for wrong in (
        whole,
        msgspec.structs.replace(whole, output=b"123"),
        msgspec.structs.replace(whole, output=b"", request=submit_frame(group)),
    ):
        with pytest.raises(ReplicaError):
            resumed_of(decode_gateway_frame(body_of(wrong)))  # type: ignore[arg-type]


def test_gateway_frames() -> None:
    for frame in (AbortFrame("r1", FinishReason.STOP), ExplainFrame("r1"), DrainFrame()):
        assert decode_gateway_frame(body_of(frame)) == frame


def test_an_explanation_crosses() -> None:
    spans = (
        Span(0.5, 1.0, Reason.NO_BLOCKS, {"needs_blocks": 3, "available_blocks": 1}),
        Span(1.0, None, Reason.PREEMPTED, {"cause": "growth", "for_request": "r2", "over_age": True, "budget_s": 0.5}),
    )
    for frame in (ExplanationFrame("r1", spans), ExplanationFrame("r1", None)):
        assert decode_replica_frame(body_of(frame)) == frame


@pytest.mark.parametrize("wrong", [{"ttft_s": -1.0}, {"e2e_s": float("nan")}, {"value": 0.0}])
def test_impossible_targets_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ReplicaError, match="invalid request"):
        requests_of(msgspec.structs.replace(submit_frame([make_request()]), **wrong))


def test_events_cross_in_order() -> None:
    states = np.empty(2, np.object_)
    for index, name in enumerate("ab"):
        states[index] = RequestState(make_request(name), index, b"")
    logprobs = (TokenLogprobs(-0.5, 1, ((3, -0.5), (4, -math.inf))), None, None)
    events = [
        Queued("a", 0.5),
        Rejected("c", 0.5, RejectReason.TOO_LONG, "no"),
        Preempted("b", 1.0, PreemptCause.PRIORITY, np.int64(4)),  # type: ignore[arg-type]
        Admitted("a", 1.0, 10, 4, False),
        FirstToken("a", 2.0),
        Tokens(2.0, states, np.array([[3, 9]], np.int32), np.array([0, 2])),
        Finished("a", 2.0, FinishReason.LENGTH, 3, 1, 0, 0),
    ]
    step = StepRecord(7, StepFeatures(3, 2, 1, 10, 4.5), 0.25, logprobs)
    frame = decode_replica_frame(body_of(step_frame(events, step, STATS)))
    assert isinstance(frame, StepFrame)
    assert (frame.step_id, frame.features, frame.elapsed_s, frame.stats) == (7, step.features, 0.25, STATS)
    back = events_of(frame)
    tokens = back[5]
    assert isinstance(tokens, TokensFrame)
    assert tokens.request_ids == ("a", "b")
    assert decode_tokens(tokens.tokens, 2).tolist() == [3, 9]
    assert tokens.logprobs == (logprobs[0], None)
    assert back[:5] + back[6:] == events[:5] + events[6:]


def test_a_turn_without_a_step() -> None:
    frame = decode_replica_frame(body_of(step_frame([Queued("a", 0.0)], None, STATS)))
    assert isinstance(frame, StepFrame)
    assert frame.features is None
    assert events_of(frame) == [Queued("a", 0.0)]


@given(st.lists(st.integers(1, 400)), st.integers(1, 50))
def test_any_division_of_the_stream_gives_the_same_frames(sizes: list[int], chunk: int) -> None:
    sent = [AbortFrame("x" * size, FinishReason.ABORT) for size in sizes]
    stream = b"".join(map(encode_frame, sent))
    splitter = FrameSplitter()
    bodies = [body for at in range(0, len(stream), chunk) for body in splitter.feed(stream[at : at + chunk])]
    assert [decode_gateway_frame(body) for body in bodies] == sent


def test_sizes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ReplicaError):
        FrameSplitter().feed(b"\xff\xff\xff\xff")
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 10)
    with pytest.raises(ReplicaError):
        encode_frame(AbortFrame("x" * 20, FinishReason.ABORT))


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    for decode in (decode_gateway_frame, decode_replica_frame):
        try:
            decode(noise)
        except ReplicaError:
            continue


@settings(max_examples=300)
@given(st.data())
def test_damaged_frames_are_refused_or_harmless(data: st.DataObject) -> None:
    states = np.empty(1, np.object_)
    states[0] = RequestState(make_request(), 0, b"")
    events = [Queued("r1", 0.0), Tokens(1.0, states, np.array([[3]], np.int32), np.array([0]))]
    body = bytearray(
        data.draw(st.sampled_from([body_of(submit_frame([make_request()])), body_of(step_frame(events, None, STATS))]))
    )
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        frame = decode_gateway_frame(bytes(body))
        if isinstance(frame, frames.Submit):
            requests_of(frame)
    except ReplicaError:
        pass
    try:
        answer = decode_replica_frame(bytes(body))
        if isinstance(answer, StepFrame):
            events_of(answer)
    except ReplicaError:
        pass


@pytest.mark.parametrize(
    "tokens",
    [
        TokensFrame(now_s=0.0, request_ids=("a",), num_steps=1, tokens=b"123"),
        TokensFrame(now_s=0.0, request_ids=("a", "b"), num_steps=1, tokens=b"1234"),
        TokensFrame(now_s=0.0, request_ids=("a",), num_steps=0, tokens=b""),
        TokensFrame(now_s=0.0, request_ids=("a",), num_steps=1, tokens=b"1234", logprobs=()),
    ],
)
def test_tokens_of_the_wrong_length(tokens: TokensFrame) -> None:
    kind = step_frames._KIND_OF[TokensFrame]
    frame = StepFrame(events=((kind, msgspec.Raw(msgspec.msgpack.encode(tokens))),), stats=STATS)
    with pytest.raises(ReplicaError):
        events_of(frame)


@pytest.mark.parametrize("kind", [-1, 7, 99])
def test_unknown_kinds(kind: int) -> None:
    with pytest.raises(ReplicaError):
        events_of(StepFrame(events=((kind, msgspec.Raw(b"\xc0")),), stats=STATS))


def test_prompts_that_are_no_tokens() -> None:
    for prompt in (b"", b"123"):
        frame = msgspec.structs.replace(submit_frame([make_request()]), prompt=prompt)
        with pytest.raises(ReplicaError):
            requests_of(frame)
