"""What has ended is told later, in order, once, and before anybody reads what was counted."""

from __future__ import annotations

from exchange_records import answered
from prometheus_client import CollectorRegistry

from expediter.telemetry.exchanges import ExchangeRecord
from expediter.telemetry.gateway_metrics import GatewayMetrics
from expediter.telemetry.late_records import LateRecords


class Heard:
    def __init__(self) -> None:
        self.ids: list[str] = []

    def record(self, record: ExchangeRecord) -> None:
        self.ids.append(record.request_id)


def test_every_sink_hears_of_each_once_and_in_order() -> None:
    one, other = Heard(), Heard()
    records = LateRecords([one, other])
    for names in (["a", "b"], [], ["c"]):
        for name in names:
            records.record(answered(request_id=name))
        records.settle()
    assert one.ids == other.ids == ["a", "b", "c"]


def test_who_reads_the_metrics_reads_what_has_ended() -> None:
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    records = LateRecords([metrics])
    metrics.before_reading = records.settle
    records.record(answered())
    labels = {"model_name": "m", "tenant": "alice"}
    samples = [sample for family in registry.collect() for sample in family.samples]
    named = [each for each in samples if each.name == "expediter:gateway_requests_total"]
    assert [each.value for each in named if each.labels.items() >= labels.items()] == [1.0]
