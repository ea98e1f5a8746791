"""Requests as frames, and back: what the gateway sends, and what a replica makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from expediter.core.errors import ConfigurationError, ReplicaError, RequestError
from expediter.core.request import CacheHint, Carried, Grammar, Request
from expediter.core.slo import Slo
from expediter.runtime.frames import ResumeFrame, Submit, decode_tokens, encode_tokens


def submit_frame(requests: Sequence[Request]) -> Submit:
    """Return a request, or the sequences of a group, which differ in id and sampling alone, as one frame."""
    request = requests[0]
    return Submit(
        request_ids=tuple(request.request_id for request in requests),
        samplings=tuple(request.sampling for request in requests),
        prompt=encode_tokens(request.prompt),
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
            prompt=decode_tokens(frame.prompt),
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
        output=encode_tokens(np.array(carried.output, np.int32)),
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
    output = decode_tokens(frame.output)
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
