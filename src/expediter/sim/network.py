"""The network between replicas: each has a way out and a way in, and transfers queue on both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from expediter.control.fleet import KvLink
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


class Passage(NamedTuple):
    """A transfer's place on both ways: from `began_s` to `sent_s` it has them, at `end_s` its last byte arrives."""

    source: int
    target: int
    began_s: float
    sent_s: float
    end_s: float


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

    def mean_link(self, bytes_per_token: float) -> KvLink:
        """Return the time of KV between two replicas of average links that do nothing else."""
        links = list(self._links.values())
        bandwidth = sum(link.bandwidth for link in links) / len(links)
        return KvLink(latency_s=sum(link.latency_s for link in links) / len(links), token_s=bytes_per_token / bandwidth)

    def add(self, place: int, link: Link) -> None:
        """Connect another place, such as a store; by a number of its own."""
        self._links[place] = link
        self._out_free_s[place] = self._in_free_s[place] = 0.0

    def arrival_s(self, source: int, target: int, num_bytes: int, now_s: float) -> float:
        """Return when the last byte of a transfer would arrive that is sent now."""
        a, b = self._links[source], self._links[target]
        free_s = max(now_s, self._out_free_s[source], self._in_free_s[target])
        return free_s + num_bytes / min(a.bandwidth, b.bandwidth) + max(a.latency_s, b.latency_s)

    def send(
        self, source: int, target: int, num_bytes: int, now_s: float, *, layers_since_s: float | None = None
    ) -> Passage:
        """Take a transfer's place on both ways.

        Args:
            now_s: when all of it is there to be sent.
            layers_since_s: since when its layers have been coming out one by one, to be sent; None if they did not.
        """
        if num_bytes <= 0:
            return Passage(source, target, now_s, now_s, now_s)
        a, b = self._links[source], self._links[target]
        free_s = max(self._out_free_s[source], self._in_free_s[target])
        duration_s = num_bytes / min(a.bandwidth, b.bandwidth)
        if layers_since_s is None:
            sent_s = max(now_s, free_s) + duration_s
        else:
            overlapped_s = max(0.0, now_s - max(layers_since_s, free_s))
            sent_s = max(now_s, free_s) + layerwise_exposed_s(duration_s, overlapped_s, self._num_layers)
        self._out_free_s[source] = self._in_free_s[target] = sent_s
        return Passage(source, target, max(now_s, free_s), sent_s, sent_s + max(a.latency_s, b.latency_s))

    def give_up(self, passage: Passage, now_s: float) -> None:
        """Stop a transfer: the ways are free for those that come, but who queues behind it keeps its place."""
        free_s = max(passage.began_s, min(now_s, passage.sent_s))
        for ways, end in ((self._out_free_s, passage.source), (self._in_free_s, passage.target)):
            if ways[end] == passage.sent_s:
                ways[end] = free_s
