"""What crosses the socket between gateway and replica: typed msgpack frames, no pickle anywhere.

A frame is four bytes of length (big endian), then one tagged msgpack map. Lengths are bounded, types are checked while
decoding, and token arrays travel as raw little-endian int32 whose length is checked against what it must be.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final

import msgspec
import numpy as np

from expediter.core.errors import ConfigurationError, ReplicaError, RequestError
from expediter.core.events import Admitted, Event, Finished, FirstToken, Preempted, Queued, Rejected, Tokens
from expediter.core.explanation import Span
from expediter.core.plan import StepFeatures, TokenLogprobs
from expediter.core.ports import ExecutorLimits
from expediter.core.request import CacheHint, Carried, FinishReason, Grammar, Request, SamplingParams, TokenArray
from expediter.core.slo import Slo
from expediter.runtime.loop import StepRecord

MAX_FRAME_BYTES: Final = 64 << 20
_LENGTH: Final = struct.Struct(">I")
_WIRE_DTYPE: Final = np.dtype("<i4")


class Submit(msgspec.Struct, frozen=True, tag="submit", kw_only=True):
    """Gateway → replica: a request; fields as in `core.Request`, `prompt` as raw int32, targets after `arrival_s`.

    With several sequences it is a group: each has an id and a sampling of its own.
    """

    request_ids: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    samplings: Annotated[tuple[SamplingParams, ...], msgspec.Meta(min_length=1)]
    prompt: bytes
    max_tokens: int
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    grammar: str | None
    priority: int
    cache_salt: str
    pin_s: float
    drop: bool
    tenant: str
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    slo_class: str
    value: float
    refuse_late: bool
    arrival_s: float


class ResumeFrame(msgspec.Struct, frozen=True, tag="resume", kw_only=True):
    """Gateway → replica: a request that another replica had; `output` as raw int32, the rest as in `core.Carried`."""

    request: Submit
    output: bytes
    first_scheduled_s: float | None
    first_token_s: float | None
    num_cached_tokens: int
    num_preemptions: int


class AbortFrame(msgspec.Struct, frozen=True, tag="abort"):
    """Gateway → replica: end this request; unknown ids are ignored."""

    request_id: str
    reason: FinishReason


class ExplainFrame(msgspec.Struct, frozen=True, tag="explain"):
    """Gateway → replica: say what held this request; an `ExplanationFrame` is the answer."""

    request_id: str


class DrainFrame(msgspec.Struct, frozen=True, tag="drain"):
    """Gateway → replica: take no new requests."""


class Hello(msgspec.Struct, frozen=True, tag="hello", kw_only=True):
    """Replica → gateway: ready to serve. `max_model_len` is what this replica accepts, in tokens."""

    replica_id: int
    pid: int
    limits: ExecutorLimits
    max_model_len: int


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Replica → gateway: it cannot start with what it was told; the message is for the operator."""

    message: str


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Replica → gateway, at a steady rate even during a long step: the process is alive.

    `turn_age_s` is how long the loop has been in its current turn, in seconds; far above a step's length, it hangs.
    """

    turn_age_s: float


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges of a replica after a turn of its loop.

    Attributes:
        waiting_by_reason: waiting requests by what held them when the last step was planned.
        actual_step_s, predicted_step_s, step_error_s: sums over the steps that the scheduler has learned from.
    """

    num_running: int
    num_waiting: int
    num_pending_tokens: int
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    waiting_by_reason: dict[str, int] = {}
    actual_step_s: float = 0.0
    predicted_step_s: float = 0.0
    step_error_s: float = 0.0


class TokensFrame(msgspec.Struct, frozen=True, kw_only=True):
    """Output tokens of one step. `tokens` is raw int32, shape [num_steps, len(request_ids)]."""

    now_s: float
    request_ids: tuple[str, ...]
    num_steps: int
    tokens: bytes
    logprobs: tuple[TokenLogprobs | None, ...] | None = None


class StepFrame(msgspec.Struct, frozen=True, tag="step", kw_only=True):
    """Replica → gateway: the events of one turn of the loop, in order, each as (kind, body)."""

    events: tuple[tuple[int, msgspec.Raw], ...]
    stats: Stats
    step_id: int = -1
    features: StepFeatures | None = None
    elapsed_s: float = 0.0
    budget_tokens: int = 0


class ExplanationFrame(msgspec.Struct, frozen=True, tag="explanation"):
    """Replica → gateway: the answer to an `ExplainFrame`; None if the request is not known (any more)."""

    request_id: str
    spans: tuple[Span, ...] | None


GatewayFrame = Submit | ResumeFrame | AbortFrame | ExplainFrame | DrainFrame
ReplicaFrame = Hello | Failed | Heartbeat | StepFrame | ExplanationFrame
ReplicaEvent = Queued | Rejected | Admitted | Preempted | FirstToken | TokensFrame | Finished

_KINDS: Final = (Queued, Rejected, Admitted, Preempted, FirstToken, TokensFrame, Finished)
_KIND_OF: Final = {kind: number for number, kind in enumerate(_KINDS)}
_EVENT_DECODERS: Final[tuple[msgspec.msgpack.Decoder[Any], ...]] = tuple(
    msgspec.msgpack.Decoder(kind) for kind in _KINDS
)


def _plain_number(value: object) -> object:
    """Let numbers that numpy made pass as Python's."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no place in a frame")


_ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=_plain_number)
_GATEWAY_DECODER: Final[msgspec.msgpack.Decoder[GatewayFrame]] = msgspec.msgpack.Decoder(GatewayFrame)
_REPLICA_DECODER: Final[msgspec.msgpack.Decoder[ReplicaFrame]] = msgspec.msgpack.Decoder(ReplicaFrame)


def encode_frame(frame: GatewayFrame | ReplicaFrame) -> bytes:
    """Return the frame with its length in front.

    Raises:
        ReplicaError: it exceeds MAX_FRAME_BYTES.
    """
    body = _ENCODER.encode(frame)
    if len(body) > MAX_FRAME_BYTES:
        raise ReplicaError(f"a frame of {len(body)} bytes exceeds {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


class FrameSplitter:
    """Cuts a byte stream into frame bodies; holds no I/O of its own."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the bodies that `data` completes.

        Raises:
            ReplicaError: a length exceeds MAX_FRAME_BYTES; nothing that follows can be trusted.
        """
        self._buffer += data
        bodies: list[bytes] = []
        position = 0
        while len(self._buffer) - position >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, position)
            if length > MAX_FRAME_BYTES:
                raise ReplicaError(f"a frame claims {length} bytes, more than {MAX_FRAME_BYTES}")
            end = position + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[position + _LENGTH.size : end]))
            position = end
        del self._buffer[:position]
        return bodies


def decode_gateway_frame(body: bytes) -> GatewayFrame:
    """Return the typed frame.

    Raises:
        ReplicaError: it is malformed.
    """
    try:
        return _GATEWAY_DECODER.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ReplicaError("malformed frame from the gateway") from error


def decode_replica_frame(body: bytes) -> ReplicaFrame:
    """Return the typed frame.

    Raises:
        ReplicaError: it is malformed.
    """
    try:
        return _REPLICA_DECODER.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ReplicaError("malformed frame from a replica") from error


def submit_frame(requests: Sequence[Request]) -> Submit:
    """Return a request, or the sequences of a group, which differ in id and sampling alone, as one frame."""
    request = requests[0]
    return Submit(
        request_ids=tuple(request.request_id for request in requests),
        samplings=tuple(request.sampling for request in requests),
        prompt=request.prompt.astype(_WIRE_DTYPE, copy=False).tobytes(),
        max_tokens=request.max_tokens,
        min_tokens=request.min_tokens,
        stop_token_ids=request.stop_token_ids,
        grammar=None if request.grammar is None else request.grammar.text,
        priority=request.priority,
        cache_salt=request.cache_salt,
        pin_s=0.0 if request.cache_hint is None else request.cache_hint.pin_s,
        drop=request.cache_hint is not None and request.cache_hint.drop,
        tenant=request.tenant,
        ttft_s=request.slo.ttft_s,
        tpot_s=request.slo.tpot_s,
        e2e_s=request.slo.e2e_s,
        slo_class=request.slo_class,
        value=request.value,
        refuse_late=request.refuse_late,
        arrival_s=request.arrival_s,
    )


def requests_of(frame: Submit) -> tuple[Request, ...]:
    """Return the request of a frame, or the sequences of its group.

    Raises:
        ReplicaError: its fields do not make a valid request.
    """
    if len(frame.request_ids) != len(frame.samplings):
        raise ReplicaError("a frame has samplings for other sequences than its own")
    try:
        first = Request(
            request_id=frame.request_ids[0],
            prompt=decode_tokens(frame.prompt, len(frame.prompt) // _WIRE_DTYPE.itemsize),
            max_tokens=frame.max_tokens,
            min_tokens=frame.min_tokens,
            stop_token_ids=frame.stop_token_ids,
            grammar=None if frame.grammar is None else Grammar(frame.grammar),
            sampling=frame.samplings[0],
            priority=frame.priority,
            cache_salt=frame.cache_salt,
            cache_hint=CacheHint(pin_s=frame.pin_s, drop=frame.drop) if frame.pin_s or frame.drop else None,
            tenant=frame.tenant,
            slo=Slo(ttft_s=frame.ttft_s, tpot_s=frame.tpot_s, e2e_s=frame.e2e_s),
            slo_class=frame.slo_class,
            value=frame.value,
            refuse_late=frame.refuse_late,
            arrival_s=frame.arrival_s,
        )
    except (RequestError, ConfigurationError) as error:
        raise ReplicaError(f"invalid request in a frame: {error}") from error
    others = zip(frame.request_ids[1:], frame.samplings[1:], strict=True)
    return (first, *(replace(first, request_id=name, sampling=sampling) for name, sampling in others))


def resume_frame(request: Request, carried: Carried) -> ResumeFrame:
    """Return a request with what it has so far as one frame."""
    return ResumeFrame(
        request=submit_frame((request,)),
        output=np.array(carried.output, _WIRE_DTYPE).tobytes(),
        first_scheduled_s=carried.first_scheduled_s,
        first_token_s=carried.first_token_s,
        num_cached_tokens=carried.num_cached_tokens,
        num_preemptions=carried.num_preemptions,
    )


def resumed_of(frame: ResumeFrame) -> tuple[Request, Carried]:
    """Return the request of a frame and what it has so far.

    Raises:
        ReplicaError: they do not fit each other, or are several requests.
    """
    request, *others = requests_of(frame.request)
    output = decode_tokens(frame.output, len(frame.output) // _WIRE_DTYPE.itemsize)
    if others or len(output) >= request.max_tokens:
        raise ReplicaError("a frame resumes what cannot go on")
    carried = Carried(
        output=tuple(output.tolist()),
        first_scheduled_s=frame.first_scheduled_s,
        first_token_s=frame.first_token_s,
        num_cached_tokens=frame.num_cached_tokens,
        num_preemptions=frame.num_preemptions,
    )
    return request, carried


def decode_tokens(raw: bytes, num_tokens: int) -> TokenArray:
    """Return raw int32 as an array of shape [num_tokens].

    Raises:
        ReplicaError: the length is not exactly that of `num_tokens` tokens.
    """
    if len(raw) != num_tokens * _WIRE_DTYPE.itemsize:
        raise ReplicaError(f"{len(raw)} bytes are not {num_tokens} tokens")
    return np.frombuffer(raw, dtype=_WIRE_DTYPE).astype(np.int32)


def step_frame(events: Iterable[Event], step: StepRecord | None, stats: Stats) -> StepFrame:
    """Return one turn of the loop as a frame."""
    logprobs = step.logprobs if step else None
    encoded = tuple(_encode_event(event, logprobs) for event in events)
    if step is None:
        return StepFrame(events=encoded, stats=stats)
    return StepFrame(
        events=encoded,
        stats=stats,
        step_id=step.step_id,
        features=step.features,
        elapsed_s=step.elapsed_s,
        budget_tokens=step.budget_tokens,
    )


def events_of(frame: StepFrame) -> list[ReplicaEvent]:
    """Return the events of a frame, in order.

    Raises:
        ReplicaError: an event is malformed.
    """
    events: list[ReplicaEvent] = []
    for kind, body in frame.events:
        if not 0 <= kind < len(_EVENT_DECODERS):
            raise ReplicaError(f"no event of kind {kind}")
        try:
            event: ReplicaEvent = _EVENT_DECODERS[kind].decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, ConfigurationError) as error:
            raise ReplicaError("malformed event from a replica") from error
        if isinstance(event, TokensFrame):
            _check_tokens(event)
        events.append(event)
    return events


def _check_tokens(event: TokensFrame) -> None:
    if event.num_steps < 1:
        raise ReplicaError("a tokens event covers no step")
    decode_tokens(event.tokens, event.num_steps * len(event.request_ids))
    if event.logprobs is not None and len(event.logprobs) != len(event.request_ids):
        raise ReplicaError("a tokens event has logprobs for other requests than its own")


def _encode_event(event: Event, logprobs: Sequence[TokenLogprobs | None] | None) -> tuple[int, msgspec.Raw]:
    if not isinstance(event, Tokens):
        return _KIND_OF[type(event)], msgspec.Raw(_ENCODER.encode(event))
    frame = TokensFrame(
        now_s=event.now_s,
        request_ids=tuple(state.request_id for state in event.states),
        num_steps=len(event.tokens),
        tokens=event.tokens.astype(_WIRE_DTYPE, copy=False).tobytes(),
        logprobs=None if logprobs is None else tuple(logprobs[column] for column in event.result_index),
    )
    return _KIND_OF[TokensFrame], msgspec.Raw(_ENCODER.encode(frame))
