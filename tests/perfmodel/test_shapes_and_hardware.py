"""Constants and shapes: sizes that are publicly known, names that do not exist, folders that do."""

import json

import pytest

from expediter.core.errors import ConfigurationError
from expediter.perfmodel.hardware import GPU_NAMES, gpu_named
from expediter.perfmodel.roofline import kv_capacity
from expediter.perfmodel.shapes import SHAPE_NAMES, ModelShape, shape_from_config, shape_named


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-2-7b", 6.74),
        ("llama-2-70b", 68.98),
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-70b", 70.55),
        ("llama-3.1-405b", 405.9),
        ("qwen3-8b", 8.19),
        ("qwen3-32b", 32.76),
        ("opt-13b", 12.85),
        ("opt-66b", 65.7),
        ("smollm2-135m", 0.1345),
    ],
)
def test_parameters_are_the_published_ones(name, billions):
    assert shape_named(name).num_params / 1e9 == pytest.approx(billions, rel=0.005)


def test_kv_of_opt_66b_is_the_published_size():
    # DistServe (OSDI 2024): the KV of 512 tokens of OPT-66B takes about 1.13 GB.
    assert 512 * shape_named("opt-66b").kv_bytes_per_token / 2**30 == pytest.approx(1.13, rel=0.01)


def test_unknown_names_are_answered_with_those_that_exist():
    with pytest.raises(ConfigurationError, match=r"llama-3\.1-8b"):
        shape_named("gpt-7")
    with pytest.raises(ConfigurationError, match="a100-80g"):
        gpu_named("v100")
    assert {"a100-80g", "h100", "h200"} <= set(GPU_NAMES)
    assert "qwen3-32b" in SHAPE_NAMES


def test_folder_with_a_config(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    config = {
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "model_type": "llama",
        "rope_theta": 1e5,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shape = shape_named(str(folder))
    known = shape_named("smollm2-135m")
    assert shape == shape_from_config(folder / "config.json")
    assert shape.name == "tiny"
    assert shape.num_params == known.num_params
    assert shape.kv_bytes_per_token == 2 * known.kv_bytes_per_token
    assert not shape.fp8_weights
    for method in ("fp8", "gptq"):
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": method}}))
        assert shape_named(str(folder)).fp8_weights == (method == "fp8")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"hidden_size": "large"}', '{"hidden_size": 1e999}'])
def test_config_that_describes_no_model(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        shape_named(str(tmp_path))


def test_mixture_of_experts_is_refused(tmp_path):
    config = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "vocab_size": 10,
        "intermediate_size": 9,
        "num_local_experts": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigurationError, match="experts"):
        shape_named(str(tmp_path))


def test_heads_must_divide():
    with pytest.raises(ConfigurationError, match="possible are: 1, 3"):
        shape_named("smollm2-135m").check_tensor_parallel(2)
    with pytest.raises(ConfigurationError, match="at least 1"):
        shape_named("smollm2-135m").check_tensor_parallel(0)
    shape_named("llama-3.1-70b").check_tensor_parallel(16)  # each KV head has a copy on two GPUs
    assert shape_named("llama-3.1-70b").kv_bytes_per_token_on_gpu(16) == 2 * 80 * 128 * 2


@pytest.mark.parametrize("field", ["num_layers", "hidden_size", "num_kv_heads", "vocab_size"])
def test_dimensions_must_be_positive(field):
    dimensions = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 32,
        "intermediate_size": 9,
        "vocab_size": 10,
    }
    with pytest.raises(ConfigurationError, match=field):
        ModelShape(name="broken", **{**dimensions, field: 0})


def test_capacity_fits_the_memory():
    shape, gpu = shape_named("llama-3.1-70b"), gpu_named("a100-80g")
    four, eight = (kv_capacity(shape, gpu, n, 16) for n in (4, 8))
    assert eight.num_blocks > 2 * four.num_blocks  # the weights shrink and so does the KV of a token
    assert eight.kv_bytes + shape.weight_bytes / 8 < 0.9 * gpu.memory_bytes


def test_model_too_large_names_the_gpus_that_it_takes():
    shape, gpu = shape_named("llama-3.1-70b"), gpu_named("a100-80g")
    with pytest.raises(ConfigurationError, match="takes at least 2"):
        kv_capacity(shape, gpu, 1, 16)
    kv_capacity(shape, gpu, 2, 16)
    with pytest.raises(ConfigurationError, match="takes at least 16"):
        kv_capacity(shape_named("llama-3.1-405b"), gpu, 8, 16)
