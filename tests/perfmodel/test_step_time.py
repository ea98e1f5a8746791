"""Step-time models: a run of decodes equals its single steps to the last bit; more work never takes less time."""

import csv
import gzip
import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expediter.core.errors import ConfigurationError
from expediter.core.plan import StepFeatures
from expediter.perfmodel.fitted import FittedModel, fit_step_times
from expediter.perfmodel.hardware import GPU_NAMES, gpu_named
from expediter.perfmodel.roofline import RooflineModel
from expediter.perfmodel.shapes import shape_named

DATA = Path(__file__).parents[3] / "shared" / "data" / "perf"
NO_DATA = "needs the measured latencies, which are not part of this repository"
MEASURED = DATA / "splitwise_medians.csv"

rooflines = st.builds(
    lambda model, gpu, n: RooflineModel(shape_named(model), gpu_named(gpu), n),
    st.sampled_from(["llama-3.1-8b", "llama-3.1-70b", "opt-13b"]),
    st.sampled_from(GPU_NAMES),
    st.sampled_from([1, 2, 4, 8]),
)
coefficients = st.floats(0, 1e-2)
fitted = st.builds(
    FittedModel,
    fixed_s=coefficients,
    per_prefill_token_s=coefficients,
    per_decode_s=coefficients,
    per_context_token_s=coefficients,
    per_attention_s=coefficients,
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


@given(rooflines, st.integers(0, 8192), st.integers(1, 512), st.integers(0, 10**7), st.floats(0, 1e10))
def test_more_work_takes_longer(model, num_prefill, num_decodes, context, attention):
    base = model.step_time_s(features(num_prefill, num_decodes, context, attention))
    assert 0 < base < float("inf")
    assert model.step_time_s(features(num_prefill + 512, num_decodes, context, attention)) > base
    assert model.step_time_s(features(num_prefill, num_decodes, context + 100_000, attention)) > base
    assert model.step_time_s(features(num_prefill, num_decodes, context, attention + 1e9)) > base


def test_small_batches_are_bound_by_memory_and_large_ones_by_compute():
    shape, gpu = shape_named("llama-3.1-8b"), gpu_named("a100-80g")
    model = RooflineModel(shape, gpu, overhead_s=0.0)
    one, sixteen = (model.step_time_s(features(num_decodes=n)) for n in (1, 16))
    assert sixteen < 1.05 * one
    assert one > shape.weight_bytes / gpu.memory_bandwidth * 0.9
    long_prompt = model.step_time_s(features(num_prefill=8192))
    assert long_prompt > 2 * shape.num_layer_params * 8192 / gpu.flops


def test_more_gpus_are_faster_but_not_in_proportion():
    shape, gpu = shape_named("llama-3.1-70b"), gpu_named("h100")
    for load in (features(num_decodes=32, context=50_000), features(num_prefill=4096, attention=4096**2 / 2)):
        four, eight = (RooflineModel(shape, gpu, n).step_time_s(load) for n in (4, 8))
        assert four / 2 < eight < four


def test_a_node_has_so_many_gpus():
    with pytest.raises(ConfigurationError, match="16 GPUs"):
        RooflineModel(shape_named("llama-3.1-70b"), gpu_named("h100"), 16)


def measured(hardware, tensor_parallel):
    """Rows of llama2-70b whose prompts fit 8,192 tokens; longer ones are irregular (see the data's own notes)."""
    with MEASURED.open() as file:
        for row in csv.DictReader(file):
            prompt, batch = int(row["prompt_tokens"]), int(row["batch_size"])
            names = (row["model"], row["hardware"], row["tensor_parallel"])
            if names == ("llama2-70b", hardware, str(tensor_parallel)) and prompt * batch <= 8192:
                yield prompt, batch, float(row["prefill_ms"]) / 1e3, float(row["decode_ms_per_token"]) / 1e3


@pytest.mark.skipif(not MEASURED.exists(), reason=NO_DATA)
@pytest.mark.parametrize("tensor_parallel", [4, 8])
@pytest.mark.parametrize(("hardware", "gpu"), [("a100-80gb", "a100-80g"), ("h100-80gb", "h100")])
def test_against_published_latencies(hardware, gpu, tensor_parallel):
    """The published runs (SplitwiseSim, MIT) predate CUDA graphs: more GPUs hardly shorten their decodes.

    With an overhead of 25 ms in place of today's 2 ms the model meets them within these medians. What is checked is the
    part that depends on hardware and load, not the overhead of that software.
    """
    model = RooflineModel(shape_named("llama-2-70b"), gpu_named(gpu), tensor_parallel, overhead_s=0.025)
    prefill, decode = [], []
    for prompt, batch, prefill_s, decode_s in measured(hardware, tensor_parallel):
        predicted_s = model.step_time_s(StepFeatures(prompt * batch, batch, 0, 0, batch * prompt**2 / 2))
        prefill.append(abs(predicted_s / prefill_s - 1))
        decode.append(abs(model.step_time_s(features(num_decodes=batch, context=batch * prompt)) / decode_s - 1))
    assert statistics.median(prefill) < 0.25
    assert statistics.median(decode) < 0.45


@pytest.mark.skipif(not DATA.exists(), reason=NO_DATA)
@pytest.mark.parametrize(
    ("model", "backend", "shape"), [("Llama-3.1-8B", "trtllm", "llama-3.1-8b"), ("Qwen3-32B", "vllm", "qwen3-32b")]
)
def test_against_published_serving_latencies(model, backend, shape):
    """Time per output token of whole engines under load (AIConfigurator, Apache-2.0), H100, no quantization stated.

    In the steady state of `concurrency` requests each step decodes all of them and prefills input / output tokens for
    each, which is what is predicted here.
    """
    errors = []
    with gzip.open(DATA / "silicon_h100.csv.gz", "rt") as file:
        for row in csv.DictReader(file):
            is_plain = row["mode"] == "agg" and {row["pp_size"], row["attention_dp_size"]} <= {"", "1.0"}
            if not is_plain or model not in row["model_path"] or row["backend"] != backend or row["gemm_quant_mode"]:
                continue
            batch, num_input, num_output = (int(float(row[name])) for name in ("batch_size", "isl", "osl"))
            chunk = batch * num_input / num_output
            load = StepFeatures(
                num_tokens=round(batch + chunk),
                num_seqs=batch + 1,
                num_decodes=batch,
                decode_context_tokens=batch * (num_input + num_output // 2),
                prefill_attention=chunk * num_input / 2,
            )
            gpus = int(float(row["tp_size"]))
            predicted_s = RooflineModel(shape_named(shape), gpu_named("h100"), gpus).step_time_s(load)
            errors.append(abs(predicted_s / (float(row["silicon_tpot_ms"]) / 1e3) - 1))
    assert len(errors) > 80
    assert statistics.median(errors) < 0.15


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
