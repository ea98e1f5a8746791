"""Classes, tenants, decisions and explanations of a simulation."""

import pytest
from sim_builders import ConstantTime, make_trace, write_jsonl

from expediter.assembly.simulation import SimulationConfig, build_simulation, prepare_trace, simulate
from expediter.core.errors import ConfigurationError
from expediter.core.explanation import Reason
from expediter.core.slo import NO_SLO, Slo, SloClass
from expediter.sim.trace_readers import read_trace

CLASSES = {"fast": SloClass(ttft_s=0.5, value=3.0, refuse_late=True), "slow": SloClass(e2e_s=60.0)}
SMALL = {"num_blocks": 64, "block_size": 4, "max_model_len": 200, "step_time": ConstantTime(0.25)}
ROW = {"arrival_s": 0.0, "input_tokens": 9, "output_tokens": 3}


def test_targets_and_classes_are_columns_of_a_trace(tmp_path):
    rows = [
        ROW | {"slo_class": "fast", "tpot_s": 0.25},
        ROW | {"arrival_s": 2, "ttft_s": 1, "e2e_s": 5},
        ROW | {"arrival_s": 1, "tenant": "t"},
    ]
    trace = read_trace(write_jsonl(tmp_path / "t.jsonl", rows))
    first, second, third = trace.requests()
    assert (first.slo_class, first.slo) == ("fast", Slo(tpot_s=0.25))
    assert (second.slo_class, second.slo, second.tenant) == ("", NO_SLO, "t"), "sorted by arrival with the rest"
    assert third.slo == Slo(ttft_s=1.0, e2e_s=5.0)
    assert [request.slo_class for request in trace.take(2).requests()] == ["fast", ""]
    plain = read_trace(write_jsonl(tmp_path / "p.jsonl", [ROW]))
    assert plain.slos is plain.slo_classes is None


@pytest.mark.parametrize("wrong", [{"ttft_s": 0}, {"tpot_s": -1}, {"e2e_s": "1"}, {"slo_class": 3}, {"ttft": 1}])
def test_wrong_targets_are_named_by_line(tmp_path, wrong):
    path = write_jsonl(tmp_path / "t.jsonl", [ROW, ROW | wrong])
    with pytest.raises(ConfigurationError, match=r"t\.jsonl:2: .*" + next(iter(wrong))):
        read_trace(path, strict=True)


def test_scheduler_and_report_know_the_class():
    trace = make_trace(
        [(0.0, 9, 3), (0.0, 9, 3), (0.0, 9, 3)], slo_classes=("fast", "slow", ""), tenants=("a", "a", "b")
    )
    simulation = build_simulation(SimulationConfig(slo_classes=CLASSES, **SMALL))
    records = []
    simulation.metrics.on_end.append(records.append)
    report = simulation.run(trace)
    records.sort(key=lambda record: record.request_id)
    slos = [(record.slo_class, record.slo, record.value, record.tenant) for record in records]
    assert slos == [
        ("fast", Slo(ttft_s=0.5), 3.0, "a"),
        ("slow", Slo(e2e_s=60.0), 1.0, "a"),
        ("", Slo(ttft_s=2.0, tpot_s=0.1), 1.0, "b"),
    ]
    assert list(report.classes) == ["", "fast", "slow"]
    assert {name: group.arrived for name, group in report.tenants.items()} == {"a": 2, "b": 1}
    assert report.classes["fast"].slo_attainment == report.tenants["a"].slo_attainment == 1.0
    assert report.classes[""].slo_attainment == 0.0, "a step takes longer than its TPOT"
    assert report.weighted_attainment == pytest.approx(4 / 5)
    assert sum(group.goodput_rps for group in report.classes.values()) == pytest.approx(report.goodput_rps)


def test_without_names_there_are_no_groups():
    report = simulate(make_trace([(0.0, 9, 3)]), **SMALL)
    assert report.classes == report.tenants == {}


def test_a_class_that_is_not_configured():
    trace = make_trace([(0.0, 9, 3)], slo_classes=("gold",))
    with pytest.raises(ConfigurationError, match="no SLO class 'gold'; there are: fast, slow"):
        simulate(trace, slo_classes=CLASSES, **SMALL)
    with pytest.raises(ConfigurationError, match="none are configured"):
        simulate(trace, **SMALL)
    with pytest.raises(ConfigurationError, match="gold"):
        simulate(trace.requests(), slo_classes=CLASSES, **SMALL)


def test_a_class_may_be_a_mere_name_where_the_trace_has_targets(tmp_path):
    path = write_jsonl(tmp_path / "t.jsonl", [ROW | {"slo_class": "gold", "ttft_s": 3}])
    assert simulate(path, **SMALL).classes["gold"].slo_attainment == 1.0


def test_who_asked_is_refused_and_counted_as_missed():
    rows = [(0.0, 9, 40), (0.1, 9, 3), (0.1, 9, 3)]
    trace = make_trace(rows, slo_classes=("slow", "fast", "fast"))
    simulation = build_simulation(SimulationConfig(slo_classes=CLASSES, ordering="slo", max_num_seqs=1, **SMALL))
    report = simulation.run(trace, explain=["r0000001", "r0000000", "nobody"])
    assert (report.requests.finished, report.requests.rejected) == (1, 2)
    assert report.classes["fast"].slo_attainment == 0.0
    assert set(simulation.explanations) == {"r0000000", "r0000001"}
    spans = simulation.explanations["r0000001"]
    assert spans[0].from_s == 0.1
    assert spans[-1].reason is Reason.REJECTED
    assert 0.5 < spans[-1].from_s < 2, "soon after its target is out of reach"


def test_decisions_are_counted():
    rows = [(0.0, 30, 30), (0.0, 30, 30), (0.0, 60, 4)]
    config = SMALL | {"num_blocks": 26, "max_num_batched_tokens": 40, "max_num_seqs": 2}
    simulation = build_simulation(SimulationConfig(**config))
    records = []
    simulation.metrics.on_end.append(records.append)
    report = simulation.run(make_trace(rows))
    decisions = report.decisions
    assert sum(decisions.preemptions.values()) == report.num_preemptions > 0
    assert set(decisions.preemptions) == {"growth"}
    first_wait_s = sum(record.queueing_s for record in records)
    assert sum(decisions.held_s.values()) >= first_wait_s, "waiting after preemptions comes on top"
    assert decisions.held_s["no_slot"] > 0
    assert 0 < decisions.budget_used_share <= 1
    assert decisions.step_time_error is None, "first come, first served needs no step times"


def test_predicted_and_actual_step_times():
    report = simulate(make_trace([(0.0, 9, 30), (1.0, 50, 9)]), ordering="slo", **SMALL)
    decisions = report.decisions
    assert decisions.step_time_actual_s == pytest.approx(0.25 * report.num_steps)
    assert decisions.step_time_predicted_s == pytest.approx(decisions.step_time_actual_s)
    assert decisions.step_time_error == pytest.approx(0.0, abs=1e-9), "it starts from the simulation's own model"


def test_explained_with_jumps_as_without():
    rows = [(i / 4, 5 + i, 12) for i in range(8)]
    told = []
    for jumps in (True, False):
        simulation = build_simulation(SimulationConfig(max_num_seqs=2, jumps=jumps, **SMALL))
        simulation.run(make_trace(rows), explain=[f"r{i:07d}" for i in range(8)])
        told.append(dict(simulation.explanations))
    assert told[0] == told[1]
    assert len(told[0]) == 8


def test_the_report_says_where_the_trace_comes_from(tmp_path):
    path = write_jsonl(tmp_path / "t.jsonl", [ROW, ROW | {"arrival_s": 4}, ROW | {"arrival_s": 8}])
    trace = prepare_trace(path, rate_scale=2.0, limit=2, seed=7)
    summary = simulate(trace, rate_scale=2.0, **SMALL).trace
    assert (summary.seed, summary.rate_scale, summary.limit) == (7, 4.0, 2)
    assert summary.span_s == 1.0
    untouched = simulate(path, **SMALL).trace
    assert (untouched.seed, untouched.rate_scale, untouched.limit) == (0, 1.0, None)
