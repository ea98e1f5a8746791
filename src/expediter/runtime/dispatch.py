"""Which replica has which request: sends requests out, passes events on, and sends on what a lost replica had."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from expediter.control.fleet import Fleet
from expediter.control.routing.base import Decision, Placement, Refusal, RouteQuery, Router
from expediter.control.routing.build import RoutingConfig, make_router
from expediter.control.routing.notes import RoutingNotes
from expediter.control.speed import Speed
from expediter.core.errors import CapacityError, ConfigurationError
from expediter.core.events import Admitted, Finished, FirstToken, Preempted, Queued, Rejected, RejectReason
from expediter.core.explanation import Span
from expediter.core.ports import Clock
from expediter.core.request import FinishReason, Request
from expediter.runtime.frames import AbortFrame, TokensFrame, decode_tokens
from expediter.runtime.replica import ManagedReplica
from expediter.runtime.request_frames import resume_frame, submit_frame
from expediter.runtime.step_frames import ReplicaEvent
from expediter.runtime.streams import RequestStream

_MAX_NOTES: Final = 4096
"""Routing decisions that can still be explained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeConfig:
    """What is done for the requests of a replica that is lost.

    Args:
        within_s: how long they wait for a replica that is up, in seconds; then they end with an error.
        max_resumes: how often one request may go on elsewhere: it may be what the replicas die of.
    Raises:
        ConfigurationError: a value is below 0.
    """

    within_s: float = 60.0
    max_resumes: int = 3

    def __post_init__(self) -> None:
        if not self.within_s >= 0 or self.max_resumes < 0:
            raise ConfigurationError("the resume of requests has no negative time or count")


@dataclass(slots=True, eq=False)
class _Parked:
    """Sequences that wait for a replica, and what ends their wait."""

    streams: list[RequestStream]
    timer: asyncio.TimerHandle


class Dispatcher:
    """The requests of all replicas; lives on the gateway's event loop.

    A lost replica's requests go on at another one with the tokens that their consumers have: the request is the same,
    so limits, penalties, seeds and usage are as if nothing had happened.

    Args:
        replicas: by number.
    """

    def __init__(
        self, replicas: Mapping[int, ManagedReplica], router: Router, clock: Clock, config: ResumeConfig
    ) -> None:
        self._replicas = replicas
        self._router = router
        self._fallback = make_router(RoutingConfig(name="least_load"))
        self._clock = clock
        self._config = config
        self._fleet = Fleet()
        self._notes = RoutingNotes(_MAX_NOTES)
        self._parked: list[_Parked] = []

    # ---- replicas

    def join(self, replica: ManagedReplica) -> None:
        """Let a replica have requests from now on, those that wait for one first."""
        self._fleet.join(replica.replica_id, replica.snapshot, replica.profile())
        parked, self._parked = self._parked, []
        for waiting in parked:
            waiting.timer.cancel()
            self._send_on(waiting.streams, waiting.timer.when())

    def leave(self, replica: ManagedReplica) -> None:
        """Let a replica have no more requests; it may go on with those that it has."""
        self._fleet.leave(replica.replica_id)

    def learned(self, replica: ManagedReplica, speed: Speed) -> None:
        """Take note of how fast a replica is."""
        self._fleet.learned(replica.replica_id, speed)

    def load_changed(self, replica: ManagedReplica) -> None:
        """Take note that a replica's snapshot may be another one."""
        self._fleet.mark(replica.replica_id)

    # ---- requests

    @property
    def num_in_flight(self) -> int:
        """Requests that have not ended, those that wait for a replica included."""
        waiting = sum(len(parked.streams) for parked in self._parked)
        return waiting + sum(len(replica.in_flight) for replica in self._replicas.values())

    def submit(self, requests: Sequence[Request], wake: asyncio.Event) -> list[RequestStream]:
        """Send the sequences of a request to the replica that the router picks; as `Supervisor.submit`."""
        decision = self._router.route(RouteQuery.of(requests, self._clock.now()), self._fleet)
        if len(self._replicas) > 1:
            self._notes.note(requests, decision, requests[0].arrival_s)
        if isinstance(decision, Refusal):
            raise CapacityError(decision.message, retry_after_s=self._retry_after_s(decision))
        streams = [RequestStream(request, requests[0].request_id, wake) for request in requests]
        self._place(streams, decision)
        metrics = self._replicas[decision.replica_id].metrics
        metrics.record(Queued(r.request_id, r.arrival_s, r.tenant, r.slo_class, r.slo) for r in requests)
        return streams

    def abort(self, request_id: str, reason: FinishReason) -> None:
        """End a request; its `Finished` follows. One that has ended already is left alone."""
        for replica in self._replicas.values():
            stream = replica.in_flight.get(request_id)
            if stream is not None:
                stream.abort_reason = reason
                if replica.process is not None:
                    replica.process.send(AbortFrame(request_id, reason))
                return
        for parked in self._parked:
            for stream in parked.streams:
                if stream.request.request_id == request_id:
                    parked.streams.remove(stream)
                    self._end(stream, reason)
                    return

    def fail_all(self) -> None:
        """End every request with an error event now."""
        for replica in self._replicas.values():
            for request_id, stream in tuple(replica.in_flight.items()):
                if replica.process is not None:
                    replica.process.send(AbortFrame(request_id, FinishReason.ABORT))
                replica.let_go(stream)
                self._end(stream, stream.owed_end() or FinishReason.ERROR)
            self._fleet.mark(replica.replica_id)
        parked, self._parked = self._parked, []
        for waiting in parked:
            self._give_up(waiting)

    def explained(self, request_id: str, told: tuple[Span, ...] | None) -> tuple[Span, ...] | None:
        """Return what a replica told of a request, behind how it came there; None if nobody knows it (any more)."""
        return self._notes.while_interrupted(request_id) if told is None else self._notes.before(request_id, told)

    # ---- events

    def pass_on(self, replica: ManagedReplica, event: ReplicaEvent) -> None:
        """Tell metrics and consumer what a replica reports; what is of no request in flight there is ignored."""
        if isinstance(event, TokensFrame):
            replica.metrics.record_tokens(event.now_s, event.request_ids, event.num_steps)
            self._pass_tokens_on(replica, event)
            return
        if isinstance(event, Queued):
            return  # counted at dispatch: it may die on the way
        stream = replica.in_flight.get(event.request_id)
        if stream is not None and isinstance(event, Admitted) and stream.first_scheduled_s is not None:
            event = replace(event, resumed=True)  # its first start was perhaps on a replica that is lost
        replica.metrics.record((event,))
        if stream is None:
            return
        match event:
            case Admitted():
                stream.push(event)
            case Preempted():
                stream.num_preemptions += 1
            case FirstToken():
                stream.first_token_s = event.now_s
            case Finished() | Rejected():
                replica.let_go(stream)
                if isinstance(event, Rejected):
                    stream.retry_after_s = self._excess_s(replica, stream.request)
                self._fleet.mark(replica.replica_id)
                stream.push(event)

    def _retry_after_s(self, refusal: Refusal) -> float:
        """Return when a refused request is worth another try: when a replica is up, or as the router says."""
        if refusal.reason is not RejectReason.NO_REPLICA:
            return refusal.retry_after_s
        now_s = self._clock.now()
        return min(replica.up_in_s(now_s) for replica in self._replicas.values())

    def _excess_s(self, replica: ManagedReplica, request: Request) -> float:
        """Return by how much a replica is too late for a request: when one like it may be in time; 0 if that
        is not known."""
        if replica.replica_id not in self._fleet:
            return 0.0
        speed = self._fleet.profile(replica.replica_id).speed
        if not speed.is_known:
            return 0.0
        load = replica.snapshot()
        wait_s = speed.queue_s(load.num_pending_tokens, load.num_requests, load.num_running, load.num_context_tokens)
        return max(0.0, wait_s + speed.prefill_s(request.num_prompt_tokens, 0) - (request.slo.ttft_s or 0.0))

    def _pass_tokens_on(self, replica: ManagedReplica, event: TokensFrame) -> None:
        num_requests = len(event.request_ids)
        tokens = decode_tokens(event.tokens, event.num_steps * num_requests).reshape(event.num_steps, num_requests)
        columns: list[list[int]] = tokens.T.tolist()
        for index, request_id in enumerate(event.request_ids):
            stream = replica.in_flight.get(request_id)
            if stream is None:
                continue
            stream.push_tokens(columns[index], event.logprobs[index] if event.logprobs else None)
            if stream.num_pending_tokens:  # its prompt is done
                replica.settle_prompt(stream)
                self._fleet.mark(replica.replica_id)

    # ---- lost replicas

    def lose(self, replica: ManagedReplica) -> None:
        """Send the requests of a replica on whose process is gone; those that lack nothing but their end get it."""
        groups: dict[str, list[RequestStream]] = {}
        now_s = self._clock.now()
        for stream in tuple(replica.in_flight.values()):
            replica.let_go(stream)
            owed = stream.owed_end()
            if owed is None and stream.num_resumes >= self._config.max_resumes:
                owed = FinishReason.ERROR
            if owed is not None:
                self._end(stream, owed)
                continue
            stream.num_resumes += 1
            replica.metrics.count_resume()
            self._notes.interrupted(stream.request.request_id, replica.replica_id, len(stream.output), now_s)
            # Sequences that have forked are requests of their own; the others start together or not at all.
            name = stream.request.request_id if stream.output else stream.leader_id
            groups.setdefault(name, []).append(stream)
        deadline = asyncio.get_running_loop().time() + self._config.within_s
        for streams in groups.values():
            self._send_on(streams, deadline)

    def _send_on(self, streams: list[RequestStream], deadline: float) -> None:
        """Send sequences on that no replica has, or let them wait for one until `deadline` of the event loop's time."""
        now_s = self._clock.now()
        known = streams[0].request
        if streams[0].output:
            known = replace(known, prompt=np.concatenate((known.prompt, np.array(streams[0].output, np.int32))))
        query = RouteQuery(known, now_s, len(streams))
        decision: Decision = self._router.route(query, self._fleet)
        if isinstance(decision, Refusal) and decision.reason is not RejectReason.NO_REPLICA:
            decision = self._fallback.route(query, self._fleet)  # it has been accepted before
        if isinstance(decision, Placement):
            self._notes.note([stream.request for stream in streams], decision, now_s)
            self._place(streams, decision)
            return
        timer = asyncio.get_running_loop().call_at(deadline, self._expire, streams)
        self._parked.append(_Parked(streams, timer))

    def _expire(self, streams: list[RequestStream]) -> None:
        for parked in self._parked:
            if parked.streams is streams:
                self._parked.remove(parked)
                self._give_up(parked)
                return

    def _give_up(self, parked: _Parked) -> None:
        parked.timer.cancel()
        for stream in parked.streams:
            self._end(stream, FinishReason.ERROR)

    # ---- both

    def _place(self, streams: Sequence[RequestStream], decision: Placement) -> None:
        """Hand sequences, one or a group that has not forked, to the chosen replica."""
        replica = self._replicas[decision.replica_id]
        assert replica.process is not None
        first = streams[0]
        num_known = first.request.num_prompt_tokens + len(first.output)
        if first.num_resumes and len(streams) == 1:
            replica.process.send(resume_frame(first.request, first.carried()))
        else:
            replica.process.send(submit_frame([stream.request for stream in streams]))
        for stream in streams:
            replica.take_on(stream, num_known - decision.num_cached_tokens if stream is first else 0)
        self._fleet.dispatched(decision.replica_id)

    def _end(self, stream: RequestStream, reason: FinishReason) -> None:
        """End a request that no replica has any more."""
        finished = stream.ended(self._clock.now(), reason)
        self._replicas[stream.replica_id].metrics.record((finished,))
        stream.push(finished)
