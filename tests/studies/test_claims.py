"""Claims: verdicts, the capacity search, workloads as published, gaps between tokens, and the page of the last run."""

import json
import math
from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from expediter.assembly.presets import load_preset
from expediter.assembly.simulation import SimulationConfig, build_simulation
from expediter.cli.main import main
from expediter.core.errors import ConfigurationError
from expediter.core.events import Tokens
from expediter.core.plan import StepFeatures
from expediter.perfmodel.distserve import DistServeModel
from expediter.perfmodel.fitted import FittedModel
from expediter.scheduling.build import CacheConfig, build_scheduler, limits_with_budget
from expediter.sim.executor import SimulatedExecutor
from expediter.sim.trace import Trace
from expediter.studies.claims import mooncake, sglang, splitwise, workloads
from expediter.studies.claims.capacity import capacity
from expediter.studies.claims.driver import Arrival, drive
from expediter.studies.claims.frame import Conclusion, Figure, Verdict
from expediter.studies.claims.page import render
from expediter.studies.claims.registry import from_json
from expediter.studies.claims.token_gaps import GapRecorder

DOCS = Path(__file__).resolve().parents[2] / "docs"


def with_outputs(trace: Trace, num_output: int) -> Trace:
    """Return the trace with every output cut to `num_output` tokens at most."""
    return replace(trace, output_tokens=np.minimum(trace.output_tokens, num_output).astype(np.int32))


def with_inputs(trace: Trace, num_input: int) -> Trace:
    """Return the trace with every prompt `num_input` tokens long."""
    return replace(trace, input_tokens=np.full(len(trace), num_input, np.int32))


# -- verdicts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [(2.0, "agrees"), (1.51, "agrees"), (1.49, "differs"), (5.7, "agrees"), (5.8, "differs"), (math.inf, "differs")],
)
def test_a_factor_agrees_within_a_quarter_of_the_range(ours, verdict):
    assert Figure(what="", low=2.0, high=4.6, ours=ours, unit="x").verdict.value == verdict


def test_a_factor_must_lie_on_the_published_side_of_one():
    assert Figure(what="", low=1.1, high=1.1, ours=0.99, unit="x").verdict is Verdict.DIFFERS
    assert Figure(what="", low=1.1, high=1.1, ours=0.99, unit="").verdict is Verdict.AGREES
    assert Figure(what="", low=0.9, high=0.9, ours=1.01, unit="x").verdict is Verdict.DIFFERS


def test_a_bound_holds_on_its_side_alone():
    assert Figure(what="", high=40_000.0, ours=0.0, tolerance=0.0).verdict is Verdict.AGREES
    assert Figure(what="", high=40_000.0, ours=40_001.0, tolerance=0.0).verdict is Verdict.DIFFERS
    assert Figure(what="", low=5.0, ours=1e9, tolerance=0.0).verdict is Verdict.AGREES
    assert Figure(what="", low=5.0, ours=4.9, tolerance=0.0).verdict is Verdict.DIFFERS


def test_a_claim_agrees_when_every_figure_does():
    good, bad = (Figure(what="", low=1.0, high=1.0, ours=ours) for ours in (1.0, 2.0))
    assert Conclusion(figures=(good, good)).verdict is Verdict.AGREES
    assert Conclusion(figures=(good, bad)).verdict is Verdict.DIFFERS


# -- capacity ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0.02, 0.7, 3.7, 150.0])
def test_the_search_finds_a_known_limit_from_either_side(limit):
    found = capacity(lambda rate: rate <= limit, 2.0, resolution=0.01)
    assert limit / 1.01 <= found <= limit


def test_what_holds_nowhere_has_no_capacity_and_what_holds_everywhere_no_limit():
    assert capacity(lambda rate: False, 1.0) == 0.0
    with pytest.raises(ConfigurationError, match="limits nothing"):
        capacity(lambda rate: True, 1.0)
    with pytest.raises(ConfigurationError, match="above 0"):
        capacity(lambda rate: True, 0.0)


def test_the_capacity_of_a_queue_is_the_one_that_theory_gives():
    """One server, constant service: mean wait R D^2 / (2 (1 - R D)), so the rate for a mean TTFT of T is known."""
    service_s, limit_s = 0.1, 0.25
    wait_s = limit_s - service_s
    expected = 2 * wait_s / (service_s * (service_s + 2 * wait_s))
    model = FittedModel(
        fixed_s=service_s, per_prefill_token_s=0.0, per_decode_s=0.0, per_context_token_s=0.0, per_attention_s=0.0
    )
    config = SimulationConfig(
        preset="vllm", step_time=model, num_blocks=100, max_num_seqs=1, max_model_len=64, prefix_caching=False
    )
    trace = with_outputs(workloads.poisson_trace("queue", workloads.DISTSERVE_SHAREGPT, 1000), 1)
    trace = with_inputs(trace, 16)

    def meets(rate_rps):
        return build_simulation(config).run(workloads.at_rps(trace, rate_rps)).ttft_s.mean <= limit_s

    assert capacity(meets, 6.0, resolution=0.04) == pytest.approx(expected, rel=0.08)


# -- workloads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "inputs", "outputs"),
    [(workloads.SHAREGPT4, (1730, 5696), (415, 834)), (workloads.ARXIV, (7059, 12985), (208, 371))],
)
def test_lengths_have_the_published_quantiles(lengths, inputs, outputs):
    drawn = lengths(np.random.default_rng(0), 40_000)
    for tokens, (median, p90) in zip(drawn, (inputs, outputs), strict=True):
        assert np.median(tokens) == pytest.approx(median, rel=0.05)
        assert np.percentile(tokens, 90) == pytest.approx(p90, rel=0.05)
    assert (drawn[0] + drawn[1]).max() <= lengths.max_tokens


@pytest.mark.parametrize(
    ("lengths", "means"),
    [
        (workloads.DISTSERVE_SHAREGPT, (755.5, 200.3)),
        (workloads.AZURE_CODE, (2047.8, 27.9)),
        (workloads.AZURE_CONVERSATION, (1154.7, 211.1)),
    ],
)
def test_sampled_lengths_have_the_published_means(lengths, means):
    drawn = lengths(np.random.default_rng(0), 40_000)
    for tokens, mean in zip(drawn, means, strict=True):
        assert tokens.mean() == pytest.approx(mean, rel=0.13)


def test_arrivals_come_at_the_rate_asked_for():
    trace = workloads.at_rps(workloads.poisson_trace("t", workloads.AZURE_CODE, 2000), 4.0)
    gaps = np.diff(trace.arrival_s)
    assert gaps.mean() == pytest.approx(0.25)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.1)


# -- gaps between tokens ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("preset", "budget"), [("vllm", None), ("sarathi", 256)])
def test_recorded_gaps_are_those_of_the_tokens(preset, budget):
    """The same requests served step by step, every token looked at."""
    model = FittedModel(
        fixed_s=0.01, per_prefill_token_s=1e-4, per_decode_s=1e-4, per_context_token_s=1e-7, per_attention_s=1e-8
    )
    trace = workloads.at_rps(workloads.poisson_trace("t", workloads.AZURE_CONVERSATION, 80), 3.0)
    trace = with_outputs(trace, 60)
    recorder = GapRecorder()
    config = SimulationConfig(
        preset=preset,
        step_time=model,
        num_blocks=4000,
        max_model_len=8192,
        max_num_batched_tokens=budget,
        max_num_seqs=64,
        prefix_caching=False,
    )
    simulation = build_simulation(config)
    simulation.watch_steps(recorder.stepped)
    simulation.run(trace)

    chosen = load_preset(preset)
    limits = limits_with_budget(replace(chosen.scheduler, max_model_len=8192, max_num_seqs=64), chosen.policy, budget)
    scheduler = build_scheduler(
        config=limits, cache=CacheConfig(num_blocks=4000, prefix_caching=False), policy=chosen.policy
    )
    executor = SimulatedExecutor(num_blocks=4000, block_size=16, max_model_len=8192, max_num_seqs=64, step_time=model)
    last, gaps = {}, []
    arrivals = [Arrival(each.arrival_s, number, each) for number, each in enumerate(trace.requests())]
    for now_s, events in drive(scheduler, executor, arrivals):
        for event in events:
            if isinstance(event, Tokens):
                for state in event.states.tolist():
                    if state.request_id in last:
                        gaps.append(now_s - last[state.request_id])
                    last[state.request_id] = now_s
    assert len(gaps) > 1000
    for share in (0.5, 0.9, 0.99, 1.0):
        expected = np.quantile(gaps, share, method="inverted_cdf")
        assert recorder.quantile_s(share) == pytest.approx(expected, rel=1e-6)


def test_no_tokens_no_gap():
    assert GapRecorder().quantile_s(0.99) == 0.0


# -- DistServe's step times -------------------------------------------------------------------------------------------


def test_distserves_steps_take_what_its_coefficients_say():
    model = DistServeModel("opt-13b", 2)
    lengths = [500, 900]
    features = StepFeatures(sum(lengths), 2, 0, 0, sum(n * n / 2 for n in lengths))
    expected_ms = 14.742973695171262 + 0.06857720739764 * 1400 + 2.4495727400243586e-06 * (500**2 + 900**2) + 1
    assert model.step_time_s(features) == pytest.approx(expected_ms / 1e3)
    few, many = StepFeatures(10, 10, 10, 5000, 0.0), StepFeatures(95, 95, 95, 5000, 0.0)
    assert model.step_time_s(few) == pytest.approx(
        (13.294796350285385 + 0.00034109219700723494 * 5000 + 0.6296393) / 1e3
    )
    assert model.step_time_s(many) == pytest.approx((10.638741913 + 0.00031183369638 * 5000 + 0.08562913604 * 95) / 1e3)


def test_distserves_runs_of_decodes_equal_single_steps():
    model = DistServeModel("opt-13b", 1)
    features = StepFeatures(20, 20, 20, 9000, 0.0)
    single = [model.step_time_s(features._replace(decode_context_tokens=9000 + 20 * step)) for step in range(50)]
    assert model.decode_run_s(features, 50).tolist() == single


def test_a_mixed_step_takes_longer_than_either_part_and_less_than_both():
    model = DistServeModel("opt-13b", 1)
    prompts = StepFeatures(512, 1, 0, 0, 512**2 / 2)
    decodes = StepFeatures(16, 16, 16, 8000, 0.0)
    both = StepFeatures(528, 17, 16, 8000, 512**2 / 2)
    parts = model.step_time_s(prompts), model.step_time_s(decodes)
    assert max(parts) < model.step_time_s(both) < sum(parts)


def test_unknown_coefficients_are_listed():
    with pytest.raises(ConfigurationError, match="distserve opt-13b x 1"):
        DistServeModel("opt-13b", 3)


# -- shared prefixes --------------------------------------------------------------------------------------------------


def test_the_clients_of_a_program_wait_for_answers_and_repeat_them():
    program = sglang.Program(groups=2, chains=3, shared=32, turns=2, own=(16, 16), output=(8, 8))
    clients = sglang.ClosedLoop(program, scale=1.0, num_clients=2)
    assert len(clients.arrivals) == 2
    first = clients.arrivals.pop(0).request
    clients.ended(first.request_id, [7] * 8, 1.0)
    second = clients.arrivals[-1].request
    assert second.arrival_s == 1.0
    assert second.prompt[:48].tolist() == first.prompt.tolist()
    assert second.prompt[48:56].tolist() == [7] * 8
    assert second.num_prompt_tokens == 48 + 8 + 16


def test_what_an_unlimited_cache_would_reuse_is_the_most_that_is_reused():
    program = sglang.Program(groups=1, chains=80, shared=256, turns=3, own=(32, 64), output=(4, 8))
    measured = sglang.measure(program, sglang.SYSTEMS["sglang"], 1.0)
    assert 0.8 * measured["optimal"] < measured["hit_rate"] <= measured["optimal"]
    without = sglang.measure(program, sglang.SYSTEMS["sarathi, no cache"], 1.0)
    assert without["hit_rate"] == 0.0
    assert without["seconds"] > measured["seconds"]


# -- clusters ---------------------------------------------------------------------------------------------------------


def test_a_request_alone_is_not_slowed_down():
    idle, slowdowns = splitwise.IdleMachine(), []
    simulation = build_simulation(splitwise.together("a100-80g", "orca", None))
    simulation.metrics.on_end.append(lambda record: slowdowns.append(idle.slowdowns(record)))
    simulation.run(workloads.poisson_trace("alone", workloads.AZURE_CONVERSATION, 5).at_rate(0.001))
    assert np.array(slowdowns) == pytest.approx(1.0, rel=0.02)


def test_whoever_does_not_finish_counts_against_the_targets():
    tiny = replace(splitwise.together("a100-80g", "orca", None), num_blocks=8)
    assert not splitwise.meets_targets(tiny, workloads.AZURE_CONVERSATION, 5, 0.01)


def test_every_request_is_refused_late_or_in_time():
    with resources.as_file(resources.files("expediter.assembly") / "data") as folder:
        measured = mooncake.measure(
            mooncake.mooncake("early", 1, 1), folder / "mooncake_conversation_slice.jsonl", 40, 0.1
        )
    assert measured["refused"] + measured["in_time"] + measured["late"] == pytest.approx(40)
    assert measured["in_time"] > 0


# -- the command and the page -----------------------------------------------------------------------------------------


def test_the_command_runs_a_claim_and_says_what_came_out(tmp_path, capsys):
    file = tmp_path / "claims.json"
    assert main(["claims", "--quick", "--only", "vtc", "--workers", "2", "--json", str(file)]) == 0
    content = json.loads(file.read_text())
    assert [claim["name"] for claim in content["claims"]] == ["vtc"]
    bound = content["claims"][0]["figures"][1]
    assert bound["ours"] <= bound["high"]
    assert bound["verdict"] == "agrees"
    shown = capsys.readouterr().out
    assert "published" in shown
    assert "40,000" in shown


def test_a_claim_without_its_trace_is_refused_by_name(tmp_path, capsys):
    assert main(["claims", "--only", "mooncake", "--data", str(tmp_path)]) == 2
    assert "claim mooncake needs mooncake_fast25_conversation_trace.jsonl.gz" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--only", "none"], "there are: distserve, splitwise, mooncake, sarathi"),
        (["--quick", "--page", "x.md"], "--page needs a full run"),
    ],
)
def test_wrong_flags_are_explained(flags, message, capsys):
    assert main(["claims", *flags]) == 2
    assert message in capsys.readouterr().err


def test_the_page_is_that_of_the_last_run():
    results = from_json((DOCS / "claims.json").read_bytes())
    assert (DOCS / "claims.md").read_text() == render(results)


def test_results_of_a_quick_run_make_no_page():
    with pytest.raises(ConfigurationError, match="quick"):
        from_json(b'{"quick": true, "claims": []}')
    with pytest.raises(ConfigurationError, match="not the results"):
        from_json(b"{}")
