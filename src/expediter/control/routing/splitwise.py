"""Splitwise's cluster scheduling: both replicas at once, and pools that lend to each other."""

from __future__ import annotations

from expediter.control.fleet import Fleet, Load, ReplicaSnapshot, Side, pending_tokens, requests
from expediter.control.routing.base import NO_REPLICA, Candidate, Decision, Placement, RouteQuery
from expediter.control.routing.simple import HandsOffToLeastLoaded


class Splitwise(HandsOffToLeastLoaded):
    """The shortest queue for the prompt and the least loaded for the tokens, chosen together when a request comes.

    Where the prompt's queue is above a bound, the mixed pool is asked, and if that is no better, the decode pool lends
    it a replica, which computes prompts beside its decodes until the prefill pool is below half the bound. The other
    way round, a prefill replica decodes while the KV caches of the decode pool are full. A pool's last replica stays.

    A fleet of mixed replicas alone has nothing to split: a request stays where its prompt is computed.

    Args:
        lend_above_tokens: pending prompt tokens of the shortest queue.
        lend_above_kv: share of the KV cache of the least loaded decode replica that prompts in flight fill.
    Source: Splitwise (Patel et al., ISCA 2024, arXiv 2311.18677), section IV-A: cluster-level scheduling.
    """

    def __init__(self, lend_above_tokens: int = 8192, lend_above_kv: float = 0.9) -> None:
        self._lend_above_tokens = lend_above_tokens
        self._lend_above_kv = lend_above_kv
        self._lent: dict[Side, dict[int, int]] = {"prefill": {}, "decode": {}}

    def route(self, query: RouteQuery, fleet: Fleet) -> Decision:
        if not fleet.members("prefill") and not fleet.members("decode"):
            return NO_REPLICA
        self._take_back(fleet)
        prompt, why_prompt = self._prompt_replica(fleet)
        tokens, why_tokens = self._token_replica(query, fleet)
        if fleet.profile(prompt.replica_id).role == "mixed":
            tokens, why_tokens = prompt, "it does both"
        return Placement(
            replica_id=prompt.replica_id,
            because=f"{why_prompt}; its tokens: {why_tokens}",
            candidates=(Candidate(prompt.replica_id, prompt.num_pending_tokens),),
            decode_id=prompt.replica_id if tokens is None else tokens.replica_id,
        )

    @property
    def lent(self) -> list[int]:
        """Replicas in the mixed pool that belong to another."""
        return [replica_id for lent in self._lent.values() for replica_id in lent]

    def _prompt_replica(self, fleet: Fleet) -> tuple[ReplicaSnapshot, str]:
        own = fleet.least_of(pending_tokens, ("prefill",))
        if own is not None and own.num_pending_tokens <= self._lend_above_tokens:
            return own, "it has the shortest queue of prompts"
        mixed = self._least_mixed(fleet, pending_tokens, "decode")
        best = min(filter(None, (own, mixed)), key=pending_tokens, default=None)
        if best is None or best.num_pending_tokens > self._lend_above_tokens:
            lent = self._lend(fleet, "decode", requests)
            if lent is not None:
                return lent, "the queues of prompts are long, so the decode pool lent it"
        if best is None:  # the prefill pool is gone: whoever is there
            best = fleet.least(pending_tokens, "decode")
            assert best is not None
        return best, "it has the shortest queue of prompts" if best is own else "the mixed pool has a shorter queue"

    def _token_replica(self, query: RouteQuery, fleet: Fleet) -> tuple[ReplicaSnapshot | None, str]:
        own = fleet.least_of(requests, ("decode",))
        if own is not None and not self._is_full(own, query, fleet):
            return own, "it decodes the fewest requests"
        mixed = self._least_mixed(fleet, requests, "prefill")
        if mixed is not None and not self._is_full(mixed, query, fleet):
            return mixed, "the decode pool is full, the mixed pool is not"
        lent = None if own is None else self._lend(fleet, "prefill", pending_tokens)
        if lent is not None:
            return lent, "the decode pool is full, so the prefill pool lent it"
        best = own if own is not None else mixed
        return best, "there is no decode pool" if best is None else "everybody is full, and it has the fewest requests"

    def _least_mixed(self, fleet: Fleet, load: Load, lender: Side) -> ReplicaSnapshot | None:
        """Return the least loaded of the mixed pool: mixed replicas, and those that a pool has lent."""
        lent = [fleet.snapshot(replica_id) for replica_id in self._lent[lender]]
        return min(filter(None, (fleet.least_of(load, ("mixed",)), *lent)), key=load, default=None)

    def _lend(self, fleet: Fleet, lender: Side, load: Load) -> ReplicaSnapshot | None:
        """Return the least loaded replica of a pool that keeps another one, and lend it; None if there is none."""
        lent = self._lent[lender]
        own = [replica_id for replica_id in fleet.ids(lender) if fleet.profile(replica_id).role == lender]
        free = [fleet.snapshot(replica_id) for replica_id in own if replica_id not in lent]
        if len(free) < 2:
            return None
        least = min(free, key=load)
        lent[least.replica_id] = fleet.stay_at(fleet.slot_of(least.replica_id))
        return least

    def _take_back(self, fleet: Fleet) -> None:
        """End loans that are no longer needed, or whose replica is gone; what it has been sent it still does."""
        for lent in self._lent.values():
            for replica_id, stay in tuple(lent.items()):
                if replica_id not in fleet or fleet.stay_at(fleet.slot_of(replica_id)) != stay:
                    del lent[replica_id]
        prefill, decode = fleet.least_of(pending_tokens, ("prefill",)), fleet.least_of(requests, ("decode",))
        if prefill is not None and prefill.num_pending_tokens <= self._lend_above_tokens / 2:
            self._lent["decode"].clear()
        if decode is not None and self._kv_share(decode, 0, fleet) <= self._lend_above_kv / 2:
            self._lent["prefill"].clear()

    def _is_full(self, replica: ReplicaSnapshot, query: RouteQuery, fleet: Fleet) -> bool:
        return self._kv_share(replica, query.num_prompt_tokens, fleet) > self._lend_above_kv

    @staticmethod
    def _kv_share(replica: ReplicaSnapshot, num_more: int, fleet: Fleet) -> float:
        max_tokens = fleet.profile(replica.replica_id).max_kv_tokens
        return 0.0 if max_tokens is None else (replica.num_context_tokens + num_more) / max_tokens
