"""Metrics as text for Prometheus: all of them, or those that a tenant may see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST


def render(registry: CollectorRegistry, tenant: str | None = None) -> bytes:
    """Return the exposition, content type `CONTENT_TYPE`.

    Args:
        tenant: leave out what is counted for other tenants; None for everything.
    """
    if tenant is None:
        return generate_latest(registry)
    shown = CollectorRegistry()
    shown.register(_Of(registry, tenant))
    return generate_latest(shown)


class _Of(Collector):
    """A registry's metrics without the samples of other tenants."""

    def __init__(self, registry: CollectorRegistry, tenant: str) -> None:
        self._registry = registry
        self._tenant = tenant

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            shown = Metric(metric.name, metric.documentation, metric.type)
            shown.samples = [s for s in metric.samples if s.labels.get("tenant", self._tenant) == self._tenant]
            yield shown
