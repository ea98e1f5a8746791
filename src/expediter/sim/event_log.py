"""The event log: what happened to each request, as JSON lines.

Each line has `t` (seconds), `event`, `request` and what belongs to the event. Lines are in order of time, but for
`rejected`: it has the time of the arrival and stands where the replica looked, after the step that it was in. The log
is a function of trace, seed and configuration: the same run gives the same bytes, with jumps or without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, BinaryIO

import msgspec

from expediter.control.routing.base import Decision, Placement
from expediter.core.events import (
    Admitted,
    ClusterEvent,
    Event,
    Fetched,
    Finished,
    FirstToken,
    HandedOff,
    Interrupted,
    Preempted,
    Rejected,
    ReplicaDown,
    ReplicaUp,
    Routed,
    TransferLost,
    Transferred,
)
from expediter.core.request import Request


class EventLog:
    """`Observer` that writes to a file opened for bytes; the caller closes it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._encoder = msgspec.json.Encoder()

    def arrived(self, request: Request, decision: Decision, now_s: float) -> None:
        self._write(
            now_s,
            "queued",
            request.request_id,
            {"prompt_tokens": request.num_prompt_tokens, "max_tokens": request.max_tokens},
        )
        if isinstance(decision, Placement) and decision.replica_id < 0:
            return  # no replica is up: it is routed when one is
        if isinstance(decision, Placement):
            self._write(now_s, "routed", request.request_id, {"replica": decision.replica_id})
        else:
            self._write(now_s, "rejected", request.request_id, {"reason": decision.reason.value})

    def record(self, replica_id: int, events: Sequence[Event | ClusterEvent]) -> None:
        for event in events:
            facts: dict[str, Any]
            match event:
                case Admitted():
                    facts = {"cached_tokens": event.num_cached_tokens, "resumed": event.resumed}
                    if event.num_restored_tokens:
                        facts["restored_tokens"] = event.num_restored_tokens
                    self._write(event.now_s, "admitted", event.request_id, {"replica": replica_id, **facts})
                case FirstToken():
                    self._write(event.now_s, "first_token", event.request_id, {"replica": replica_id})
                case Preempted():
                    facts = {"cause": event.cause.value, "for": event.for_request_id}
                    facts["lost_tokens"] = event.num_lost_tokens
                    if event.num_swapped_tokens:
                        facts["swapped_tokens"] = event.num_swapped_tokens
                    self._write(event.now_s, "preempted", event.request_id, {"replica": replica_id, **facts})
                case Finished():
                    facts = {
                        "reason": event.reason.value,
                        "output_tokens": event.num_output_tokens,
                        "cached_tokens": event.num_cached_tokens,
                        "preemptions": event.num_preemptions,
                    }
                    self._write(event.now_s, "finished", event.request_id, {"replica": replica_id, **facts})
                case Rejected():
                    facts = {"reason": event.reason.value, "message": event.message}
                    self._write(event.now_s, "rejected", event.request_id, {"replica": replica_id, **facts})
                case ReplicaDown() | ReplicaUp():
                    self._write_replica(replica_id, event)
                case Routed() | Interrupted() | HandedOff() | Transferred() | TransferLost() | Fetched():
                    self._move(replica_id, event)
                case _:  # Queued is the arrival's own line
                    pass

    def _write_replica(self, replica_id: int, event: ReplicaDown | ReplicaUp) -> None:
        line: dict[str, Any] = {"t": event.now_s, "event": "replica_up", "replica": replica_id}
        if isinstance(event, ReplicaDown):
            line |= {"event": "replica_down", "until": event.until_s if math.isfinite(event.until_s) else None}
        self._file.write(self._encoder.encode(line) + b"\n")

    def _move(
        self, replica_id: int, event: Routed | Interrupted | HandedOff | Transferred | TransferLost | Fetched
    ) -> None:
        name, facts = "routed", dict[str, Any]()
        match event:
            case Interrupted():
                name, facts = "interrupted", {"output_tokens": event.num_output_tokens}
            case HandedOff():
                name, facts = "handed_off", {"to": event.target_id, "tokens": event.num_tokens}
            case Transferred():
                name = "transferred"
                facts = {"from": event.source_id, "bytes": event.num_bytes, "exposed_s": event.exposed_s}
            case Fetched():
                name = "fetched"
                facts = {"from": event.source, "tokens": event.num_tokens, "bytes": event.num_bytes}
            case TransferLost():
                name, facts = "transfer_lost", {"from": event.source_id}
            case _:
                pass
        self._write(event.now_s, name, event.request_id, {"replica": replica_id, **facts})

    def _write(self, now_s: float, event: str, request_id: str, facts: dict[str, Any]) -> None:
        self._file.write(self._encoder.encode({"t": now_s, "event": event, "request": request_id, **facts}) + b"\n")
