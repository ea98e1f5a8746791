"""What the gateway knows of one replica: its state, its process and its load."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from expediter.control.fleet import ReplicaProfile, ReplicaSnapshot
from expediter.control.learning import LearnedSpeed
from expediter.runtime.frames import Hello, Stats
from expediter.runtime.questions import Questions
from expediter.runtime.replica_process import ReplicaProcess
from expediter.runtime.spec import ReplicaSpec
from expediter.runtime.streams import RequestStream
from expediter.telemetry.metrics import ReplicaMetrics
from expediter.telemetry.shown_backend import ShownBackend


class ReplicaState(enum.Enum):
    """Where a replica is; only one that is UP gets requests."""

    STARTING = "starting"
    UP = "up"
    STALLED = "stalled"
    DOWN = "down"


@dataclass(slots=True, eq=False)
class ManagedReplica:
    """One replica through all of its incarnations. The supervisor keeps its process, the dispatcher its requests.

    Attributes:
        in_flight: its requests by id.
        num_pending_tokens: of prompts in flight without a token yet, as far as not taken to be cached.
        num_context_tokens: of all prompts in flight.
        stats: of its last turn; None while it is not up.
        turn_age_s: how long its loop has been in the current turn, as of its last frame.
        starting_s: when its newest process was started, or the next one will be.
        start_took_s: from there until the newest one that came up was up; None before the first.
    """

    spec: ReplicaSpec
    metrics: ReplicaMetrics
    state: ReplicaState = ReplicaState.STARTING
    process: ReplicaProcess | None = None
    hello: Hello | None = None
    in_flight: dict[str, RequestStream] = field(default_factory=dict)
    questions: Questions = field(default_factory=Questions)
    speed: LearnedSpeed = field(default_factory=LearnedSpeed)
    num_pending_tokens: int = 0
    num_context_tokens: int = 0
    num_running: int = 0
    stats: Stats | None = None
    last_frame_s: float = 0.0
    turn_age_s: float = 0.0
    up_since_s: float = 0.0
    starting_s: float = 0.0
    start_took_s: float | None = None
    num_deaths_in_a_row: int = 0

    @property
    def replica_id(self) -> int:
        return self.spec.replica_id

    def snapshot(self) -> ReplicaSnapshot:
        """Return what a router sees of it."""
        return ReplicaSnapshot(
            replica_id=self.replica_id,
            num_requests=len(self.in_flight),
            num_pending_tokens=self.num_pending_tokens,
            num_context_tokens=self.num_context_tokens,
            num_running=self.num_running,
        )

    def up_in_s(self, now_s: float) -> float:
        """Return in how many seconds it is likely to take requests, by how long its last start took."""
        if self.state is ReplicaState.UP:
            return 0.0
        return max(0.0, self.starting_s + (self.start_took_s or 0.0) - now_s)

    def shown(self) -> ShownBackend:
        """Return what is shown of it."""
        stats = self.stats
        return ShownBackend(
            name=f"replica {self.replica_id}",
            state=self.state.value,
            is_own=True,
            num_in_flight=len(self.in_flight),
            num_pending_tokens=self.num_pending_tokens,
            num_running=None if stats is None else stats.num_running,
            num_waiting=None if stats is None else stats.num_waiting,
            kv_usage=None if stats is None else stats.num_used_blocks / max(stats.num_blocks, 1),
        )

    def profile(self) -> ReplicaProfile:
        """Return what a router may count on; asked once it has said hello."""
        assert self.hello is not None
        limits = self.hello.limits
        return ReplicaProfile(
            max_kv_tokens=limits.num_blocks * limits.block_size, caches_prefixes=self.spec.prefix_caching
        )

    def take_on(self, stream: RequestStream, num_pending_tokens: int) -> None:
        """Count a request that is sent to it."""
        stream.replica_id = self.replica_id
        stream.num_pending_tokens = num_pending_tokens
        self.in_flight[stream.request.request_id] = stream
        self.num_pending_tokens += num_pending_tokens
        self.num_context_tokens += stream.request.num_prompt_tokens

    def settle_prompt(self, stream: RequestStream) -> None:
        """Take a prompt off the pending tokens, once."""
        self.num_pending_tokens -= stream.num_pending_tokens
        stream.num_pending_tokens = 0

    def let_go(self, stream: RequestStream) -> None:
        """Forget a request."""
        self.settle_prompt(stream)
        self.num_context_tokens -= stream.request.num_prompt_tokens
        del self.in_flight[stream.request.request_id]
