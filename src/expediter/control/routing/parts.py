"""Filters and scorers."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Final

from expediter.control.fleet import Lineup, Member
from expediter.control.routing.scored import View

_MAX_TENANTS: Final = 4096
_MAX_SESSIONS: Final = 1 << 16


class _Forgetful:
    """A part that needs not hear who got what."""

    def placed(self, view: View, place: int) -> None:
        """Nothing to remember."""


class BoundedShare(_Forgetful):
    """Nobody has more than its share of the requests: `relative` times the mean and `slack` on top.

    It bounds what a popular prefix can do to its holder. Only the request at hand goes elsewhere, to the best of the
    others, and takes the prefix along: so the prefix is held by as many as its traffic needs, and what others hold is
    still used.

    A tighter bound costs hits, each of which is a prefix kept twice: 1.25 times the mean, and with it a tenth of the
    time to the first token where caches are full (`benchmarks.routing_quality`). These are the loosest round numbers
    with which sixteen requests for one prefix leave no more than eight of them on one of four replicas.
    """

    because = "has more than its share of the requests"

    def __init__(self, relative: float = 1.5, slack: float = 2.0) -> None:
        self._relative = relative
        self._slack = slack

    def keep(self, view: View) -> list[bool] | None:
        requests, more = view.lineup.num_requests, view.query.num_sequences
        most = self._relative * (sum(requests) + more) / len(requests) + self._slack
        if max(requests) + more <= most:
            return None
        most = max(most, min(requests) + more)
        return [each + more <= most for each in requests]


class TenantShare:
    """No tenant fills one replica with its own work while others have hardly any of it.

    Per tenant and replica, the prompt tokens that had to be computed are counted. Where a tenant is more than a quantum
    ahead of the replica where it has had least, others are taken, unless all are. It keeps locality inside the quantum:
    a tenant's prefix stays where it is until it has cost that much.

    Args:
        quantum_tokens: how far ahead a tenant may be on one replica.
    Source: D2LPM (Cao et al., Locality-aware Fair Scheduling in LLM Serving, 2025): a deficit per client and worker.
    """

    because = "has had more of this tenant's work than others"

    def __init__(self, quantum_tokens: int = 65_536) -> None:
        self._quantum = float(quantum_tokens)
        # Per tenant: tokens by stay and slot, beyond a level that all other replicas are at.
        self._served: OrderedDict[str, dict[tuple[int, int], float]] = OrderedDict()

    def keep(self, view: View) -> list[bool] | None:
        served = self._served.get(view.query.request.tenant)
        if served is None or max(served.values(), default=0.0) <= self._quantum:
            return None
        return [served.get((member.sequence, member.slot), 0.0) <= self._quantum for member in view.members]

    def placed(self, view: View, place: int) -> None:
        tenant = view.query.request.tenant
        if not tenant:
            return  # requests of nobody in particular
        served = self._served.setdefault(tenant, {})
        self._served.move_to_end(tenant)
        if len(self._served) > _MAX_TENANTS:
            self._served.popitem(last=False)
        member = view.members[place]
        key = member.sequence, member.slot
        served[key] = served.get(key, 0.0) + view.num_tokens - view.cached_at(place)
        if len(served) >= len(view.members):
            here = {each: tokens for each, tokens in served.items() if view.fleet.stay_at(each[1]) == each[0]}
            least = min(here.values()) if len(here) == len(view.members) else 0.0
            self._served[tenant] = {each: tokens - least for each, tokens in here.items() if tokens > least}


class SessionHome:
    """A session stays where its last request went, as long as other filters allow that.

    The prompt's prefix says mostly the same; the session also says it when its KV is known by nothing else, and keeps
    what a prefix does not show, such as an image that was encoded there.
    """

    because = "is not where its session is"

    def __init__(self) -> None:
        self._homes: OrderedDict[tuple[str, str], int] = OrderedDict()

    def keep(self, view: View) -> list[bool] | None:
        request = view.query.request
        home = self._homes.get((request.tenant, request.session)) if request.session else None
        return None if home is None else [member.sequence == home for member in view.members]

    def placed(self, view: View, place: int) -> None:
        request = view.query.request
        if not request.session:
            return
        session = request.tenant, request.session
        self._homes[session] = view.members[place].sequence
        self._homes.move_to_end(session)
        if len(self._homes) > _MAX_SESSIONS:
            self._homes.popitem(last=False)


class TokensToCompute(_Forgetful):
    """Prompt tokens that are computed before its first token, and what its own cost those who are there already.

    Its own tokens, those without a hit, count once for itself and once for each request that waits or decodes beside
    them. Without those others a hit would be worth less, the longer the queues are, and given up just when every token
    that is computed again makes them longer. A miss goes where least has to be computed, never to whoever holds least.

    Args:
        request_tokens: what a request that is there counts for beside its prompt, where all else is equal.
    """

    def __init__(self, request_tokens: float = 32.0) -> None:
        self._request_tokens = request_tokens

    def costs(self, view: View) -> list[float]:
        each = self._request_tokens
        loads = [member.snapshot for member in view.members]
        return [
            load.num_pending_tokens + new * (1 + load.num_requests) + each * load.num_requests
            for load, new in zip(loads, view.new, strict=True)
        ]

    def because(self, view: View, place: int) -> str:
        if view.cached_at(place):
            return f"it holds {view.cached_at(place)} of the prompt's tokens"
        return "nobody holds enough of the prompt to make up for its load, and it has the least to compute"


class RecentWork:
    """Seconds of prefill that each replica was sent lately: older ones fade instead of being dropped at a window's end.

    Who has just come is taken to have had as much as the others on average.

    Args:
        window_s: time constant.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._lineup: Lineup | None = None
        self._by_slot: dict[int, tuple[int, float]] = {}
        # Of the lineup's members, in seconds of the moment `_at_s`: what is added later counts for more, nothing fades.
        self._work_s: list[float] = []
        self._at_s = 0.0

    def of(self, view: View) -> tuple[list[float], float]:
        """Return each replica's work, and a factor that makes seconds of it now."""
        now_s = view.query.now_s
        if view.lineup is not self._lineup or now_s > self._at_s + self._window_s:
            self._renew(view, now_s)
        return self._work_s, math.exp((self._at_s - now_s) / self._window_s)

    def add(self, view: View, place: int, work_s: float) -> None:
        """Hear that the replica at a place of the last `of` is sent so much."""
        self._work_s[place] += work_s * math.exp((view.query.now_s - self._at_s) / self._window_s)

    def _renew(self, view: View, now_s: float) -> None:
        """Count in seconds of now, for the members of now."""
        if self._lineup is not None:
            for member, work_s in zip(self._lineup.members, self._work_s, strict=True):
                self._by_slot[member.slot] = member.sequence, work_s
        fade = math.exp(min(0.0, self._at_s - now_s) / self._window_s)
        self._by_slot = {slot: (stay, work_s * fade) for slot, (stay, work_s) in self._by_slot.items()}
        found = [self._by_slot.get(member.slot, (0, 0.0)) for member in view.members]
        known = [each[1] for each, member in zip(found, view.members, strict=True) if each[0] == member.sequence]
        mean_s = sum(known) / len(known) if known else 0.0
        self._work_s = [
            each[1] if each[0] == member.sequence else mean_s for each, member in zip(found, view.members, strict=True)
        ]
        self._lineup, self._at_s = view.lineup, now_s


class PredictedTtft:
    """Time to the first token, and the time that the prompt takes from others: those who are there, and those to come.

    The first is what is queued there and what is not cached of the prompt, by the replica's speed: attention to a long
    cached prefix takes time, too, and decodes slow prompts down.

    The prompt's own part counts once more for each request that is there (see `TokensToCompute`). It also fills as much
    of the cache as it computes, and what those tokens push out is computed again when it comes back, beside as many
    requests as there are now. If it comes back with a chance of p, and pushes out others in its turn, that happens
    p + p^2 + ... = p / (1 - p) times. It happens the sooner, the more a replica's cache is used: the tokens count so
    often in proportion to the work that a replica has had lately (see `RecentWork`). So a hit is given up, and its
    prefix kept twice, only where the queues differ by much, and a prefix that nobody holds goes where there has been
    least to do, rather than where it happens to be quiet.

    Where computing takes as long with a hit as without one, by what is known of a replica's speed, all of this is
    nothing, and the shortest queue is left.

    Args:
        num_returns: p / (1 - p); 3 is a chance of three quarters. It matters little.
        window_s: time constant of the work; a minute is long against a queue, and short against traffic that changes.
    Source: the load of minutes and the price of evictions are Preble's (Srivatsa et al., ICLR 2025).
    """

    def __init__(self, num_returns: float = 3.0, window_s: float = 60.0) -> None:
        self._num_returns = num_returns
        self._recent = RecentWork(window_s)

    def costs(self, view: View) -> list[float]:
        lineup, (work_s, _) = view.lineup, self._recent.of(view)
        all_work_s = sum(work_s)
        later = self._num_returns * len(work_s) / all_work_s if all_work_s else 0.0
        columns = zip(
            lineup.queue_s, view.prefill_s(), lineup.num_requests, view.new, lineup.speeds, work_s, strict=True
        )
        return [
            queue_s + (own_s + new * speed.token_s * later * each_work_s) * (1 + num_requests)
            for queue_s, own_s, num_requests, new, speed, each_work_s in columns
        ]

    def placed(self, view: View, place: int) -> None:
        self._recent.add(view, place, view.prefill_s()[place])

    def because(self, view: View, place: int) -> str:
        queue_s, own_s, num_cached = view.lineup.queue_s[place], view.prefill_s()[place], view.cached_at(place)
        hit = f", {num_cached} tokens of it cached" if num_cached else ""
        return f"its first token is expected after {queue_s:.3f} s in the queue and {own_s:.3f} s of computing{hit}"


class BlocksOfWork(_Forgetful):
    """Blocks to prefill, weighted, plus blocks that decode.

    Args:
        prefill_weight: of a block to prefill against one of decode context.
        block_tokens: tokens per block; scales costs only.
    Source: NVIDIA Dynamo's KV router.
    """

    def __init__(self, prefill_weight: float = 1.0, block_tokens: int = 64) -> None:
        self._prefill_weight = prefill_weight
        self._block_tokens = block_tokens

    def costs(self, view: View) -> list[float]:
        weight, num_tokens = self._prefill_weight, view.query.num_prompt_tokens
        loads = [member.snapshot for member in view.members]
        return [
            (weight * (load.num_pending_tokens + new) + load.num_context_tokens + num_tokens) / self._block_tokens
            for load, new in zip(loads, view.new, strict=True)
        ]

    def because(self, view: View, place: int) -> str:
        num_tokens = view.members[place].snapshot.num_pending_tokens + view.num_tokens - view.cached_at(place)
        blocks = num_tokens / self._block_tokens
        return f"{blocks:.0f} blocks to prefill there, and few that decode"


class ExploitOrExplore:
    """Preble's E2: most of the prompt cached somewhere, then there; else where it costs least in the long run.

    Exploit: among those who hold most of it, the least loaded; but not on a replica loaded `imbalance` times as much as
    the least. Explore: load of the last minutes, plus what others lose when the prompt pushes their blocks out of a
    full cache, plus its own prefill (see `RecentWork`).

    Args:
        window_s: time constant of the load.
        imbalance: most load that a holder may have, as a multiple of the least.
    Source: Preble (Srivatsa et al., ICLR 2025), section 3.2.
    """

    def __init__(self, window_s: float = 180.0, imbalance: float = 1.5) -> None:
        self._recent = RecentWork(window_s)
        self._imbalance = imbalance
        self._exploits = False

    def costs(self, view: View) -> list[float]:
        work_s, now_s = self._recent.of(view)
        loads = [each * now_s for each in work_s]
        own = view.prefill_s()
        most = max(view.cached)
        self._exploits = most > view.query.num_prompt_tokens - most
        if self._exploits:
            bound = self._imbalance * (min(loads) + min(own))
            costs = [
                load if cached == most and load <= bound else math.inf
                for load, cached in zip(loads, view.cached, strict=True)
            ]
            if min(costs) < math.inf:
                return costs
            self._exploits = False
        lost = [self._lost_s(member, new) for member, new in zip(view.members, view.new, strict=True)]
        return [sum(each) for each in zip(loads, lost, own, strict=True)]

    def because(self, view: View, place: int) -> str:
        if self._exploits:
            return f"it holds {view.cached_at(place)} of the prompt's tokens, more than half"
        return "recent load, what its cache would lose and the prompt itself cost least there"

    def placed(self, view: View, place: int) -> None:
        self._recent.add(view, place, view.prefill_s()[place])

    @staticmethod
    def _lost_s(member: Member, num_new: int) -> float:
        """Return what it costs to compute again what a full cache drops, if every block of it comes back once."""
        max_tokens = member.profile.max_kv_tokens
        if max_tokens is None:
            return 0.0
        over = member.snapshot.num_context_tokens + num_new - max_tokens
        return min(max(over, 0), num_new) * member.profile.speed.token_s


class FullestThatMeets(_Forgetful):
    """The most loaded replica that still meets the request's targets, so that the rest can be taken away.

    Met: the first token is expected within `margin` of its target, and so is a decode step with one more in it. If
    nobody meets them, who comes closest gets it; a request without targets goes where it waits least.

    Source: PolyServe (2025).
    """

    def __init__(self, margin: float = 0.8) -> None:
        self._margin = margin

    def costs(self, view: View) -> list[float]:
        slo, query = view.query.slo, view.query
        ttft_s = [member.queue_s + own for member, own in zip(view.members, view.prefill_s(), strict=True)]
        if slo.ttft_s is None and slo.tpot_s is None:
            return ttft_s  # nothing is late: no reason to let anybody wait
        costs = []
        for member, first_s in zip(view.members, ttft_s, strict=True):
            load, lateness = member.snapshot, 0.0
            if slo.ttft_s is not None:
                lateness = first_s / (self._margin * slo.ttft_s)
            if slo.tpot_s is not None:
                num_decodes = load.num_running + query.num_sequences
                context = load.num_context_tokens + query.num_prompt_tokens
                step_s = member.profile.speed.decode_step_s(num_decodes, context)
                lateness = max(lateness, step_s / (self._margin * slo.tpot_s))
            costs.append(lateness if lateness > 1 else -1.0 - load.num_context_tokens - load.num_pending_tokens)
        return costs

    def because(self, view: View, place: int) -> str:
        slo, tokens = view.query.slo, view.members[place].snapshot.num_context_tokens
        if slo.ttft_s is None and slo.tpot_s is None:
            return "it has no targets, and its first token is expected soonest there"
        return f"with {tokens} prompt tokens in flight it is the fullest of those that still meet the targets"
