"""The gateway's metrics by name: `docs/observe.md` has them for the reader, dashboards are checked against them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from expediter.telemetry.shown_backend import ShownBackend

LATENCY_BUCKETS_S: Final = (
    *(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
TPOT_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)


@dataclass(frozen=True, slots=True)
class Family:
    """A metric. A counter's name ends with `_total` in the exposition."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def num_values(self) -> int:
        """Of a row: a histogram's are its buckets, the one above them, and the sum."""
        return len(self.buckets) + 2 if self.kind == "histogram" else 1


REQUESTS: Final = Family(
    "expediter:gateway_requests",
    "counter",
    "Requests that ended, by how.",
    ("model_name", "tenant", "backend", "outcome"),
)
TTFT: Final = Family(
    "expediter:gateway_time_to_first_token_seconds",
    "histogram",
    "Arrival at the gateway to the first byte of a stream.",
    ("model_name", "backend"),
    LATENCY_BUCKETS_S,
)
TPOT: Final = Family(
    "expediter:gateway_time_per_output_token_seconds",
    "histogram",
    "Mean time per output token of a stream after the first.",
    ("model_name", "backend"),
    TPOT_BUCKETS_S,
)
E2E: Final = Family(
    "expediter:gateway_request_seconds",
    "histogram",
    "Arrival at the gateway to the end of the answer, of requests that were answered.",
    ("model_name", "backend"),
    LATENCY_BUCKETS_S,
)
QUEUE: Final = Family(
    "expediter:gateway_queue_seconds",
    "histogram",
    "Time in the central queue, of requests that waited there.",
    ("model_name",),
    LATENCY_BUCKETS_S,
)
JUDGED: Final = Family(
    "expediter:gateway_request_slo",
    "counter",
    "Ended requests by whether they met their targets; its rate with met=true is the goodput.",
    ("slo_class", "tenant", "met"),
)
TOKENS: Final = Family(
    "expediter:gateway_tokens",
    "counter",
    "Tokens of answered requests: prompt, output, and cached (of the prompt, as the backend said).",
    ("model_name", "tenant", "kind"),
)
HITS: Final = Family(
    "expediter:gateway_expected_cached_tokens",
    "counter",
    "Prompt tokens that the router took to be cached on the backend that it chose.",
    ("backend",),
)
BYTES: Final = Family(
    "expediter:gateway_bytes", "counter", "Bytes of bodies, from clients (in) and to them (out).", ("direction",)
)
LIMITED: Final = Family(
    "expediter:gateway_limited", "counter", "Requests refused for a limit of their tenant.", ("tenant", "limit")
)
UNAUTHORIZED: Final = Family("expediter:gateway_unauthorized", "counter", "Requests refused for want of a valid key.")
FAILURES: Final = Family(
    "expediter:gateway_attempt_failures", "counter", "Dispatches that failed, by cause.", ("backend", "cause")
)
RETRIES: Final = Family(
    "expediter:gateway_retries", "counter", "Dispatches after a failed one, by what had failed it.", ("cause",)
)
ROUTED: Final = Family(
    "expediter:gateway_routing_decisions", "counter", "Where requests were sent, by why.", ("policy", "cause")
)
PREDICTED: Final = Family(
    "expediter:gateway_predicted_ttft_seconds",
    "counter",
    "Of streams whose TTFT was predicted: what was expected, what came, and the sum of the absolute differences.",
    ("kind",),
)
PREDICTIONS: Final = Family("expediter:gateway_ttft_predictions", "counter", "Streams whose TTFT was predicted.")
EJECTIONS: Final = Family("expediter:gateway_ejections", "counter", "Times a backend was taken out.", ("backend",))
PROBES: Final = Family(
    "expediter:gateway_probes", "counter", "Half-open probes of ejected backends.", ("backend", "result")
)
IN_FLIGHT: Final = Family("expediter:gateway_requests_in_flight", "gauge", "Requests at the gateway.")
QUEUE_LENGTH: Final = Family("expediter:gateway_queue_requests", "gauge", "Requests in the central queue.")
QUEUE_TOKENS: Final = Family("expediter:gateway_queue_tokens", "gauge", "Their prompt tokens, estimated.")

COUNTED: Final = (
    *(REQUESTS, TTFT, TPOT, E2E, QUEUE, JUDGED, TOKENS, HITS, BYTES, LIMITED, UNAUTHORIZED, FAILURES),
    *(RETRIES, ROUTED, PREDICTED, PREDICTIONS, EJECTIONS, PROBES, IN_FLIGHT, QUEUE_LENGTH, QUEUE_TOKENS),
)

BACKEND_GAUGES: Final[dict[str, tuple[str, Callable[[ShownBackend], float | None]]]] = {
    "expediter:backend_requests_in_flight": ("Requests sent to it that have not ended.", lambda b: b.num_in_flight),
    "expediter:backend_max_requests": ("Requests that it may have at a time.", lambda b: b.max_requests),
    "expediter:backend_pending_tokens": (
        "Tokens of prompts sent to it, to be computed.",
        lambda b: b.num_pending_tokens,
    ),
    "expediter:backend_requests_running": ("Requests that it runs, by its own metrics.", lambda b: b.num_running),
    "expediter:backend_requests_waiting": ("Requests that wait there, by its own metrics.", lambda b: b.num_waiting),
    "expediter:backend_kv_usage": ("Used share of its KV blocks, by its own metrics.", lambda b: b.kv_usage),
    "expediter:backend_metrics_age_seconds": ("Since its own metrics were read.", lambda b: b.metrics_age_s),
}
BACKEND_STATE: Final = "expediter:backend_state"
