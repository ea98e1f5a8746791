"""Filters and scorers."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Final

from expediter.control.fleet import Member
from expediter.control.routing.scored import View

_MAX_TENANTS: Final = 4096
_FEW: Final = 4
_MAX_SESSIONS: Final = 1 << 16


class _Forgetful:
    """A part that needs not hear who got what."""

    def placed(self, view: View, place: int) -> None:
        """Nothing to remember."""


class BoundedShare(_Forgetful):
    """Nobody has more than its share of the requests: `relative` times the mean and `slack` on top.

    Fewer than four replicas share the slack of four: with two of them a handful of requests for one prefix is chance,
    and a second copy of the prefix takes up much of the room that there is.

    It bounds what a popular prefix can do to its holder. Only the request at hand goes elsewhere, to the best of the
    others, and takes the prefix along: so the prefix is held by as many as its traffic needs, and what others hold is
    still used.
    """

    because = "has more than its share of the requests"

    def __init__(self, relative: float = 1.25, slack: float = 2.0) -> None:
        self._relative = relative
        self._slack = slack

    def keep(self, view: View) -> list[bool] | None:
        members, more = view.members, view.query.num_sequences
        slack = self._slack * max(1.0, _FEW / len(members))
        most = self._relative * (view.fleet.num_requests("prefill") + more) / len(members) + slack
        requests = [member.snapshot.num_requests for member in members]
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
        if served is None:
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
        served[key] = served.get(key, 0.0) + view.new[place]
        if len(served) >= len(view.new):
            here = {each: tokens for each, tokens in served.items() if view.fleet.stay_at(each[1]) == each[0]}
            least = min(here.values()) if len(here) == len(view.new) else 0.0
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
        if view.cached[place]:
            return f"it holds {view.cached[place]} of the prompt's tokens"
        return "nobody holds enough of the prompt to make up for its load, and it has the least to compute"


class PredictedTtft(_Forgetful):
    """Time to the first token, and the time that the prompt takes from those who are there already.

    The first is what is queued there and what is not cached of the prompt, by the replica's speed: attention to a long
    cached prefix takes time, too, and decodes slow prompts down. The second is the prompt's own part once more for each
    of them (see `TokensToCompute`).
    """

    def costs(self, view: View) -> list[float]:
        return [
            member.queue_s + member.profile.speed.prefill_s(new, cached) * (1 + member.snapshot.num_requests)
            for member, new, cached in zip(view.members, view.new, view.cached, strict=True)
        ]

    def because(self, view: View, place: int) -> str:
        member, num_cached = view.members[place], view.cached[place]
        own_s = member.profile.speed.prefill_s(view.new[place], num_cached)
        hit = f", {num_cached} tokens of it cached" if num_cached else ""
        return (
            f"its first token is expected after {member.queue_s:.3f} s in the queue and {own_s:.3f} s of computing{hit}"
        )


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
        blocks = (view.members[place].snapshot.num_pending_tokens + view.new[place]) / self._block_tokens
        return f"{blocks:.0f} blocks to prefill there, and few that decode"


class ExploitOrExplore:
    """Preble's E2: most of the prompt cached somewhere, then there; else where it costs least in the long run.

    Exploit: among those who hold most of it, the least loaded; but not on a replica loaded `imbalance` times as much as
    the least. Explore: load of the last minutes, plus what others lose when the prompt pushes their blocks out of a
    full cache, plus its own prefill. Loads fade instead of being dropped at the end of a window.

    Args:
        window_s: time constant of the load.
        imbalance: most load that a holder may have, as a multiple of the least.
    Source: Preble (Srivatsa et al., ICLR 2025), section 3.2.
    """

    def __init__(self, window_s: float = 180.0, imbalance: float = 1.5) -> None:
        self._window_s = window_s
        self._imbalance = imbalance
        self._load_s: list[float] = []
        self._stays: list[int] = []
        self._generation = 0
        self._at_s = 0.0
        self._exploits = False

    def costs(self, view: View) -> list[float]:
        self._follow(view)
        loads = [self._load_s[member.slot] for member in view.members]
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
            return f"it holds {view.cached[place]} of the prompt's tokens, more than half"
        return "recent load, what its cache would lose and the prompt itself cost least there"

    def placed(self, view: View, place: int) -> None:
        member = view.members[place]
        self._load_s[member.slot] += member.profile.speed.prefill_s(view.new[place], view.cached[place])

    @staticmethod
    def _lost_s(member: Member, num_new: int) -> float:
        """Return what it costs to compute again what a full cache drops, if every block of it comes back once."""
        max_tokens = member.profile.max_kv_tokens
        if max_tokens is None:
            return 0.0
        over = member.snapshot.num_context_tokens + num_new - max_tokens
        return min(max(over, 0), num_new) * member.profile.speed.token_s

    def _follow(self, view: View) -> None:
        """Let the loads fade, and begin anew for who has come."""
        now_s, fleet = view.query.now_s, view.fleet
        faded = math.exp(min(0.0, self._at_s - now_s) / self._window_s)
        self._load_s = [load_s * faded for load_s in self._load_s]
        self._at_s = now_s
        if fleet.generation != self._generation:
            self._generation = fleet.generation
            stays = [fleet.stay_at(slot) for slot in range(fleet.num_slots)]
            known = dict(zip(self._stays, self._load_s, strict=True))
            self._load_s = [known.get(stay, 0.0) if stay else 0.0 for stay in stays]
            self._stays = stays


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
