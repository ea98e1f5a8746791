"""Where one request is on its way through a cluster."""

from __future__ import annotations

from dataclasses import dataclass

from expediter.core.request import Carried, Request
from expediter.kvcache.landing import Landing
from expediter.sim.network import Passage
from expediter.sim.stores import TierName

NOWHERE = -1
"""No replica."""


@dataclass(slots=True, eq=False)
class Fetch:
    """One beginning on its way to a replica whose request waits for it.

    Attributes:
        leg: the request as the replica is to see it.
        keep: as in `Scheduler.add_group`.
        source_id: the replica that it comes from; NOWHERE for a tier.
        tier: the tier that it comes from; None for a replica.
        num_tokens: of the prompt, those that the replica has already included.
        hold: its path in the source's cache.
        landing: blocks reserved for it.
        is_off: given up before it began.
    """

    leg: Request
    keep: bool
    source_id: int
    tier: TierName | None
    num_tokens: int
    hold: Landing | None = None
    landing: Landing | None = None
    passage: Passage | None = None
    ticket: int = -1
    is_off: bool = False


@dataclass(slots=True, eq=False)
class Staged:
    """KV of a running request that is copied ahead of it.

    Attributes:
        landing: where it goes, on the target.
        ticket: of its end; -1 once it has come.
    """

    source_id: int
    target_id: int
    landing: Landing | None = None
    passage: Passage | None = None
    ticket: int = -1


@dataclass(slots=True, eq=False)
class Journey:
    """A client's request, whatever happens to it. A scheduler has it, or its KV is held, or it waits for a replica.

    Attributes:
        request: as its client sent it.
        number: order of arrival, unique in the cluster.
        carried: what it has so far, as of its last leg; None if it never ran.
        replica_id: whose scheduler has it, or is about to.
        hands_off: that one computes its prompt only.
        held_by: who holds its KV (`hold`).
        chosen_id: who was chosen to go on with it when it was routed.
        target_id: who is to go on with it.
        landing: blocks reserved on the target.
        turns_back: it goes on where its KV is if the target has no room at once.
        passage: the transfer's place on the network.
        staged: what is copied ahead of a request that is about to move.
        fetch: what is being fetched for it before it can start.
        ticket: of the transfer's end, or of the end of a lease; -1 while there is none.
        prompt_began_s: when its prompt began to be computed.
        waits_since_s: since when its client waits for KV.
        sent_s: when the transfer under way began.
        num_losses: transfers lost in a row.
        was_queued, was_admitted: its client's story tells so already.
    """

    request: Request
    number: int
    carried: Carried | None = None
    replica_id: int = NOWHERE
    hands_off: bool = False
    held_by: int = NOWHERE
    hold: Landing | None = None
    chosen_id: int = NOWHERE
    target_id: int = NOWHERE
    landing: Landing | None = None
    turns_back: bool = False
    passage: Passage | None = None
    staged: Staged | None = None
    fetch: Fetch | None = None
    ticket: int = -1
    prompt_began_s: float = 0.0
    waits_since_s: float = 0.0
    sent_s: float = 0.0
    num_losses: int = 0
    was_queued: bool = False
    was_admitted: bool = False

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_kv_tokens(self) -> int:
        """Tokens whose KV the next leg needs: all known ones but the newest output."""
        num_output = 0 if self.carried is None else len(self.carried.output)
        return self.request.num_prompt_tokens + max(0, num_output - 1)
