"""The planner as a whole, on small traffic."""

from __future__ import annotations

import shlex
from dataclasses import replace

import msgspec
import pytest

from expediter.assembly.simulation import SimulationConfig
from expediter.assembly.trace_generation import GenerationConfig
from expediter.cli.main import build_parser, main
from expediter.core.errors import ConfigurationError
from expediter.core.slo import Slo
from expediter.studies.planning.answer import Plan
from expediter.studies.planning.planner import PlanConfig, make_plan
from expediter.studies.planning.serve_command import serve_command
from expediter.studies.planning.setups import (
    DEFAULT_BUDGETS,
    DEFAULT_PREFILL_SHARES,
    DEFAULT_PRESETS,
    SearchSpace,
    Setup,
)
from expediter.studies.planning.trial import Trial, measure, measure_unless_lost
from expediter.studies.runs import TraceSpec
from expediter.studies.workers import Workers

QUESTION = PlanConfig(
    traffic=GenerationConfig(num_requests=40, rate_rps=12, input_mean=1200, output_mean=60),
    base=SimulationConfig(slo=Slo(ttft_s=0.6, tpot_s=0.04)),
    space=SearchSpace(
        gpus={"a100-80g": 2.7, "l40s": 2.2},
        tensor_parallel=(1, 2),
        pipeline_parallel=(1,),
        presets=("sarathi", "expediter"),
        budgets=(1024,),
        max_gpus=6,
    ),
    attainment=0.95,
    top=2,
    seeds=2,
)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(QUESTION, Workers(1))


def test_the_cheapest_is_what_trying_everything_finds(plan):
    passing = []
    for setup in QUESTION.space.setups(QUESTION.base.model):
        for size in range(1, QUESTION.space.max_gpus // setup.num_gpus(1) + 1):
            trial = Trial(
                config=setup.simulation(QUESTION.base, size),
                traffic=QUESTION.traffic,
                attainment=QUESTION.attainment,
            )
            first = measure_unless_lost(trial)
            if first is None:
                continue
            both = (first.attainment, measure(replace(trial, seed=1)).attainment)
            if both[0] >= QUESTION.attainment and sum(both) / 2 >= QUESTION.attainment:
                passing.append((setup.cost_per_hour(size), setup, size))
    costs = sorted(cost for cost, _, _ in passing)
    assert len(costs) > 5
    assert plan.choices[0].point.cost_per_hour == costs[0]
    assert all((c.point.cost_per_hour, c.point.setup, c.point.replicas) in passing for c in plan.choices)
    assert plan.is_complete


def test_a_choice_bears_what_it_says_and_breaks_as_it_says(plan):
    for choice in plan.choices:
        size, setup = choice.point.replicas, choice.point.setup
        assert choice.fails_at is not None
        for scale, meets in ((choice.bears, True), (choice.fails_at, False)):
            trial = Trial(
                config=setup.simulation(QUESTION.base, size),
                traffic=QUESTION.traffic,
                attainment=QUESTION.attainment,
                rate_scale=scale,
            )
            assert (measure(trial).attainment >= QUESTION.attainment) is meets
        assert choice.limit.target in {"ttft", "tpot"}
        assert choice.point.measured.attainment == choice.point.attainments[0]
        assert len(choice.point.attainments) == QUESTION.seeds
        assert min(choice.point.measured.slack.values()) >= 0


def test_the_frontier_gets_better_as_it_gets_dearer(plan):
    costs = [point.cost_per_hour for point in plan.frontier]
    shares = [point.measured.attainment for point in plan.frontier]
    assert costs == sorted(costs)
    assert shares == sorted(set(shares))


def test_the_same_question_has_the_same_answer_whatever_the_workers(plan):
    with Workers(2) as workers:
        again = make_plan(QUESTION, workers)
    assert again.to_json() == plan.to_json()


def test_serve_parses_every_command(plan):
    parser = build_parser()
    for choice in plan.choices:
        words = shlex.split(choice.command.line)
        assert words[0] == "expediter"
        args = parser.parse_args(words[1:])
        setup = choice.point.setup
        assert (args.replicas, args.preset, args.max_num_batched_tokens) == (
            choice.point.replicas,
            setup.preset,
            setup.max_num_batched_tokens,
        )


def test_a_trace_by_name_is_drawn_anew_by_seed():
    space = replace(QUESTION.space, gpus={"h100": 6.1}, presets=("expediter",))
    traffic = TraceSpec(limit=12, rate_scale=40)
    question = replace(QUESTION, traffic=traffic, space=space, attainment=0.5, top=1, seeds=3)
    (choice,) = make_plan(question, Workers(1)).choices
    assert len(choice.point.attainments) == 3


def test_targets_that_nothing_meets_are_said_to_be_impossible():
    question = replace(QUESTION, base=SimulationConfig(slo=Slo(tpot_s=0.001)))
    plan = make_plan(question, Workers(1))
    assert not plan.choices
    assert plan.nearest is None
    assert plan.num_simulations == 0
    assert {out.reason for out in plan.ruled_out} == {
        "TPOT on an idle replica is above its target, for 100.0% of the requests"
    }


def test_what_comes_nearest_is_named_with_the_reason():
    space = replace(QUESTION.space, max_gpus=1, gpus={"l40s": 2.2})
    question = replace(QUESTION, space=space, base=SimulationConfig(slo=Slo(ttft_s=0.5, tpot_s=0.04)))
    plan = make_plan(question, Workers(1))
    assert not plan.choices
    assert plan.nearest is not None
    point, limit = plan.nearest
    assert point.measured.attainment < QUESTION.attainment
    assert limit.cause != "none found"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"attainment": 1.5}, r"attainment must lie in \(0, 1\], not 1.5"),
        ({"top": 0}, "top must be at least 1"),
        ({"max_s": 0.0}, "the time to plan must be above 0 s"),
    ],
)
def test_wrong_numbers_are_refused(how, words):
    with pytest.raises(ConfigurationError, match=words):
        replace(QUESTION, **how)


SMALL = ["plan", "--rate", "4", "--requests", "40", "--workers", "1", "--tp", "1", "--pp", "1", "--preset", "sarathi"]


def test_the_command_prints_set_ups_commands_and_what_they_rest_on(capsys, tmp_path):
    file = tmp_path / "plan.json"
    code = main([*SMALL, "--gpu", "a100-80g=1.25", "--gpu", "h200", "--top", "1", "--seeds", "1", "--json", str(file)])
    said = capsys.readouterr().out
    assert code == 0
    assert "1.25" in said
    assert "expediter serve ./llama-3.1-8b --replicas 1 --preset sarathi" in said
    assert "rests on modelled step times" in said
    saved = msgspec.json.decode(file.read_bytes())
    assert saved["choices"][0]["point"]["cost_per_hour"] == 1.25


def test_the_page_holds_the_plan_and_loads_nothing(tmp_path):
    page = tmp_path / "plan.html"
    assert main([*SMALL, "--gpu", "a100-80g", "--gpu", "l40s", "--seeds", "2", "--html", str(page)]) == 0
    html = page.read_text()
    assert "expediter plan --rate 4 --requests 40" in html
    assert "--html plan.html" in html
    assert "What breaks first" in html
    assert "src=" not in html
    assert "href=" not in html


def test_replicas_for_prompts_alone_are_simulated_and_not_served(plan):
    setup = Setup(gpu="h100", price_per_hour=6.1, preset="distserve", prefill_share=0.5, decode_tensor_parallel=2)
    sizes = [(setup.num_prefill(size), setup.num_gpus(size)) for size in range(2, 6)]
    assert sizes == [(1, 3), (2, 4), (2, 6), (2, 8)]
    trial = Trial(config=setup.simulation(QUESTION.base, 2), traffic=QUESTION.traffic, attainment=0.9)
    measured = measure(trial)
    assert measured.network_share > 0
    command = serve_command(setup, 2, QUESTION.base)
    assert command.line is None
    assert "only simulated" in command.notes[0]


def test_the_flags_default_to_what_the_search_space_does():
    args = build_parser().parse_args(SMALL[:3])
    assert tuple(args.preset.split(",")) == DEFAULT_PRESETS
    assert tuple(map(int, args.max_num_batched_tokens.split(","))) == DEFAULT_BUDGETS
    assert tuple(map(float, args.prefill_share.split(","))) == DEFAULT_PREFILL_SHARES


def test_the_command_says_why_nothing_will_do(capsys):
    code = main([*SMALL, "--model", "llama-3.1-405b", "--gpu", "a10"])
    said = " ".join(capsys.readouterr().out.split())
    assert code == 1
    assert "Nothing that was tried meets the targets" in said
    assert "a10 tp1: llama-3.1-405b (811.7 GB of weights) does not fit 1 x a10" in said


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gpu", "a1000"], "no GPU 'a1000'; there are: a10, a100-80g"),
        (["--gpu", "a10=cheap"], "--gpu takes KIND or KIND=DOLLARS"),
        (["--trace", "demo"], "either --trace, or --rate"),
        (["--input-tokens", "many"], "--input-tokens takes MEAN or MEAN,CV"),
        (["--tp", "two"], "--tp takes whole numbers"),
        (["--json", "/nowhere/plan.json"], "cannot write '/nowhere/plan.json'"),
        (["--preset", "fastest"], "no preset 'fastest'; there are:"),
    ],
)
def test_flags_that_cannot_be_used(capsys, flags, words):
    assert main([*SMALL, *flags]) == 2
    assert words in capsys.readouterr().err
