"""A request trace in memory: columns, not objects; prompts are made when a request arrives.

`trace_readers.read_trace` makes one from a file. Ten million rows without prefix ids take about 250 MB.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from expediter.core.errors import ConfigurationError
from expediter.core.request import CacheHint, Request
from expediter.core.slo import NO_SLO, Slo
from expediter.sim.synthetic_tokens import MAX_NUMBERS, prompt_tokens


class TraceError(ConfigurationError):
    """A trace cannot be used; the message names the file, and the line where there is one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """Requests in order of arrival.

    Equal prefix ids stand for equal tokens up to and including their block, as in Mooncake's traces.

    Args:
        name: for messages and reports.
        arrival_s: float64, ascending, shape [n].
        input_tokens: prompt lengths, int32, at least 1, shape [n].
        output_tokens: int32, at least 1, shape [n].
        prefix_ids: of all requests in a row, int64 in [0, 2**29), shape [m].
        prefix_offsets: request i has prefix_ids[offsets[i]:offsets[i + 1]], int64, shape [n + 1].
        prefix_block_tokens: tokens per prefix id.
        priorities: int32, shape [n], or None for all 0.
        tenants: names, or None for no names.
        sessions: names, "" for none, or None if no request has one; see `with_sessions`.
        cache_hints: what to do with each request's KV when it ends, or None for no hints.
        num_sequences: sequences of each request, int32, at least 1, shape [n], or None for one each.
        slo_classes: names, "" for none, or None if no request has one.
        slos: the requests' own targets, or None if no request has any.
        seed, rate_scale, limit: how it came from what was recorded: the seed that spread its arrivals, the rate as a
            multiple of the recorded one, and the number of requests that it was cut to.
        num_defects, defects: rows of the file that were left out, and lines for a reader about them.
    Raises:
        TraceError: there is no request, or there are more ids or requests than can be told apart.
    """

    name: str
    arrival_s: npt.NDArray[np.float64]
    input_tokens: npt.NDArray[np.int32]
    output_tokens: npt.NDArray[np.int32]
    prefix_ids: npt.NDArray[np.int64]
    prefix_offsets: npt.NDArray[np.int64]
    prefix_block_tokens: int
    priorities: npt.NDArray[np.int32] | None = None
    tenants: tuple[str, ...] | None = None
    sessions: tuple[str, ...] | None = None
    cache_hints: tuple[CacheHint | None, ...] | None = None
    num_sequences: npt.NDArray[np.int32] | None = None
    slo_classes: tuple[str, ...] | None = None
    slos: tuple[Slo, ...] | None = None
    seed: int = 0
    rate_scale: float = 1.0
    limit: int | None = None
    num_defects: int = 0
    defects: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.arrival_s):
            raise TraceError(f"{self.name}: the trace holds no requests")
        largest = int(self.prefix_ids.max()) if len(self.prefix_ids) else 0
        if max(len(self.arrival_s), largest) >= MAX_NUMBERS:
            raise TraceError(f"{self.name}: more than {MAX_NUMBERS} requests or prefix ids")

    def __len__(self) -> int:
        return len(self.arrival_s)

    def take(self, num_requests: int) -> Trace:
        """Return the first `num_requests` requests, or all of them if there are fewer.

        Raises:
            ConfigurationError: the number is below 1.
        """
        if num_requests < 1:
            raise ConfigurationError(f"limit must be at least 1, not {num_requests}")
        n = min(num_requests, len(self))
        offsets = self.prefix_offsets[: n + 1]
        return replace(
            self,
            arrival_s=self.arrival_s[:n],
            input_tokens=self.input_tokens[:n],
            output_tokens=self.output_tokens[:n],
            prefix_ids=self.prefix_ids[: offsets[-1]],
            prefix_offsets=offsets,
            priorities=None if self.priorities is None else self.priorities[:n],
            tenants=None if self.tenants is None else self.tenants[:n],
            sessions=None if self.sessions is None else self.sessions[:n],
            cache_hints=None if self.cache_hints is None else self.cache_hints[:n],
            num_sequences=None if self.num_sequences is None else self.num_sequences[:n],
            slo_classes=None if self.slo_classes is None else self.slo_classes[:n],
            slos=None if self.slos is None else self.slos[:n],
            limit=num_requests,
        )

    def at_rate(self, rate_scale: float) -> Trace:
        """Return the trace at `rate_scale` times its arrival rate: 2 halves every gap, the first arrival stays.

        Raises:
            ConfigurationError: the scale is not a finite number above 0.
        """
        if not (np.isfinite(rate_scale) and rate_scale > 0):
            raise ConfigurationError(f"rate scale must be a finite number above 0, not {rate_scale}")
        first = self.arrival_s[0]
        arrival_s = first + (self.arrival_s - first) / rate_scale
        return replace(self, arrival_s=arrival_s, rate_scale=self.rate_scale * rate_scale)

    def with_sessions(self) -> Trace:
        """Return the trace with the sessions that its prefixes show, unless it names some, or has no prefixes.

        A request continues the session of an earlier one whose whole prompt, up to its last full block, its own begins
        with; of several it is the longest. A session goes on once from each of its turns: a second request that begins
        with the same turn begins another. So requests that share a system prompt are no session, and turns are.
        """
        if self.sessions is not None or not len(self.prefix_ids):
            return self
        ends: dict[int, str] = {}
        sessions = []
        num_full = (self.input_tokens // self.prefix_block_tokens).tolist()
        offsets = self.prefix_offsets.tolist()
        for row, most in enumerate(num_full):
            ids = self.prefix_ids[offsets[row] : offsets[row + 1]].tolist()[:most]
            end = next((each for each in reversed(ids) if each in ends), None)
            session = f"s{row:07d}" if end is None else ends.pop(end)
            sessions.append(session)
            if ids:
                ends[ids[-1]] = session
        return replace(self, sessions=tuple(sessions))

    def groups(self) -> Iterator[tuple[Request, ...]]:
        """Yield the requests in order of arrival, each with its sequences; a prompt is made when it is asked for.

        Ids are the row's number in arrival order, so that the same trace always gives the same ids; further sequences
        have ".1", ".2" and so on behind it. Requests end by length alone, after the trace's number of output tokens.
        """
        for row in range(len(self)):
            request = self.request(row)
            n = 1 if self.num_sequences is None else int(self.num_sequences[row])
            others = (replace(request, request_id=f"{request.request_id}.{number}") for number in range(1, n))
            yield (request, *others)

    def requests(self) -> Iterator[Request]:
        """Yield every sequence of every request, in the order of `groups`."""
        for group in self.groups():
            yield from group

    def request(self, row: int) -> Request:
        """Return the request in that row, its first sequence."""
        num_output = int(self.output_tokens[row])
        ids = self.prefix_ids[self.prefix_offsets[row] : self.prefix_offsets[row + 1]]
        return Request(
            request_id=f"r{row:07d}",
            prompt=prompt_tokens(row, int(self.input_tokens[row]), ids, self.prefix_block_tokens),
            max_tokens=num_output,
            priority=0 if self.priorities is None else int(self.priorities[row]),
            tenant="" if self.tenants is None else self.tenants[row],
            session="" if self.sessions is None else self.sessions[row],
            cache_hint=None if self.cache_hints is None else self.cache_hints[row],
            slo=NO_SLO if self.slos is None else self.slos[row],
            slo_class="" if self.slo_classes is None else self.slo_classes[row],
            arrival_s=float(self.arrival_s[row]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """What a trace asks for.

    Attributes:
        span_s: first to last arrival.
        mean_rate_rps: arrivals per second of the span; None if all arrive at once.
        input_tokens_mean, input_tokens_p50, input_tokens_p99, input_tokens_max: prompt lengths.
        output_tokens_mean, output_tokens_p50, output_tokens_p99, output_tokens_max: output lengths.
        seed, rate_scale, limit, num_defects: as in `Trace`.
        prefix_reuse: share of the prompt tokens that an unlimited cache, fed in order of arrival, has already; outputs
            are not counted as cached. None if the trace has no prefix ids.
    """

    name: str
    num_requests: int
    span_s: float
    mean_rate_rps: float | None
    input_tokens_mean: float
    input_tokens_p50: float
    input_tokens_p99: float
    input_tokens_max: int
    output_tokens_mean: float
    output_tokens_p50: float
    output_tokens_p99: float
    output_tokens_max: int
    prefix_reuse: float | None
    seed: int
    rate_scale: float
    limit: int | None
    num_defects: int


def trace_summary(trace: Trace) -> TraceSummary:
    """Return lengths, rate and possible prefix reuse of a trace."""
    span_s = float(trace.arrival_s[-1] - trace.arrival_s[0])
    inputs, outputs = trace.input_tokens, trace.output_tokens
    return TraceSummary(
        name=trace.name,
        num_requests=len(trace),
        span_s=span_s,
        mean_rate_rps=len(trace) / span_s if span_s > 0 else None,
        input_tokens_mean=float(inputs.mean()),
        input_tokens_p50=float(np.percentile(inputs, 50)),
        input_tokens_p99=float(np.percentile(inputs, 99)),
        input_tokens_max=int(inputs.max()),
        output_tokens_mean=float(outputs.mean()),
        output_tokens_p50=float(np.percentile(outputs, 50)),
        output_tokens_p99=float(np.percentile(outputs, 99)),
        output_tokens_max=int(outputs.max()),
        prefix_reuse=_prefix_reuse(trace) if len(trace.prefix_ids) else None,
        seed=trace.seed,
        rate_scale=trace.rate_scale,
        limit=trace.limit,
        num_defects=trace.num_defects,
    )


def _prefix_reuse(trace: Trace) -> float:
    seen = SeenPrefixes()
    ids = trace.prefix_ids.tolist()
    offsets = trace.prefix_offsets.tolist()
    num_reused = sum(
        seen.reused_tokens(ids[offsets[row] : offsets[row + 1]], trace.prefix_block_tokens, num_input)
        for row, num_input in enumerate(trace.input_tokens.tolist())
    )
    return num_reused / int(trace.input_tokens.sum(dtype=np.int64))


class SeenPrefixes:
    """What an unlimited cache holds of the prompts that it was shown.

    Ids below 2**29 take a bit each up to the largest, 128 MiB at most; larger ones, which are hashes, about 100 bytes
    each.
    """

    def __init__(self) -> None:
        self._bits = bytearray()
        self._hashes: set[int] = set()

    def reused_tokens(self, prefix_ids: list[int], block_tokens: int, num_input: int) -> int:
        """Return how many of the prompt's first tokens are held already, and hold the whole prompt from now on."""
        num_seen = next((place for place, number in enumerate(prefix_ids) if not self._has(number)), len(prefix_ids))
        for number in prefix_ids[num_seen:]:
            self._hold(number)
        return min(num_seen * block_tokens, num_input)

    def _has(self, number: int) -> bool:
        if number >= MAX_NUMBERS:
            return number in self._hashes
        place = number >> 3
        return place < len(self._bits) and self._bits[place] >> (number & 7) & 1 == 1

    def _hold(self, number: int) -> None:
        if number >= MAX_NUMBERS:
            self._hashes.add(number)
            return
        place = number >> 3
        if place >= len(self._bits):
            self._bits.extend(bytes(max(place + 1, 2 * len(self._bits)) - len(self._bits)))
        self._bits[place] |= 1 << (number & 7)
