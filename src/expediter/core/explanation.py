"""Why a request was where it was: a short list of spans of time, each with its reason, and how to say them.

An explanation holds numbers and ids only, never what a client wrote.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

Detail = str | int | float | bool


class Reason(enum.Enum):
    """What held a request, or what it was doing."""

    ROUTED = "routed"
    """It was sent to a replica."""
    FORWARDED = "forwarded"
    """The gateway had sent it to a backend."""
    INTERRUPTED = "interrupted"
    """The replica that had it was lost; it waited for another one."""
    QUEUED = "queued"
    """Others were tried first."""
    BUDGET = "budget"
    """The token budget of the steps was used up."""
    NO_SLOT = "no_slot"
    """As many sequences ran as may."""
    NO_BLOCKS = "no_blocks"
    """Too few KV blocks were available."""
    BATCH = "batch"
    """The batching takes nobody in until the batch in progress is done."""
    STEP = "step"
    """A step was in progress; nobody starts in the middle of one."""
    FAIRNESS = "fairness"
    """Its tenant had more than its share."""
    LATE = "late"
    """It cannot be in time any more, so those that can go first."""
    PREEMPTED = "preempted"
    """It ran and had to make room."""
    PREFILLING = "prefilling"
    """It runs and computes its prompt (after a preemption: everything that it knows)."""
    DECODING = "decoding"
    """It runs and yields tokens."""
    REJECTED = "rejected"
    """It was refused."""
    ENDED = "ended"
    """It is over."""


@dataclass(frozen=True, slots=True)
class Span:
    """One reason, from `from_s` until `to_s` in the driver's clock; `to_s` is None for what holds still.

    Details by reason; counts in tokens, blocks or requests, times in seconds:

    - `ROUTED`: `replica`, `because`; `decode_replica` where another one yields its tokens; of those that were compared,
      the chosen one first, `replica_1`, `cost_1`, `cached_tokens_1` and so on. A gateway names its backends.
    - `INTERRUPTED`: the lost `replica`, and `output_tokens` that its client has from there.
    - `FORWARDED`: `backend`; `failure`, or `first_byte_s` after it was sent, where it was `expected_s`.
    - any kind of waiting: `requests` and `tokens` in the queue when it came, `started` before it did while it waited,
      seconds by what held the queue (`budget_s`, `no_slot_s`, `no_blocks_s`, `batch_s`, `step_s`); while it waits
      still: `ahead_requests`, `ahead_tokens`, `over_age`, and `held_by`, a `Reason`'s value.
    - `NO_BLOCKS`: `needs_blocks`, `available_blocks`. `FAIRNESS`: `service`, `least_service` in weighted tokens.
    - `LATE`: `due_s` after its arrival, `needs_s` of computing. `PREEMPTED`: `cause`, `for_request`, `lost_tokens`,
      `swapped_tokens` of them.
    - `PREFILLING`: `new_tokens`, `cached_tokens`, `restored_tokens`, `resumed`, `over_age`.
    - `REJECTED`, `ENDED`: `cause`; `output_tokens`.
    """

    from_s: float
    to_s: float | None
    reason: Reason
    details: Mapping[str, Detail] = field(default_factory=dict)

    def in_words(self) -> str:
        """Return the reason as a clause of plain English."""
        match self.reason:
            case Reason.ROUTED:
                return _routed(self.details)
            case Reason.FORWARDED:
                return _forwarded(self.details)
            case Reason.INTERRUPTED:
                had = _count(self.details, "output_tokens")
                return f"replica {self.details['replica']} was lost; it goes on elsewhere behind {had} of output"
            case Reason.PREFILLING:
                return _prefilling(self.details)
            case Reason.DECODING:
                return "runs, yielding a token per step"
            case Reason.REJECTED:
                return f"refused: {self.details['cause']}"
            case Reason.ENDED:
                return f"ended: {self.details['cause']} after {_count(self.details, 'output_tokens')}"
        return _waiting(_told(self.reason, self.details), self.details)


def timeline(spans: Sequence[Span]) -> list[str]:
    """Return a line per span: when it began after the first one did, how long it lasted, and its reason in words."""
    origin_s = spans[0].from_s if spans else 0.0
    return [
        f"{span.from_s - origin_s:10.3f} s  "
        f"{'and still' if span.to_s is None else f'{span.to_s - span.from_s:.3f} s':>10}  {span.in_words()}"
        for span in spans
    ]


def _routed(details: Mapping[str, Detail]) -> str:
    told = f"sent to {_replica(details['replica'])}: {details['because']}"
    if "decode_replica" in details:
        told = f"{told}; {_replica(details['decode_replica'])} goes on with it"
    ranks = range(2, 1 + sum(key.startswith("cost_") for key in details))
    others = [f"{_replica(details[f'replica_{rank}'])} at {details[f'cost_{rank}']:.4g}" for rank in ranks]
    return f"{told}; at cost {details['cost_1']:.4g}, {', '.join(others)}" if others else told


def _replica(which: Detail) -> str:
    return which if isinstance(which, str) else f"replica {which}"


def _forwarded(details: Mapping[str, Detail]) -> str:
    backend = details["backend"]
    if "failure" in details:
        return f"sent to {backend}, which failed: {details['failure']}"
    if "first_byte_s" not in details:
        return f"at {backend}, nothing has come from there"
    told = f"at {backend}; the answer began after {details['first_byte_s']:.3f} s"
    return f"{told}, expected after {details['expected_s']:.3f} s" if "expected_s" in details else told


def _waiting(told: str, details: Mapping[str, Detail]) -> str:
    """Return what was told of a wait, and what is known of the queue meanwhile."""
    parts = [told]
    if details.get("requests"):
        parts.append(f"{_count(details, 'requests')} with {_count(details, 'tokens')} waited when it came")
    if details.get("started"):
        parts.append(f"{details['started']} started before it")
    held = [f"{details[key]:.3f} s by {by}" for key, by in _HOLDS.items() if details.get(key)]
    if held:
        parts.append(f"held {', '.join(held)}")
    if details.get("ahead_requests"):
        parts.append(f"before it now: {_count(details, 'ahead_requests')} with {_count(details, 'ahead_tokens')}")
    elif "ahead_requests" in details:
        parts.append("it is first in line now")
    if details.get("over_age"):
        parts.append("it has waited longer than the ageing bound and goes ahead of the order")
    if "held_by" in details:
        held_by = f"{details['held_by']}_s"
        parts.append(f"the queue is held by {_HOLDS[held_by]}")
    return "; ".join(parts)


_HOLDS: Final = {
    "budget_s": "the token budget of each step being used up",
    "no_slot_s": "no slot being free",
    "no_blocks_s": "too few KV blocks",
    "batch_s": "the batch in progress",
    "preempted_s": "a preemption for the blocks of others",
    "step_s": "the step in progress",
}


def _count(details: Mapping[str, Detail], key: str) -> str:
    number, noun = details.get(key, 0), key.rsplit("_", 1)[-1]
    return f"{number} {noun.removesuffix('s') if number == 1 else noun}"


def _preempted(details: Mapping[str, Detail]) -> str:
    cause, name = details["cause"], details.get("for_request")
    if cause == "priority":
        told = f"preempted for {name}, which goes before it"
    elif cause == "growth":
        told = f"preempted for the next block of {name}" if name else "preempted, since its own next block was not free"
    elif cause == "swap_failed":
        told = "stopped, since its KV did not come back from the host"
    else:
        told = f"preempted ({cause})"
    told += f"; {_count(details, 'lost_tokens')} of KV given up"
    return f"{told}, {details['swapped_tokens']} of them to the host" if details.get("swapped_tokens") else told


def _prefilling(details: Mapping[str, Detail]) -> str:
    told = (
        f"runs, computing {_count(details, 'new_tokens')}; {details['cached_tokens']} more came from the prefix cache"
    )
    if details.get("landed_tokens"):
        told = f"goes on with the KV of {_count(details, 'landed_tokens')} that came along"
    if details.get("restored_tokens"):
        told = f"{told}, {details['restored_tokens']} from the host"
    if details.get("resumed"):
        told = f"{told}; recomputing after a preemption"
    return f"{told}; it went ahead of the order by age" if details.get("over_age") else told


def _told(reason: Reason, details: Mapping[str, Detail]) -> str:
    match reason:
        case Reason.NO_SLOT:
            return "it was its turn, but no slot was free"
        case Reason.NO_BLOCKS:
            needs, available = details["needs_blocks"], details["available_blocks"]
            return f"it was its turn, but it needs {needs} KV blocks and {available} are available"
        case Reason.FAIRNESS:
            own, least = details["service"], details["least_service"]
            return f"queued behind other tenants: its own has had {own:.0f} weighted tokens, another {least:.0f}"
        case Reason.LATE:
            due, needs = details["due_s"], details["needs_s"]
            return (
                f"deferred behind those that can be in time: due {due:.3f} s after its arrival, it needs {needs:.3f} s"
            )
        case Reason.PREEMPTED:
            return _preempted(details)
        case _:
            return "queued"
