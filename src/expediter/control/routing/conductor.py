"""Mooncake's Conductor: the prefill replica by predicted time with copies of cached prefixes, and refusals in time."""

from __future__ import annotations

import heapq
from typing import Final, Literal, get_args

import numpy as np

from expediter.control.fleet import Fleet, Floats, ReplicaSnapshot, requests
from expediter.control.routing.base import NO_REPLICA, Candidate, Decision, Placement, Refusal, RouteQuery
from expediter.control.routing.caches import CacheView
from expediter.control.routing.scored import Least, View, shown
from expediter.core.events import RejectReason

EarlyRejection = Literal["none", "early", "predictive"]
"""What of the decode pool is asked before a prompt is computed: nothing, how it is now, or how it will be then."""
EARLY_REJECTIONS: Final[tuple[EarlyRejection, ...]] = get_args(EarlyRejection)


class Conductor:
    """The prefill replica with the earliest first token, and the decode replica with the fewest requests.

    A prefill replica that holds much less of the prompt than the best one does (`best / own >= theta`) first gets a
    copy of what is missing, if it is chosen; so a hot prefix spreads to where it is needed. A request whose first token
    is expected too late is refused on arrival. One whose decoding would be too slow is refused when its prompt is done,
    and with early rejection before anything is computed.

    The decode pool as a whole is judged by the step that an average replica of it would take. Predictive rejection
    looks at the moment when the prompt will be done: requests decode for `decode_time_s` each, those accepted earlier
    whose prompts will be done by then are there, and those that will have decoded for that long are not.

    Requests without targets are never refused.

    Args:
        caches: what each prefill replica holds.
        theta: threshold for a copy; needs a fleet with a link.
        early_rejection: see `EarlyRejection`.
        decode_time_s: how long a request decodes.
    Source: Mooncake (Qin et al., FAST 2025, arXiv 2407.00079): algorithm 1, and its sections on early rejection.
    """

    def __init__(
        self,
        caches: CacheView,
        *,
        theta: float = 4.0,
        early_rejection: EarlyRejection = "none",
        decode_time_s: float = 15.0,
    ) -> None:
        self.caches = caches
        self._theta = theta
        self._early_rejection = early_rejection
        self._least = Least()
        self._expected = _ExpectedDecodes(decode_time_s)

    def route(self, query: RouteQuery, fleet: Fleet) -> Decision:
        columns = fleet.columns("prefill")
        decode = fleet.least(requests, "decode")
        if not len(columns.slots) or decode is None:
            return NO_REPLICA
        cached = self.caches.cached(query, fleet)[columns.slots].astype(np.float64)
        view = View(query, fleet, columns, cached, query.num_prompt_tokens - cached)
        costs, reused = self._first_token_s(view)
        place = self._least.pick(costs, view)
        ttft_s = float(costs[place])
        refusal = self._refusal(query, fleet, ttft_s, shown(view, costs, place))
        if refusal is not None:
            return refusal
        replica_id = fleet.id_at(int(columns.slots[place]))
        self.caches.placed(query, replica_id, fleet)
        self._expected.accepted(query, query.now_s + ttft_s)
        copied = bool(reused[place] > cached[place])
        source = int(columns.slots[cached.argmax()])
        stays = fleet.profile(replica_id).role == "mixed"
        return Placement(
            replica_id=replica_id,
            because=f"its first token is expected after {ttft_s:.3f} s, {reused[place]:.0f} tokens of it "
            + ("copied from another cache" if copied else "cached"),
            candidates=shown(view, costs, place),
            decode_id=replica_id if stays else decode.replica_id,
            num_cached_tokens=int(cached[place]),
            fetch_from_id=fleet.id_at(source) if copied else None,
            num_fetched_tokens=int(reused[place]) if copied else 0,
        )

    def hand_off(self, query: RouteQuery, fleet: Fleet) -> Decision:
        """Return the decode replica with the fewest requests, or refuse if it would be too slow with one more."""
        decode = fleet.least(requests, "decode")
        if decode is None:
            return NO_REPLICA
        target_s = query.slo.tpot_s
        step_s = _step_s(decode, query, fleet)
        if target_s is not None and step_s > target_s:
            return _refused(f"a decode step would take {step_s:.3f} s, the target is {target_s:g} s", ())
        return Placement(
            replica_id=decode.replica_id,
            because="it has the fewest requests of those that decode",
            candidates=(Candidate(decode.replica_id, decode.num_requests),),
        )

    def _first_token_s(self, view: View) -> tuple[Floats, Floats]:
        """Return when each replica would yield the first token, and how many tokens would be reused there."""
        columns, cached = view.columns, view.cached
        alone_s = columns.queue_s + columns.prefill_s(view.new, cached)
        link, most = view.fleet.link, cached.max()
        if link is None or not most:
            return alone_s, cached
        lacking = most / np.maximum(cached, 1.0) >= self._theta
        moved_s = link.latency_s + (most - cached) * link.token_s
        copied_s = columns.queue_s + moved_s + columns.prefill_s(view.query.num_prompt_tokens - most + 0 * cached, most)
        return np.where(lacking, copied_s, alone_s), np.where(lacking, most, cached)

    def _refusal(
        self, query: RouteQuery, fleet: Fleet, ttft_s: float, candidates: tuple[Candidate, ...]
    ) -> Refusal | None:
        slo = query.slo
        if slo.ttft_s is not None and ttft_s > slo.ttft_s:
            message = f"the first token is expected after {ttft_s:.3f} s, the target is {slo.ttft_s:g} s"
            return _refused(message, candidates)
        if self._early_rejection == "none" or slo.tpot_s is None:
            return None
        step_s, when = self._pool_step_s(query, fleet, ttft_s)
        if step_s > slo.tpot_s:
            return _refused(f"a decode step takes {step_s:.3f} s {when}, the target is {slo.tpot_s:g} s", candidates)
        return None

    def _pool_step_s(self, query: RouteQuery, fleet: Fleet, ttft_s: float) -> tuple[float, str]:
        columns = fleet.columns("decode")
        num_replicas = len(columns.slots)
        if self._early_rejection == "early":
            num, context, when = columns.requests.sum(), columns.context.sum(), "now"
        else:
            num, context = self._expected.at(query.now_s + ttft_s, query.now_s)
            when = "when the prompt is done"
        num, context = num + query.num_sequences, context + query.num_prompt_tokens
        step_s = columns.step_s + num / num_replicas * columns.decode_s + context / num_replicas * columns.context_s
        return float(step_s.mean()), when


class _ExpectedDecodes:
    """Requests by when they start to decode, each for an equal time."""

    def __init__(self, decode_time_s: float) -> None:
        self._decode_time_s = decode_time_s
        self._starts: list[tuple[float, int, int]] = []

    def accepted(self, query: RouteQuery, start_s: float) -> None:
        heapq.heappush(self._starts, (start_s, query.num_sequences, query.num_prompt_tokens))

    def at(self, then_s: float, now_s: float) -> tuple[float, float]:
        """Return how many requests decode at `then_s`, and the tokens of their prompts."""
        while self._starts and self._starts[0][0] + self._decode_time_s < now_s:
            heapq.heappop(self._starts)
        there = [each for each in self._starts if each[0] <= then_s < each[0] + self._decode_time_s]
        return sum(num for _, num, _ in there), sum(num * tokens for _, num, tokens in there)


def _step_s(replica: ReplicaSnapshot, query: RouteQuery, fleet: Fleet) -> float:
    speed = fleet.profile(replica.replica_id).speed
    context = replica.num_context_tokens + query.num_prompt_tokens * query.num_sequences
    return speed.decode_step_s(replica.num_requests + query.num_sequences, context)


def _refused(message: str, candidates: tuple[Candidate, ...]) -> Refusal:
    return Refusal(reason=RejectReason.OVERLOADED, message=message, candidates=candidates)
