"""The place of a request in a distributed trace: W3C's `traceparent` header, read and written.

Source: W3C Trace Context, version 00 (https://www.w3.org/TR/trace-context/).
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Final, Protocol

_TRACEPARENT: Final = re.compile(
    rb"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<rest>-.*)?"
)
_SAMPLED: Final = 1

new_id = random.SystemRandom().getrandbits
"""Ids are seen by other systems, so they do not come from a generator whose state can be told from them."""


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The span that stands for a request at the gateway.

    Attributes:
        trace_id: 128 bits. `span_id`: 64 bits, the gateway's own span.
        parent_span_id: the client's, None if the trace begins here.
        is_sampled: whether the spans of this trace are kept.
    """

    trace_id: int
    span_id: int
    parent_span_id: int | None = None
    is_sampled: bool = True

    def traceparent(self, span_id: int) -> bytes:
        """Return the header for whom `span_id`, a span of this trace, calls."""
        return b"00-%032x-%016x-%02x" % (self.trace_id, span_id, self.is_sampled)


@dataclass(frozen=True, slots=True)
class ClientTrace:
    """What a client's `traceparent` says."""

    trace_id: int
    span_id: int
    is_sampled: bool


def parse_traceparent(header: bytes) -> ClientTrace | None:
    """Return what the header says, None if it is malformed: the trace then begins anew."""
    match = _TRACEPARENT.fullmatch(header)
    if match is None or match["version"] == b"ff" or (match["version"] == b"00" and match["rest"] is not None):
        return None
    trace_id, span_id = int(match["trace"], 16), int(match["span"], 16)
    if not trace_id or not span_id:
        return None
    return ClientTrace(trace_id, span_id, bool(int(match["flags"], 16) & _SAMPLED))


class Tracer(Protocol):
    """Chooses the place of requests in their traces."""

    def begin(self, traceparent: bytes | None) -> TraceContext:
        """Return the place of a request that has come with this header, or without one."""
        ...
