"""Step-time models: a run of decodes equals its single steps to the last bit; more work never takes less time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expediter.core.errors import ConfigurationError
from expediter.core.plan import StepFeatures
from expediter.perfmodel.constants import Engine, constants, engine_named
from expediter.perfmodel.fitted import FittedModel, fit_step_times
from expediter.perfmodel.hardware import GPU_NAMES, gpu_named
from expediter.perfmodel.roofline import RooflineModel
from expediter.perfmodel.shapes import shape_named

GRAPH_ENGINES = sorted(name for name, engine in constants().engines.items() if not engine.decode_launch_s)


def rooflines_of(engines):
    return st.builds(
        lambda model, gpu, n, engine: RooflineModel(shape_named(model), gpu_named(gpu), n, engine=engine_named(engine)),
        st.sampled_from(["llama-3.1-8b", "llama-3.1-70b", "opt-13b"]),
        st.sampled_from(GPU_NAMES),
        st.sampled_from([1, 2, 4, 8]),
        st.sampled_from(engines),
    )


rooflines = rooflines_of(sorted(constants().engines))
coefficients = st.floats(0, 1e-2)
fitted = st.builds(
    FittedModel,
    fixed_s=coefficients,
    per_prefill_token_s=coefficients,
    per_decode_s=coefficients,
    per_context_token_s=coefficients,
    per_attention_s=coefficients,
    factors=st.dictionaries(st.integers(1, 2000).map(float), st.floats(0.1, 10), max_size=5).map(
        lambda factors: tuple(sorted(factors.items()))
    ),
)


def features(num_prefill=0, num_decodes=0, context=0, attention=0.0):
    return StepFeatures(num_prefill + num_decodes, num_decodes + (num_prefill > 0), num_decodes, context, attention)


@given(st.one_of(rooflines, fitted), st.integers(1, 1024), st.integers(1, 10_000_000), st.integers(1, 300))
def test_a_decode_run_equals_its_steps_bit_for_bit(model, num_decodes, context, num_steps):
    run = model.decode_run_s(features(num_decodes=num_decodes, context=context), num_steps)
    singles = [
        model.step_time_s(features(num_decodes=num_decodes, context=context + step * num_decodes))
        for step in range(num_steps)
    ]
    assert run.shape == (num_steps,)
    assert run.tolist() == singles


@given(
    rooflines_of(GRAPH_ENGINES), st.integers(1, 8192), st.integers(1, 512), st.integers(0, 10**7), st.floats(0, 1e10)
)
def test_more_work_takes_longer(model, num_prefill, num_decodes, context, attention):
    base = model.step_time_s(features(num_prefill, num_decodes, context, attention))
    assert 0 < base < float("inf")
    assert model.step_time_s(features(num_prefill + 512, num_decodes, context, attention)) > base
    assert model.step_time_s(features(num_prefill, num_decodes, context + 100_000, attention)) > base
    assert model.step_time_s(features(num_prefill, num_decodes, context, attention + 1e9)) > base


@given(rooflines, st.integers(0, 8192), st.integers(1, 512), st.integers(0, 10**7))
def test_more_work_never_takes_less_time(model, num_prefill, num_decodes, context):
    base = model.step_time_s(features(num_prefill, num_decodes, context))
    assert model.step_time_s(features(num_prefill + 1, num_decodes, context)) >= base
    assert model.step_time_s(features(num_prefill, num_decodes + 1, context)) >= base
    assert model.step_time_s(features(num_prefill, num_decodes, context + 1)) >= base


def test_small_batches_are_bound_by_memory_and_large_ones_by_compute():
    shape, gpu = shape_named("llama-3.1-8b"), gpu_named("a100-80g")
    model = RooflineModel(shape, gpu, engine=Engine())
    one, sixteen = (model.step_time_s(features(num_decodes=n)) for n in (1, 16))
    assert one < sixteen < 1.05 * one
    assert one > shape.weight_bytes / gpu.memory_bandwidth * 0.9
    long_prompt = model.step_time_s(features(num_prefill=8192))
    assert long_prompt > 2 * shape.num_dense_params * 8192 / gpu.flops


def test_more_gpus_are_faster_but_not_in_proportion():
    shape, gpu = shape_named("llama-3.1-70b"), gpu_named("h100")
    for load in (features(num_decodes=32, context=50_000), features(num_prefill=4096, attention=4096**2 / 2)):
        four, eight = (RooflineModel(shape, gpu, n).step_time_s(load) for n in (4, 8))
        assert four / 2 < eight < four


def test_a_node_has_so_many_gpus():
    with pytest.raises(ConfigurationError, match="16 GPUs"):
        RooflineModel(shape_named("llama-3.1-70b"), gpu_named("h100"), 16)


def test_an_h200_differs_from_an_h100_by_its_published_constants_only():
    h100, h200 = gpu_named("h100"), gpu_named("h200")
    assert h200.kernels == h100.kernels
    shape = shape_named("llama-3.1-70b")
    decode = features(num_decodes=64, context=64 * 4096)
    prefill = features(num_prefill=8192, attention=8192**2 / 2)
    for n in (2, 4, 8):
        old, new = RooflineModel(shape, h100, n), RooflineModel(shape, h200, n)
        assert 1 < old.step_time_s(decode) / new.step_time_s(decode) < h200.memory_bandwidth / h100.memory_bandwidth
        assert 1 <= old.step_time_s(prefill) / new.step_time_s(prefill) < 1.05


def test_a_launch_from_the_host_hides_behind_the_gpu_and_the_gpu_behind_it():
    shape, gpu = shape_named("llama-3.1-8b"), gpu_named("h100")
    bare = RooflineModel(shape, gpu, engine=Engine())
    launched = RooflineModel(shape, gpu, engine=Engine(decode_launch_s=0.03, prefill_launch_s=0.03))
    assert launched.step_time_s(features(num_decodes=1, context=1)) == pytest.approx(0.03, rel=0.01)
    long_prompt = features(num_prefill=65536)
    assert launched.step_time_s(long_prompt) == pytest.approx(bare.step_time_s(long_prompt), rel=0.01)


def test_fp8_weights_halve_the_reading_and_are_multiplied_in_bfloat16_where_there_is_no_fp8():
    half, whole = shape_named("llama-3.1-70b-fp8"), shape_named("llama-3.1-70b")
    decode = features(num_decodes=8, context=8192)
    prompt = features(num_prefill=8192)
    for gpu, computes_faster in (("h100", True), ("a100-80g", False)):
        quick, slow = (RooflineModel(shape, gpu_named(gpu), 4) for shape in (half, whole))
        assert 0.5 < quick.step_time_s(decode) / slow.step_time_s(decode) < 0.75
        assert (quick.step_time_s(prompt) < 0.95 * slow.step_time_s(prompt)) == computes_faster


def test_engines_and_sources_are_named():
    with pytest.raises(ConfigurationError, match="vllm"):
        engine_named("mystery")
    assert {source["licence"] for source in constants().sources} == {"Apache-2.0", "MIT"}
    assert all(source["commit"] and source["attribution"] for source in constants().sources)


@given(st.integers(0, 2**32 - 1))
def test_a_fit_finds_the_model_that_made_the_steps(seed):
    rng = np.random.default_rng(seed)
    true = FittedModel(
        fixed_s=0.01,
        per_prefill_token_s=1e-4,
        per_decode_s=3e-4,
        per_context_token_s=1e-6,
        per_attention_s=2e-8,
    )
    steps = []
    for _ in range(60):
        num_prefill = int(rng.integers(0, 2048)) * int(rng.integers(0, 2))
        num_decodes = int(rng.integers(1, 64))
        load = features(num_prefill, num_decodes, int(rng.integers(num_decodes, 100_000)), float(num_prefill**2))
        steps.append((load, true.step_time_s(load)))
    fit = fit_step_times(steps)
    for load, elapsed_s in steps:
        assert fit.step_time_s(load) == pytest.approx(elapsed_s, rel=1e-6)


def test_a_fit_follows_kernels_that_differ_by_the_number_of_tokens():
    """As measured with torch on CPU: three rows take longer than four."""
    measured = {1: 0.056, 2: 0.090, 3: 0.114, 4: 0.087, 8: 0.113, 16: 0.128, 64: 0.250, 256: 0.800}
    steps = [(features(num_decodes=n, context=100 * n), s) for n, s in measured.items() for _ in range(40)]
    fit = fit_step_times(steps)
    for n, seconds in measured.items():
        assert fit.step_time_s(features(num_decodes=n, context=100 * n)) == pytest.approx(seconds, rel=0.06)
    between = fit.step_time_s(features(num_decodes=32, context=3200))
    assert measured[16] < between < measured[64]


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 50), st.floats(1e-5, 10)), min_size=1, max_size=30))
def test_a_fit_never_has_negative_parts(rows):
    fit = fit_step_times([(features(p, d, d * 100, p * p / 2), elapsed_s) for p, d, elapsed_s in rows])
    parts = (fit.fixed_s, fit.per_prefill_token_s, fit.per_decode_s, fit.per_context_token_s, fit.per_attention_s)
    assert all(np.isfinite(part) and part >= 0 for part in parts)
    assert fit.step_time_s(features(num_decodes=1, context=1)) > 0


@pytest.mark.parametrize("steps", [[], [(features(num_decodes=1), 0.0)], [(features(num_decodes=1), float("nan"))]])
def test_steps_that_cannot_be_fitted(steps):
    with pytest.raises(ConfigurationError):
        fit_step_times(steps)
