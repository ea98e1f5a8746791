"""What breaks first: named from the run in which it broke."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from expediter.core.explanation import Reason
from expediter.studies.planning.trial import Measured

_MOSTLY: Final = 0.5
_MUCH: Final = 0.25
_MANY_PREEMPTIONS: Final = 0.1
"""Preemptions per request from which they, not single unlucky requests, are the cause."""
_CAUSES: Final = {
    "memory": (Reason.NO_BLOCKS.value, Reason.PREEMPTED.value),
    "slots": (Reason.NO_SLOT.value,),
    "batch": (Reason.BATCH.value,),
    "queue": (Reason.BUDGET.value, Reason.QUEUED.value, Reason.LATE.value, Reason.FAIRNESS.value),
    "prefill blocking": (Reason.STEP.value,),
}
_REFUSALS: Final = {
    "refused": ("queue", "are refused, since they would be late or the limits are reached"),
    "unservable": ("memory", "are refused, since no replica could ever hold them"),
}
_HOLDERS: Final = frozenset(reason for reasons in _CAUSES.values() for reason in reasons)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What keeps requests from meeting their targets.

    Attributes:
        target: the one that most of them miss: `ttft`, `tpot`, `e2e`, `refused` or `unservable`; "" if nothing broke.
        cause: `queue`, `batch`, `prefill blocking`, `memory`, `slots`, `prefill`, `transfer`, `decode bandwidth`, or
            `none found`.
        words: the figures that say so.
    """

    target: str
    cause: str
    words: str


def limit_of(measured: Measured | None) -> Limit:
    """Name what broke in a run that missed its targets.

    The target that most requests miss decides where to look. A late first token is the queue's doing if most of the
    time passed before the request was scheduled: for want of KV blocks (`memory`), of a slot (`slots`), or since the
    prompts before it took the token budget (`queue`); else its own prompt took too long (`prefill`). Late later tokens
    are due to preemptions or to waiting for room after a handoff (`memory`), to the handoff itself (`transfer`), to
    prompts in the steps (`prefill blocking`: without them steps would be short enough), or to reading weights and KV
    (`decode bandwidth`).
    """
    if measured is None or not any(measured.missed.values()):
        return Limit(target="", cause="none found", words="it bore every load that was tried")
    target, num = max(measured.missed.items(), key=lambda item: item[1])
    whose = f"{num / measured.num_requests:.1%} of the requests "
    if target in _REFUSALS:
        cause, words = _REFUSALS[target]
        return Limit(target=target, cause=cause, words=f"{whose}{words}")
    if target == "ttft":
        return _late_first_token(measured, whose)
    return _late_later_tokens(measured, target, whose)


def _late_first_token(measured: Measured, whose: str) -> Limit:
    queueing = measured.late_queueing_share or 0.0
    words = f"{whose}have a late first token; {queueing:.0%} of their wait is before they are scheduled"
    if queueing < _MOSTLY:
        return Limit(target="ttft", cause="prefill", words=f"{words}: their own prompts take too long")
    held = {reason: seconds for reason, seconds in measured.held_s.items() if reason in _HOLDERS}
    total = sum(held.values())
    causes = {cause: sum(held.get(reason, 0.0) for reason in reasons) for cause, reasons in _CAUSES.items()}
    cause = max(causes, key=lambda name: causes[name]) if total else "queue"
    told = ", ".join(f"{s / total:.0%} {reason}" for reason, s in sorted(held.items(), key=lambda i: -i[1]) if s)
    return Limit(target="ttft", cause=cause, words=f"{words}; waiting by reason: {told or 'none told'}")


def _late_later_tokens(measured: Measured, target: str, whose: str) -> Limit:
    name = "gaps between tokens are" if target == "tpot" else "ends are"
    words = f"{whose}miss {target.upper()}: their {name} late"
    if measured.room_share + measured.network_share >= _MUCH:
        cause = "memory" if measured.room_share >= measured.network_share else "transfer"
        told = (
            f"{measured.room_share:.0%} of it waiting for KV blocks after the prompt, {measured.network_share:.0%} for"
        )
        return Limit(target=target, cause=cause, words=f"{words}; {told} the transfer")
    if measured.num_preemptions > measured.num_requests * _MANY_PREEMPTIONS:
        return Limit(target=target, cause="memory", words=f"{words}; {measured.num_preemptions} preemptions")
    words = f"{words}; {measured.prompt_time_share:.0%} of the busy time is in steps that also compute prompts"
    blocks, use = measured.prompt_time_share >= _MOSTLY, measured.decode_step_use
    if use is not None:
        blocks = use < 1
        words = f"{words}, and a step without takes {use:.0%} of the target"
    return Limit(target=target, cause="prefill blocking" if blocks else "decode bandwidth", words=words)
