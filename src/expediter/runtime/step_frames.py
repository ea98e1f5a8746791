"""The turns of a replica's loop as frames, and back to events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from expediter.core.errors import ConfigurationError, ReplicaError
from expediter.core.events import Admitted, Event, Finished, FirstToken, Preempted, Queued, Rejected, Tokens
from expediter.core.plan import TokenLogprobs
from expediter.runtime.frames import ENCODER, Stats, StepFrame, TokensFrame, decode_tokens, encode_tokens
from expediter.runtime.loop import StepRecord

ReplicaEvent = Queued | Rejected | Admitted | Preempted | FirstToken | TokensFrame | Finished

_KINDS: Final = (Queued, Rejected, Admitted, Preempted, FirstToken, TokensFrame, Finished)
_KIND_OF: Final = {kind: number for number, kind in enumerate(_KINDS)}
_EVENT_DECODERS: Final[tuple[msgspec.msgpack.Decoder[Any], ...]] = tuple(
    msgspec.msgpack.Decoder(kind) for kind in _KINDS
)


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
        return _KIND_OF[type(event)], msgspec.Raw(ENCODER.encode(event))
    frame = TokensFrame(
        now_s=event.now_s,
        request_ids=tuple(state.request_id for state in event.states),
        num_steps=len(event.tokens),
        tokens=encode_tokens(event.tokens),
        logprobs=None if logprobs is None else tuple(logprobs[column] for column in event.result_index),
    )
    return _KIND_OF[TokensFrame], msgspec.Raw(ENCODER.encode(frame))
