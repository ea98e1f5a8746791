"""Experts, latent vectors, windows, stages: what they must cost by their sizes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expediter.core.errors import ConfigurationError
from expediter.core.plan import StepFeatures
from expediter.perfmodel.constants import Engine
from expediter.perfmodel.dimensions import ModelShape
from expediter.perfmodel.hardware import gpu_named
from expediter.perfmodel.parallelism import Parallelism
from expediter.perfmodel.roofline import RooflineModel
from expediter.perfmodel.shapes import shape_named

BARE = Engine()


def decode(batch, context):
    return StepFeatures(batch, batch, batch, batch * context, 0.0)


def prefill(tokens, prompts=1):
    return StepFeatures(tokens * prompts, prompts, 0, 0, prompts * tokens**2 / 2)


def seconds(model, step, *split, gpu="h100"):
    return RooflineModel(shape_named(model), gpu_named(gpu), *split, engine=BARE).step_time_s(step)


models = st.sampled_from(
    [
        ("qwen3-235b-a22b-fp8", (4, 1, 4)),
        ("mixtral-8x7b", (2, 2, 1)),
        ("gpt-oss-120b", (2, 1, 1)),
        ("gemma-3-27b", (2, 2, 1)),
        ("mistral-7b", (1, 1, 1)),
        ("deepseek-v3", (1, 1, 16)),
        ("deepseek-v3", (8, 3, 8)),
        ("llama-3.1-70b", (4, 4, 1)),
    ]
)


@given(models, st.integers(1, 1024), st.integers(1, 10_000_000), st.integers(1, 100))
def test_a_decode_run_equals_its_steps_bit_for_bit(which, batch, context, num_steps):
    name, split = which
    model = RooflineModel(shape_named(name), gpu_named("h100"), *split)
    run = model.decode_run_s(StepFeatures(batch, batch, batch, context, 0.0), num_steps)
    singles = [
        model.step_time_s(StepFeatures(batch, batch, batch, context + step * batch, 0.0)) for step in range(num_steps)
    ]
    assert run.tolist() == singles


@given(models, st.integers(0, 8192), st.integers(1, 512), st.integers(0, 10**7), st.floats(0, 1e9))
def test_more_work_takes_no_less_time(which, num_prefill, num_decodes, context, attention):
    name, split = which
    model = RooflineModel(shape_named(name), gpu_named("h100"), *split, engine=BARE)

    def taken(prefill_tokens, context_tokens, squares):
        num_seqs = num_decodes + (num_prefill > 0)
        return model.step_time_s(
            StepFeatures(prefill_tokens + num_decodes, num_seqs, num_decodes, context_tokens, squares)
        )

    base = taken(num_prefill, context, attention)
    assert np.isfinite(base)
    assert base > 0
    slack = 1 - 1e-12  # sums of many parts round
    assert taken(num_prefill, context + 1000, attention) >= base * slack
    if num_prefill:
        assert taken(num_prefill + 1, context, attention) >= base * slack
        assert taken(num_prefill, context, attention + 1e6) >= base * slack


def test_a_few_tokens_read_few_experts_and_many_read_all():
    gpu, shape = gpu_named("h100"), shape_named("qwen3-235b-a22b-fp8")
    one, sixteen, hundreds = (seconds("qwen3-235b-a22b-fp8", decode(n, 1), 4, 1, 4) for n in (1, 16, 256))
    read_all_s = shape.expert_weight_bytes / 4 / gpu.memory_bandwidth
    assert one < 0.7 * read_all_s
    assert one < sixteen < hundreds
    assert read_all_s < hundreds < 2.5 * read_all_s
    # A dense model of as many active parameters reads the same for one token as for sixteen.
    dense = [seconds("qwen3-32b", decode(n, 1), 4) for n in (1, 16)]
    assert sixteen / one > 1.5 * dense[1] / dense[0]


def test_whole_experts_on_every_gpu_wait_for_the_fullest():
    prompt = prefill(8192)
    assert seconds("qwen3-235b-a22b", prompt, 8, 1, 8) > seconds("qwen3-235b-a22b", prompt, 8)


def test_experts_in_four_bits_are_read_sooner():
    tokens = decode(32, 1)
    assert seconds("gpt-oss-120b", tokens, 4) < 0.6 * RooflineModel(
        shape_named("gpt-oss-120b").with_dtypes(weights="bf16"), gpu_named("h100"), 4, engine=BARE
    ).step_time_s(tokens)


def test_a_windowed_layer_reads_no_more_than_its_window():
    gpu = gpu_named("h100")
    sizes = {
        "num_layers": 32,
        "hidden_size": 4096,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
        "vocab_size": 32000,
    }
    whole = RooflineModel(ModelShape(name="whole", **sizes), gpu, engine=BARE)
    windowed = RooflineModel(
        ModelShape(name="windowed", **sizes, window_tokens=4096, num_windowed_layers=32), gpu, engine=BARE
    )
    for context in (100, 4096):
        assert windowed.step_time_s(decode(8, context)) == pytest.approx(whole.step_time_s(decode(8, context)))
        assert windowed.step_time_s(prefill(context)) == pytest.approx(whole.step_time_s(prefill(context)))
    assert windowed.step_time_s(decode(8, 50_000)) == pytest.approx(whole.step_time_s(decode(8, 4096)))
    # A prompt of n tokens attends to n * w - w * w / 2 pairs, a chunk after a long prefix to w per token.
    length, window = 32_768, 4096
    pairs = whole.step_time_s(prefill(length)) - whole.step_time_s(StepFeatures(length, 1, 0, 0, 0.0))
    less = whole.step_time_s(prefill(length)) - windowed.step_time_s(prefill(length))
    assert less / pairs == pytest.approx(1 - (length * window - window**2 / 2) / (length**2 / 2), rel=1e-6)


def test_a_latent_vector_is_read_once_for_all_heads():
    deepseek, llama = shape_named("deepseek-v3"), shape_named("llama-3.1-405b")
    assert deepseek.kv_bytes_per_token < llama.kv_bytes_per_token / 7
    grown = seconds("deepseek-v3", decode(32, 20_000), 8) - seconds("deepseek-v3", decode(32, 10_000), 8)
    read_s = 32 * 10_000 * deepseek.kv_bytes_per_token / gpu_named("h100").memory_bandwidth
    # All eight GPUs read the whole of it, and each multiplies it with a sixteenth of 128 heads at most.
    assert read_s < grown < 2 * read_s


def test_stages_share_the_work_of_many_sequences_and_add_sends_to_that_of_one():
    one, two = (
        RooflineModel(shape_named("llama-3.1-70b"), gpu_named("h100"), 4, p, engine=BARE).step_time_s for p in (1, 2)
    )
    alone = two(prefill(8192)) - one(prefill(8192))
    assert 0 < alone < 0.01 * one(prefill(8192))  # nothing to overlap: the stages take turns
    half = StepFeatures(8192, 4, 0, 0, 4 * 2048**2 / 2)
    assert two(prefill(2048, 8)) == pytest.approx(one(half), rel=0.02)  # each stage computes half of the prompts
    # Decodes: both microbatches read the weights; what each adds to that halves.
    assert two(decode(64, 4000)) == pytest.approx(one(decode(32, 4000)), rel=0.02)


def test_layers_that_stages_cannot_share_evenly_count_as_the_fullest():
    shape = shape_named("llama-3.1-405b")
    four = Parallelism(tensor=8, pipeline=4)
    assert four.layers_factor(shape) == pytest.approx(32 * 4 / 126)
    assert four.weight_bytes_on_gpu(shape) > shape.weight_bytes / 32


def test_groups_with_sequences_of_their_own_exchange_tokens():
    split, shape = Parallelism(tensor=1, expert=16), shape_named("deepseek-v3")
    assert (split.num_groups, split.num_gpus_per_stage, split.num_gpus) == (16, 16, 16)
    assert Parallelism(tensor=4, pipeline=2, expert=8).num_gpus == 16
    gpu = gpu_named("h100")
    near = RooflineModel(shape, gpu, 1, 1, 8, engine=BARE).step_time_s(decode(256, 1000))
    far = RooflineModel(shape, gpu, 1, 1, 16, engine=BARE).step_time_s(decode(256, 1000))
    assert 0.5 * near < far < near  # twice the GPUs, but over the network between two nodes


@pytest.mark.parametrize(
    ("name", "split", "problem"),
    [
        ("llama-3.1-8b", (1, 0, 1), "pipeline parallel size must be at least 1"),
        ("llama-3.1-8b", (2, 1, 2), "no experts that 2 groups"),
        ("llama-3.1-8b", (1, 33, 1), "has 32 layers, too few for 33"),
        ("mixtral-8x7b", (1, 1, 16), "8 experts per layer, which 16 groups"),
        ("mixtral-8x7b", (2, 1, 3), "expert parallel size 3 and tensor parallel size 2"),
    ],
)
def test_splits_that_cannot_be(name, split, problem):
    with pytest.raises(ConfigurationError, match=problem):
        RooflineModel(shape_named(name), gpu_named("h100"), *split)
