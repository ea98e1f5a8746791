"""Timelines and curves: what they sum up to, with and without jumps."""

from __future__ import annotations

import json

import pytest

from expediter.assembly.simulation import SimulationConfig, build_simulation, prepare_trace, simulate
from expediter.cli.main import main
from expediter.sim.distribution import Sample
from expediter.sim.observer import ReplicaLoad
from expediter.sim.report import CURVE_PERCENTS, Curve
from expediter.sim.timeline import MAX_BUCKETS, TimelineRecorder


def lengths_s(timeline, end_s: float) -> list[float]:
    num_buckets = len(timeline.num_waiting)
    starts = [timeline.start_s + n * timeline.bucket_s for n in range(num_buckets)]
    return [min(timeline.bucket_s, end_s - start_s) for start_s in starts]


@pytest.fixture(scope="module")
def run():
    simulation = build_simulation(SimulationConfig(timeline=True, replicas=2, num_blocks=8000))
    trace = prepare_trace("demo", rate_scale=60)
    records = []
    simulation.metrics.on_end.append(records.append)
    return simulation, simulation.run(trace), records


def test_sums_are_those_of_the_requests(run):
    simulation, report, records = run
    timeline = report.timeline
    assert report.num_preemptions == 0
    spans = lengths_s(timeline, simulation.metrics.last_event_s)

    def total(values) -> float:
        return sum(value * span for value, span in zip(values, spans, strict=True))

    assert sum(report.missed.values()) == sum(not r.is_met for r in records) != 0
    served = [r for r in records if r.ended_s is not None and r.first_scheduled_s is not None]
    assert total(timeline.arrived_rps) == pytest.approx(len(records))
    assert total(timeline.goodput_rps) == pytest.approx(sum(r.is_met for r in records)) != 0
    assert total(timeline.num_waiting) == pytest.approx(sum(r.queueing_s for r in served))
    assert total(timeline.num_running) == pytest.approx(sum(r.ended_s - r.first_scheduled_s for r in served))
    assert 0 < max(timeline.kv_used_share_highest) <= 1
    for used, cached, highest in zip(
        timeline.kv_used_share, timeline.kv_cached_share, timeline.kv_used_share_highest, strict=True
    ):
        assert 0 <= used <= highest
        assert used + cached <= 1 + 1e-9
    assert sum(spans) == pytest.approx(report.simulated_s)


def test_a_timeline_changes_nothing_and_jumps_hardly_change_it(run):
    _, report, _ = run
    kwargs = {"rate_scale": 60, "replicas": 2, "num_blocks": 8000}
    plain = simulate("demo", **kwargs)
    assert plain.timeline is None
    assert plain.curves is None
    assert plain.ttft_s == report.ttft_s
    stepped = simulate("demo", timeline=True, jumps=False, **kwargs).timeline
    for name in ("num_waiting", "num_running", "arrived_rps", "goodput_rps"):
        assert getattr(report.timeline, name) == pytest.approx(getattr(stepped, name))
    # Less than a block per running request, of 16,000 blocks.
    assert report.timeline.kv_used_share == pytest.approx(stepped.kv_used_share, abs=max(stepped.num_running) / 16000)


def test_memory_is_bounded_and_values_survive_coarsening():
    recorder = TimelineRecorder({0: 10})
    recorder.sample(0, 0.0, ReplicaLoad(1, 0, 0, 4))
    for second in range(1, 100_001):
        recorder.sample(0, float(second), ReplicaLoad(1, 0, 10 * second // 100_000, 4))
    timeline = recorder.finish(100_000.0)
    assert MAX_BUCKETS / 2 <= len(timeline.num_waiting) <= MAX_BUCKETS
    assert timeline.num_waiting == pytest.approx([1.0] * len(timeline.num_waiting))
    assert timeline.kv_cached_share == pytest.approx([0.4] * len(timeline.num_waiting))
    middle = len(timeline.kv_used_share) // 2
    assert timeline.kv_used_share[middle] == pytest.approx((middle + 0.5) * timeline.bucket_s / 100_000, abs=0.1)


def test_growth_between_samples_is_a_straight_line():
    recorder = TimelineRecorder({0: 100})
    recorder.sample(0, 10.0, ReplicaLoad(0, 1, 0, 0))
    recorder.sample(0, 12.0, ReplicaLoad(0, 1, 100, 0))
    timeline = recorder.finish(12.0)
    assert timeline.start_s == 10.0
    n = len(timeline.kv_used_share)
    assert timeline.kv_used_share == pytest.approx([(i + 0.5) / n for i in range(n)])
    assert timeline.prefix_hit_rate == (None,) * n


def test_nothing_arrived():
    assert TimelineRecorder({0: 1}).finish(0.0) is None


def test_curves_end_at_the_share_of_requests_that_have_a_value():
    sample = Sample()
    assert Curve.of(sample, 4) == Curve(share_of_arrived=0.0, percentiles=())
    sample.add(3.0)
    sample.add(1.0)
    curve = Curve.of(sample, 4)
    assert curve.share_of_arrived == 0.5
    assert curve.percentiles[0] == 1.0
    assert curve.percentiles[-1] == 3.0
    assert len(curve.percentiles) == len(CURVE_PERCENTS)


def test_the_command_writes_it(capsys):
    words = ["simulate", "--trace", "demo", "--limit", "8", "--rate-scale", "50", "--json", "-"]
    assert main([*words, "--timeline"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert len(written["timeline"]["num_waiting"]) == len(written["timeline"]["kv_used_share"]) > 1
    assert len(written["curves"]["ttft_s"]["percentiles"]) == len(CURVE_PERCENTS)
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["timeline"] is None
