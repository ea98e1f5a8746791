"""Mooncake's Conductor: the prefill replica by predicted time with copies of cached prefixes, and refusals in time."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from typing import Final, Literal, get_args

from expediter.control.fleet import Fleet, requests
from expediter.control.routing.base import NO_REPLICA, Candidate, Decision, Placement, Refusal, RouteQuery
from expediter.control.routing.caches import CacheView
from expediter.control.routing.scored import Least, View, Weighed
from expediter.core.events import RejectReason

EarlyRejection = Literal["none", "early", "predictive"]
"""What of the decode pool is asked before a prompt is computed: nothing, how it is now, or how it will be then."""
EARLY_REJECTIONS: Final[tuple[EarlyRejection, ...]] = get_args(EarlyRejection)

_KEPT_STARTS: Final = 4096
_MAX_STEP_SHARE: Final = 0.9
"""Of the TPOT target, by the predicted step: contexts grow, and the last one's KV has to arrive before it goes on."""
_MAX_KV_SHARE: Final = 0.9
"""Of the decode replicas' KV, by prompts; the rest is for their outputs."""


class Conductor:
    """The prefill replica with the earliest first token, and the decode replica with the fewest requests.

    A prefill replica that holds much less of the prompt than the best one does (`best / own >= theta`) first gets a
    copy of what is missing, if it is chosen; so a hot prefix spreads to where it is needed. A request whose first token
    is expected too late is refused on arrival. One whose decoding would be too slow is refused when its prompt is done,
    and with early rejection before anything is computed.

    The decode pool as a whole is judged by the step that an average replica of it would take, and by its memory.
    Predictive rejection looks at the moment when the prompt will be done: all requests decode for the same time, so
    those accepted earlier whose prompts will be done by then are there, and those that will have decoded for that long
    are not. The time is the one that explains how many decode now, unless it is given.

    Requests without targets are never refused.

    Args:
        caches: what each prefill replica holds.
        theta: threshold for a copy; needs a fleet with a link.
        early_rejection: see `EarlyRejection`.
        decode_time_s: how long a request decodes; None to tell it from those that do.
    Source: Mooncake (Qin et al., FAST 2025, arXiv 2407.00079): algorithm 1, and its sections on early rejection.
    """

    def __init__(
        self,
        caches: CacheView,
        *,
        theta: float = 4.0,
        early_rejection: EarlyRejection = "none",
        decode_time_s: float | None = None,
    ) -> None:
        self.caches = caches
        self._theta = theta
        self._early_rejection = early_rejection
        self._least = Least()
        self._expected = _ExpectedDecodes(decode_time_s)

    def route(self, query: RouteQuery, fleet: Fleet) -> Decision:
        decode = fleet.least(requests, "decode")
        view = View.of(query, fleet, self.caches)
        if view is None or decode is None:
            return NO_REPLICA
        costs, reused = self._first_token_s(view)
        place = self._least.pick(costs, view)
        ttft_s = costs[place]
        refusal = self._refusal(query, fleet, ttft_s, Weighed(view, costs, place))
        if refusal is not None:
            return refusal
        replica_id = view.members[place].replica_id
        self.caches.placed(query, view.members[place])
        self._expected.accepted(query, query.now_s + ttft_s)
        copied = reused[place] > view.cached_at(place)
        source = view.members[view.cached.index(max(view.cached))]
        decode_id = decode.replica_id
        if fleet.profile(replica_id).role == "mixed":
            decode_id = replica_id
        return Placement(
            replica_id=replica_id,
            because=f"its first token is expected after {ttft_s:.3f} s, {reused[place]} tokens of it "
            + ("copied from another cache" if copied else "cached"),
            candidates=Weighed(view, costs, place),
            # Without early rejection the decode pool is asked when the prompt is done, by `hand_off`.
            decode_id=None if self._early_rejection == "none" and decode_id != replica_id else decode_id,
            num_cached_tokens=view.cached_at(place),
            fetch_from_id=source.replica_id if copied else None,
            num_fetched_tokens=reused[place] if copied else 0,
        )

    def hand_off(self, query: RouteQuery, fleet: Fleet) -> Decision:
        """Return the decode replica with the fewest requests, or refuse if it would be too slow with one more."""
        decode = fleet.least(requests, "decode")
        if decode is None:
            return NO_REPLICA
        max_tokens = fleet.profile(decode.replica_id).max_kv_tokens or math.inf
        context = decode.num_context_tokens + query.num_prompt_tokens * query.num_sequences
        speed = fleet.profile(decode.replica_id).speed
        step_s = speed.decode_step_s(decode.num_requests + query.num_sequences, context)
        message = _why(step_s, context / max_tokens, query, "with it")
        if query.slo.tpot_s is not None and message is not None:
            return _refused(message, ())
        return Placement(
            replica_id=decode.replica_id,
            because="it has the fewest requests of those that decode",
            candidates=(Candidate(decode.replica_id, decode.num_requests),),
        )

    def _first_token_s(self, view: View) -> tuple[list[float], list[int]]:
        """Return when each replica would yield the first token, and how many tokens would be reused there."""
        link, most = view.fleet.link, max(view.cached)
        num_tokens = view.query.num_prompt_tokens
        costs, reused = [], []
        for member, own_s, cached in zip(view.members, view.prefill_s(), view.cached, strict=True):
            if link is None or not most or most / max(cached, 1) < self._theta:
                costs.append(member.queue_s + own_s)
                reused.append(cached)
            else:
                moved_s = link.latency_s + (most - cached) * link.token_s
                costs.append(member.queue_s + moved_s + member.profile.speed.prefill_s(num_tokens - most, most))
                reused.append(most)
        return costs, reused

    def _refusal(
        self, query: RouteQuery, fleet: Fleet, ttft_s: float, candidates: Sequence[Candidate]
    ) -> Refusal | None:
        slo = query.slo
        if slo.ttft_s is not None and ttft_s > slo.ttft_s:
            message = f"the first token is expected after {ttft_s:.3f} s, the target is {slo.ttft_s:g} s"
            return _refused(message, candidates, ttft_s - slo.ttft_s)
        if self._early_rejection == "none" or slo.tpot_s is None:
            return None
        why = self._why_too_slow(query, fleet, ttft_s)
        return None if why is None else _refused(why, candidates)

    def _why_too_slow(self, query: RouteQuery, fleet: Fleet, ttft_s: float) -> str | None:
        """Return why the decode pool as a whole would miss the request's target, if it would."""
        members = fleet.members("decode")
        loads = [member.snapshot for member in members]
        num_now: float = sum(load.num_running for load in loads)
        if self._early_rejection == "early":
            # What was accepted and does not decode yet is not looked at: the published rule, and why it swings.
            num, when = num_now, "now"
            context = sum(load.num_context_tokens * load.num_running / max(load.num_requests, 1) for load in loads)
        else:
            num_prefilling = fleet.num_requests("prefill")
            # Decode replicas may count who has room reserved there while its prompt is computed.
            num_now = max(num_now, sum(load.num_requests for load in loads) - num_prefilling)
            num, context = self._expected.at(query.now_s + ttft_s, query.now_s, num_prefilling, num_now)
            when = "when the prompt is done"
        num, context = num + query.num_sequences, context + query.num_prompt_tokens
        each = len(members)
        steps_s = [member.profile.speed.decode_step_s(num / each, context / each) for member in members]
        max_tokens = sum(member.profile.max_kv_tokens or math.inf for member in members)
        return _why(sum(steps_s) / each, context / max_tokens, query, when)


class _ExpectedDecodes:
    """Accepted requests by when they start to decode, each for an equal time.

    Args:
        decode_time_s: that time; None for the one that explains how many decode now.
    """

    def __init__(self, decode_time_s: float | None) -> None:
        self._decode_time_s = decode_time_s
        self._starts: list[tuple[float, int, int]] = []

    def accepted(self, query: RouteQuery, start_s: float) -> None:
        insort(self._starts, (start_s, query.num_sequences, query.num_prompt_tokens))

    def at(self, then_s: float, now_s: float, num_prefilling: float, num_now: float) -> tuple[float, float]:
        """Return how many requests decode at `then_s`, and the tokens of their prompts.

        Args:
            num_prefilling, num_now: whose prompts are being computed, and who decodes, at `now_s`.
        """
        past = self._count_back(len(self._starts), num_prefilling)
        first = self._count_back(past, num_now)
        if self._decode_time_s is not None:
            first, time_s = 0, self._decode_time_s
        elif first:
            time_s = now_s - (self._starts[first][0] if first < past else now_s)
        else:  # nobody has ended yet
            time_s = math.inf
        there = [each for each in self._starts[first:past] if then_s - time_s <= each[0] <= then_s]
        # Who is later than expected starts any moment.
        there += [each for each in self._starts[past:] if max(each[0], now_s) <= then_s]
        # Who has ended for certain is never looked at again.
        del self._starts[: max(0, first - _KEPT_STARTS)]
        return sum(num for _, num, _ in there), sum(num * tokens for _, num, tokens in there)

    def _count_back(self, end: int, num_requests: float) -> int:
        """Return where the last `num_requests` before a place in the list begin."""
        place = end
        while place and num_requests > 0:
            place -= 1
            num_requests -= self._starts[place][1]
        return place


def _why(step_s: float, kv_share: float, query: RouteQuery, when: str) -> str | None:
    """Return why decoding would be too slow: by the length of a step, or since requests would wait for memory."""
    target_s = query.slo.tpot_s
    if target_s is not None and step_s > _MAX_STEP_SHARE * target_s:
        return f"a decode step takes {step_s:.3f} s {when}, the target is {target_s:g} s"
    if kv_share > _MAX_KV_SHARE:
        return f"prompts fill {kv_share:.0%} of the KV caches that decode {when}"
    return None


def _refused(message: str, candidates: Sequence[Candidate], retry_after_s: float = 1.0) -> Refusal:
    return Refusal(reason=RejectReason.OVERLOADED, message=message, candidates=candidates, retry_after_s=retry_after_s)
