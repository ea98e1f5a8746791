"""What crosses the socket between gateway and replica: typed msgpack frames, no pickle anywhere.

A frame is four bytes of length (big endian), then one tagged msgpack map. Lengths are bounded, types are checked while
decoding, and token arrays travel as raw little-endian int32 whose length is checked against what it must be.
"""

from __future__ import annotations

import struct
from typing import Annotated, Final

import msgspec
import numpy as np

from expediter.core.errors import ReplicaError
from expediter.core.explanation import Span
from expediter.core.plan import StepFeatures, TokenLogprobs
from expediter.core.ports import ExecutorLimits
from expediter.core.request import FinishReason, SamplingParams, TokenArray

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


def _plain_number(value: object) -> object:
    """Let numbers that numpy made pass as Python's."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no place in a frame")


ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=_plain_number)
_GATEWAY_DECODER: Final[msgspec.msgpack.Decoder[GatewayFrame]] = msgspec.msgpack.Decoder(GatewayFrame)
_REPLICA_DECODER: Final[msgspec.msgpack.Decoder[ReplicaFrame]] = msgspec.msgpack.Decoder(ReplicaFrame)


def encode_frame(frame: GatewayFrame | ReplicaFrame) -> bytes:
    """Return the frame with its length in front.

    Raises:
        ReplicaError: it exceeds MAX_FRAME_BYTES.
    """
    body = ENCODER.encode(frame)
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


def encode_tokens(tokens: TokenArray) -> bytes:
    """Return an array of tokens, of any shape, as raw int32."""
    return tokens.astype(_WIRE_DTYPE, copy=False).tobytes()


def decode_tokens(raw: bytes, num_tokens: int | None = None) -> TokenArray:
    """Return raw int32 as an array of shape [num_tokens]; None for as many as there are.

    Raises:
        ReplicaError: the length is not exactly that of `num_tokens` tokens.
    """
    if num_tokens is None:
        num_tokens = len(raw) // _WIRE_DTYPE.itemsize
    if len(raw) != num_tokens * _WIRE_DTYPE.itemsize:
        raise ReplicaError(f"{len(raw)} bytes are not {num_tokens} tokens")
    return np.frombuffer(raw, dtype=_WIRE_DTYPE).astype(np.int32)
