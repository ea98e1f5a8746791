"""The network between replicas: each has a way out and a way in, and transfers queue on both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from expediter.core.errors import ConfigurationError
from expediter.perfmodel.transfer import layerwise_exposed_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A replica's connection to the others, all of its GPUs together.

    Args:
        bandwidth: out and in, each, byte/s.
        latency_s: until the first byte of a message arrives.
    Raises:
        ConfigurationError: a figure is out of range.
    """

    bandwidth: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise ConfigurationError(f"the bandwidth of a link must be above 0 byte/s, not {self.bandwidth}")
        if not self.latency_s >= 0:
            raise ConfigurationError(f"the latency of a link must not be negative, not {self.latency_s} s")


class Network:
    """Sends bytes between replicas, first come, first served on every way out and every way in.

    A transfer starts when both its ways are free, and runs at the speed of the slower end: latency + bytes / bandwidth.

    Args:
        links: by replica.
        num_layers: of the model, for transfers layer by layer.
    """

    def __init__(self, links: Mapping[int, Link], num_layers: int) -> None:
        self._links = dict(links)
        self._num_layers = num_layers
        self._out_free_s = dict.fromkeys(links, 0.0)
        self._in_free_s = dict.fromkeys(links, 0.0)

    def send(
        self, source: int, target: int, num_bytes: int, now_s: float, *, layers_since_s: float | None = None
    ) -> float:
        """Take a transfer's place on both ways; return when its last byte arrives.

        Args:
            now_s: when all of it is there to be sent.
            layers_since_s: since when its layers have been coming out one by one, to be sent; None if they did not.
        """
        if num_bytes <= 0:
            return now_s
        a, b = self._links[source], self._links[target]
        free_s = max(self._out_free_s[source], self._in_free_s[target])
        duration_s = num_bytes / min(a.bandwidth, b.bandwidth)
        if layers_since_s is None:
            sent_s = max(now_s, free_s) + duration_s
        else:
            overlapped_s = max(0.0, now_s - max(layers_since_s, free_s))
            sent_s = max(now_s, free_s) + layerwise_exposed_s(duration_s, overlapped_s, self._num_layers)
        self._out_free_s[source] = self._in_free_s[target] = sent_s
        return sent_s + max(a.latency_s, b.latency_s)

    def reset(self, replica: int) -> None:
        """Forget what was queued for a replica that has gone; the other ends keep their places."""
        self._out_free_s[replica] = self._in_free_s[replica] = 0.0
