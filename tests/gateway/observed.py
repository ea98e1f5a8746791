"""A server of the pages that show a gateway, over records that a test made up; the parts are the real ones."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from expediter.control.routing.base import Candidate, Placement
from expediter.core.slo import Slo, SloClass
from expediter.gateway.dashboard.feed import Feeder
from expediter.gateway.dashboard.slow import SlowReasons
from expediter.gateway.errors import ApiError, handle_error
from expediter.gateway.explanations import Explanations
from expediter.gateway.http.asgi import AsgiApplication
from expediter.gateway.http.listener import Listener
from expediter.gateway.http.wire import HttpLimits
from expediter.gateway.observation import Observation
from expediter.gateway.server import bind
from expediter.gateway.siblings import Siblings
from expediter.gateway.tenants import Tenant
from expediter.telemetry.exchanges import Attempt, ExchangeRecord, Outcome
from expediter.telemetry.gateway_metrics import GatewayMetrics
from expediter.telemetry.history import History
from expediter.telemetry.recent_exchanges import RecentExchanges
from expediter.telemetry.shown_backend import ShownBackend

CLASSES = {"interactive": SloClass(ttft_s=0.5, tpot_s=0.05), "batch": SloClass(e2e_s=60.0)}
BACKENDS = (
    ShownBackend(
        name="gpu-a:8000",
        num_in_flight=14,
        max_requests=32,
        num_running=12,
        num_waiting=2,
        kv_usage=0.71,
        num_pending_tokens=5210,
        metrics_age_s=0.4,
    ),
    ShownBackend(
        name="gpu-b:8000",
        num_in_flight=32,
        max_requests=32,
        num_running=24,
        num_waiting=8,
        kv_usage=0.97,
        num_pending_tokens=20_480,
        metrics_age_s=0.6,
    ),
    ShownBackend(name="gpu-c:8000", state="ejected", max_requests=32, metrics_age_s=12.0),
    ShownBackend(
        name="replica 0",
        is_own=True,
        num_in_flight=3,
        num_running=3,
        num_waiting=0,
        kv_usage=0.12,
        num_pending_tokens=0,
    ),
)  # fmt: skip - a table


@dataclass
class Observed:
    """What a test feeds."""

    url: str
    metrics: GatewayMetrics
    history: History
    recent: RecentExchanges
    shows_all: bool = True

    def record(self, record: ExchangeRecord) -> None:
        for sink in (self.metrics, self.history, self.recent):
            sink.record(record)


@contextlib.contextmanager
def observed(backends: Sequence[ShownBackend] = BACKENDS) -> Iterator[Observed]:
    """Serve the pages from a thread."""
    registry, history, recent = CollectorRegistry(), History(), RecentExchanges()
    metrics = GatewayMetrics(registry, lambda: backends, policy="predicted_ttft")
    siblings = Siblings(recent.find, history.since)
    explanations = Explanations(siblings)
    feeder = Feeder(
        siblings,
        metrics.at_gateway,
        lambda: backends,
        lambda: ["llama-3.1-8b"],
        lambda: CLASSES,
        SlowReasons(explanations),
    )
    sock = bind("127.0.0.1", 0)
    served = Observed(f"http://127.0.0.1:{sock.getsockname()[1]}", metrics, history, recent)
    observation = Observation(registry, explanations, feeder, lambda: served.shows_all)
    app = Starlette(
        routes=observation.routes(),
        exception_handlers={ApiError: handle_error},
    )
    loop = asyncio.new_event_loop()
    listener = Listener(AsgiApplication(app, {"tenant": Tenant()}), HttpLimits())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(listener.start(sock), loop).result()
        yield served
    finally:
        asyncio.run_coroutine_threadsafe(listener.stop(1.0), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def traffic(seconds: float, seed: int = 0) -> Iterator[ExchangeRecord]:
    """Yield records of requests that ended in the last `seconds`, with a bad minute in the middle; in order."""
    rng = random.Random(seed)
    now_s = time.monotonic()
    ended_s, number = now_s - seconds, 0
    while ended_s < now_s:
        ended_s += rng.expovariate(3.0)
        number += 1
        yield _one(rng, number, ended_s, is_bad=0.55 < (ended_s - now_s + seconds) / seconds < 0.65)


def _one(rng: random.Random, number: int, ended_s: float, *, is_bad: bool) -> ExchangeRecord:
    tenant, slo_class = rng.choice(
        [("search", "interactive"), ("search", "interactive"), ("assistant", "interactive"), ("nightly", "batch")]
    )  # fmt: skip - a table
    prompt, output = int(rng.lognormvariate(6.5, 0.8)), max(int(rng.lognormvariate(4, 0.7)), 1)
    cached = int(prompt * rng.betavariate(4, 2))
    ttft_s = rng.lognormvariate(-2, 0.5) * (8 if is_bad else 1)
    queue_s = max(ttft_s - 0.5, 0.0) * rng.random() if is_bad else 0.0
    e2e_s = ttft_s + (output - 1) * rng.lognormvariate(-3.9, 0.25) * (1.7 if is_bad else 1)
    arrived_s, backend = ended_s - e2e_s, rng.choice(["gpu-a:8000", "gpu-b:8000", "replica 0"])
    aims = CLASSES[slo_class]
    attempts = [Attempt(backend=backend, dispatched_s=arrived_s + queue_s, ended_s=ended_s)]
    outcome = Outcome.OK
    if is_bad and rng.random() < 0.1:
        lost = Attempt(backend="gpu-c:8000", dispatched_s=arrived_s, ended_s=arrived_s + queue_s, failure="timeout")
        attempts.insert(0, lost)
    elif rng.random() < 0.01:
        outcome = Outcome.OVER_LIMIT
    return ExchangeRecord(
        request_id=f"req-{number:024x}",
        tenant=tenant,
        model="llama-3.1-8b",
        path="/v1/chat/completions",
        is_stream=True,
        slo_class=slo_class,
        slo=Slo(ttft_s=aims.ttft_s, tpot_s=aims.tpot_s, e2e_s=aims.e2e_s),
        arrived_s=arrived_s,
        queued_s=arrived_s if queue_s else None,
        queued_behind_requests=rng.randrange(1, 40) if queue_s else 0,
        queued_behind_tokens=rng.randrange(100, 40_000) if queue_s else 0,
        dispatched_s=attempts[-1].dispatched_s,
        first_byte_s=arrived_s + ttft_s,
        ended_s=ended_s,
        attempts=tuple(attempts) if outcome is Outcome.OK else (),
        route=Placement(
            replica_id=0,
            because="it costs least",
            candidates=(Candidate(0, 0.1, cached), Candidate(1, 0.2, 0)),
            num_cached_tokens=cached,
        ),
        route_backends=(backend, "gpu-c:8000"),
        status=200 if outcome is Outcome.OK else 429,
        outcome=outcome,
        error_code=None if outcome is Outcome.OK else "tokens",
        num_prompt_tokens=prompt,
        num_output_tokens=output,
        num_cached_tokens=cached,
        num_bytes_in=prompt * 4,
        num_bytes_out=output * 180,
        predicted_ttft_s=0.12,
    )
