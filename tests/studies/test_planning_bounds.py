"""Bounds are sound: what they rule out never meets its targets when it is simulated."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from expediter.assembly.simulation import SimulationConfig
from expediter.assembly.trace_generation import GenerationConfig
from expediter.core.slo import Slo
from expediter.sim.trace_generators import Independent, PrefixTree, Sessions
from expediter.studies.planning.bounds import Bound, Bounds
from expediter.studies.planning.demand import demand_of
from expediter.studies.planning.setups import SearchSpace, Setup
from expediter.studies.planning.trial import Trial, load_traffic, measure

SHAPES = (
    Independent(),
    PrefixTree(depth=2, branches=2, node_tokens=256),
    Sessions(turns_mean=3, pause_mean_s=1, system_tokens=64),
)
SPLIT = ("distserve", "mooncake", "splitwise")


def traffic(**how) -> GenerationConfig:
    return GenerationConfig(**{"num_requests": 40, "rate_rps": 8.0, "input_mean": 600, "output_mean": 40, **how})


def bound_of(setup: Setup, asked: GenerationConfig, base: SimulationConfig, attainment: float) -> Bound:
    return Bounds(base, demand_of(load_traffic(asked, 0), base.slo, base.slo_classes), attainment).of(setup)


def attained(setup: Setup, size: int, asked: GenerationConfig, base: SimulationConfig, attainment: float) -> float:
    return measure(Trial(config=setup.simulation(base, size), traffic=asked, attainment=attainment)).attainment


def check(setup: Setup, asked: GenerationConfig, base: SimulationConfig, attainment: float) -> str:
    """Simulate what the bounds rule out, and return which kind of bound it was."""
    bound = bound_of(setup, asked, base, attainment)
    if bound.reason is None:
        if bound.min_replicas > setup.least_size:
            assert attained(setup, bound.min_replicas - 1, asked, base, attainment) < attainment
            return "size"
        return ""
    if "fit" in bound.reason or "share evenly" in bound.reason:
        return "memory"
    for size in (setup.least_size, 40):  # as many replicas as requests: nobody waits for anybody
        share = attained(setup, size, asked, base, attainment)
        assert share < attainment
        assert share <= 1 - bound.impossible_share + 1e-9
    return bound.reason.partition(" ")[0]


@st.composite
def setups(draw) -> Setup:
    preset = draw(st.sampled_from(["sarathi", "sglang", "expediter", "vllm", "orca", *SPLIT]))
    tensor, pipeline = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]))
    is_split = preset in SPLIT or draw(st.booleans())
    return Setup(
        gpu=draw(st.sampled_from(["a100-80g", "h100", "l40s"])),
        price_per_hour=1.0,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        preset=preset,
        max_num_batched_tokens=draw(st.sampled_from([256, 2048])) if preset in {"sarathi", "sglang"} else None,
        prefill_share=draw(st.sampled_from([0.25, 0.5, 0.75])) if is_split else 0.0,
        decode_tensor_parallel=draw(st.sampled_from([1, 2])) if is_split else 0,
    )


@st.composite
def traffics(draw) -> GenerationConfig:
    input_mean, output_mean = draw(st.sampled_from([(300, 8), (1500, 40), (6000, 4)]))
    return traffic(
        shape=draw(st.sampled_from(SHAPES)),
        rate_rps=draw(st.sampled_from([2.0, 20.0, 200.0])),
        input_mean=input_mean,
        output_mean=output_mean,
        seed=draw(st.integers(0, 3)),
    )


@st.composite
def bases(draw) -> SimulationConfig:
    ttft_s, tpot_s = draw(st.sampled_from([0.05, 0.2, 1.0, None])), draw(st.sampled_from([0.012, 0.03, None]))
    return SimulationConfig(
        model=draw(st.sampled_from(["llama-3.1-8b", "mistral-7b"])),
        slo=Slo(ttft_s=ttft_s, tpot_s=tpot_s),
        engine=draw(st.sampled_from(["vllm", "eager-a100"])),
        max_model_len=40_000,
    )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(setup=setups(), asked=traffics(), base=bases(), attainment=st.sampled_from([0.5, 0.9, 1.0]))
def test_what_is_ruled_out_never_meets_its_targets(setup, asked, base, attainment):
    check(setup, asked, base, attainment)


@pytest.mark.parametrize(
    ("kind", "asked", "how", "slo"),
    [
        ("KV", traffic(input_mean=900), {"num_blocks": 40}, Slo(ttft_s=60)),
        ("the", traffic(input_mean=900), {"max_model_len": 512}, Slo(ttft_s=60)),
        ("TTFT", traffic(input_mean=4000), {}, Slo(ttft_s=0.2)),
        ("TPOT", traffic(), {}, Slo(tpot_s=0.005)),
        ("E2E", traffic(output_mean=100), {}, Slo(e2e_s=0.5)),
        ("size", traffic(rate_rps=100, input_mean=2000, output_mean=4), {}, Slo(ttft_s=1, tpot_s=0.1)),
        ("size", traffic(rate_rps=400, input_mean=64), {"max_num_seqs": 2}, Slo(ttft_s=1, tpot_s=0.02)),
    ],
)
def test_each_bound_rules_something_out(kind, asked, how, slo):
    setup = Setup(gpu="a100-80g", price_per_hour=1.0, preset="sarathi", max_num_batched_tokens=2048)
    assert check(setup, asked, SimulationConfig(slo=slo, **how), 0.9) == kind


def test_a_model_that_does_not_fit_is_ruled_out_with_the_reason():
    space = SearchSpace(gpus={"a10": 0.75}, tensor_parallel=(2,), pipeline_parallel=(1,))
    for setup in space.setups("llama-3.1-70b"):
        bound = bound_of(setup, traffic(), SimulationConfig(model="llama-3.1-70b"), 0.9)
        assert "does not fit 2 x a10" in (bound.reason or "")


def test_requests_that_may_miss_are_left_out():
    asked, base = traffic(input_mean=4000), SimulationConfig(slo=Slo(ttft_s=0.2))
    setup = Setup(gpu="a100-80g", price_per_hour=1.0, preset="sarathi")
    assert bound_of(setup, asked, base, 1.0).reason is not None
    assert bound_of(setup, asked, base, 0.01).reason is None
