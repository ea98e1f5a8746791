"""Constants and shapes: sizes that are publicly known, names that do not exist, files that do."""

import json

import pytest

from expediter.core.errors import ConfigurationError
from expediter.perfmodel.dimensions import Experts, ModelShape
from expediter.perfmodel.hardware import GPU_NAMES, gpu_named
from expediter.perfmodel.memory import kv_capacity
from expediter.perfmodel.shapes import SHAPE_NAMES, shape_from_config, shape_named


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-2-7b", 6.74),
        ("llama-2-13b", 13.02),
        ("llama-2-70b", 68.98),
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-70b", 70.55),
        ("llama-3.1-405b", 405.9),
        ("llama-3.2-1b", 1.236),
        ("llama-3.2-3b", 3.213),
        ("yi-34b", 34.39),
        ("qwen2.5-7b", 7.616),
        ("qwen2.5-72b", 72.71),
        ("qwen3-0.6b", 0.596),
        ("qwen3-4b", 4.022),
        ("qwen3-8b", 8.19),
        ("qwen3-14b", 14.77),
        ("qwen3-32b", 32.76),
        ("qwen3-30b-a3b", 30.53),
        ("qwen3-235b-a22b", 235.1),
        ("mistral-7b", 7.242),
        ("mistral-small-24b", 23.57),
        ("mixtral-8x7b", 46.70),
        ("mixtral-8x22b", 140.6),
        ("deepseek-v2", 235.7),
        ("deepseek-v2-lite", 15.71),
        ("deepseek-v3", 671.0),
        ("kimi-k2", 1026.0),
        ("gpt-oss-20b", 20.91),
        ("gpt-oss-120b", 116.8),
        ("minimax-m2", 228.7),
        ("glm-4.5", 353.0),
        ("glm-4.5-air", 106.9),
        ("gemma-2-9b", 9.242),
        ("gemma-2-27b", 27.23),
        ("gemma-3-27b", 27.01),
        ("phi-2", 2.780),
        ("phi-3-mini", 3.821),
        ("phi-4", 14.66),
        ("phi-3.5-moe", 41.87),
        ("opt-13b", 12.85),
        ("opt-66b", 65.7),
        ("opt-175b", 174.6),
        ("bloom-176b", 176.2),
        ("falcon-40b", 41.84),
        ("falcon-180b", 179.5),
        ("smollm2-135m", 0.1345),
    ],
)
def test_parameters_are_the_published_ones(name, billions):
    assert shape_named(name).num_params / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("mixtral-8x7b", 12.9),
        ("mixtral-8x22b", 39.1),
        ("qwen3-235b-a22b", 22.2),
        ("qwen3-30b-a3b", 3.35),
        ("deepseek-v2", 21.4),
        ("deepseek-v3", 37.6),
        ("gpt-oss-120b", 5.71),
        ("phi-3.5-moe", 6.6),
    ],
)
def test_active_parameters_are_the_published_ones(name, billions):
    """Published as 12.9, 39, 22, 3.3, 21, 37, 5.1 and 6.6; gpt-oss leaves the embedding table out (0.58)."""
    assert shape_named(name).num_active_params / 1e9 == pytest.approx(billions, rel=0.01)


def test_kv_is_of_the_published_size():
    # DistServe (OSDI 2024): the KV of 512 tokens of OPT-66B takes about 1.13 GB.
    assert shape_named("opt-66b").kv_bytes(512) / 2**30 == pytest.approx(1.13, rel=0.01)
    # DeepSeek-V3 report (2412.19437) and its comparison with Llama 3.1 405B (2505.09343): 70.272 KB and 516.096 KB.
    assert shape_named("deepseek-v3").kv_bytes_per_token == 70_272
    assert shape_named("llama-3.1-405b").kv_bytes_per_token == 516_096


def test_windowed_layers_need_no_more_than_their_window():
    shape = shape_named("gpt-oss-120b")
    layer = shape.kv_bytes_per_token_and_layer
    assert (shape.window_tokens, shape.num_windowed_layers) == (128, 18)
    assert shape.kv_bytes(100) == 36 * 100 * layer
    assert shape.kv_bytes(10_000) == 18 * (10_000 + 128) * layer
    assert shape_named("mistral-7b").kv_bytes(100_000) == shape_named("mistral-7b").kv_bytes(4096)


def test_unknown_names_are_answered_with_those_that_exist():
    with pytest.raises(ConfigurationError, match=r"llama-3\.1-8b"):
        shape_named("gpt-7")
    with pytest.raises(ConfigurationError, match=r"a100-80g.*toml"):
        gpu_named("v100")
    assert {"a100-80g", "h100", "h200", "b200", "l40s", "a10"} <= set(GPU_NAMES)
    assert "qwen3-32b" in SHAPE_NAMES
    for name in SHAPE_NAMES:
        assert shape_named(name).name == name


LLAMA = {
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


@pytest.fixture
def folder_with(tmp_path):
    def write(**fields):
        folder = tmp_path / "tiny"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(LLAMA | fields))
        return str(folder)

    return write


def test_folder_with_a_config(folder_with, tmp_path):
    shape = shape_named(folder_with())
    known = shape_named("smollm2-135m")
    assert shape == shape_from_config(tmp_path / "tiny" / "config.json")
    assert shape.name == "tiny"
    assert shape.num_params == known.num_params
    assert shape.weight_bytes == 2 * known.weight_bytes
    assert shape.kv_bytes_per_token == known.kv_bytes_per_token


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "gptq", "bits": 4}, "fp4"),
        ({"quant_method": "awq", "bits": 4}, "fp4"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, "fp8"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}, "fp4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "fp4"),
        (None, "fp32"),
    ],
)
def test_quantization_of_a_config(folder_with, quantization, dtype):
    assert shape_named(folder_with(quantization_config=quantization)).weight_dtype == dtype


def test_a_config_with_windows_or_experts_or_a_latent_vector(folder_with):
    gemma = shape_named(folder_with(model_type="gemma3", text_config=LLAMA | {"sliding_window": 512}))
    assert (gemma.window_tokens, gemma.num_windowed_layers) == (512, 30)
    listed = ["sliding_attention", "full_attention"] * 15
    assert shape_named(folder_with(sliding_window=64, layer_types=listed)).num_windowed_layers == 15
    assert shape_named(folder_with(sliding_window=64, use_sliding_window=False)).num_windowed_layers == 0
    experts = shape_named(
        folder_with(
            model_type="qwen3_moe",
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=256,
            mlp_only_layers=[0, 1],
            shared_expert_intermediate_size=128,
        )
    ).experts
    assert experts == Experts(
        num_experts=8, top_k=2, intermediate_size=256, num_layers=28, shared_intermediate_size=128
    )
    latent = shape_named(
        folder_with(kv_lora_rank=16, qk_nope_head_dim=32, qk_rope_head_dim=8, v_head_dim=32, q_lora_rank=None)
    )
    assert latent.kv_bytes_per_token_and_layer == 2 * (16 + 8)
    assert latent.kv_bytes_per_token_on_gpu(3) == latent.kv_bytes_per_token  # every GPU has the whole of it


def test_other_names_of_the_same_things(folder_with):
    names = {"n_embd": 64, "n_head": 4, "n_layer": 2, "hidden_size": None, "num_attention_heads": None}
    names |= {"num_hidden_layers": None, "num_key_value_heads": None, "intermediate_size": None}
    gpt2 = shape_named(folder_with(model_type="gpt2", architectures=["GPT2LMHeadModel"], **names))
    assert (gpt2.hidden_size, gpt2.num_kv_heads, gpt2.intermediate_size, gpt2.gated) == (64, 4, 256, False)
    assert shape_named(folder_with(model_type="gpt_bigcode", **names)).num_kv_heads == 1
    assert shape_named(folder_with(model_type="gpt_bigcode", multi_query=False, **names)).num_kv_heads == 4


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"hidden_size": "large"}', '{"hidden_size": 1e999}'])
def test_config_that_describes_no_model(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        shape_named(str(tmp_path))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"num_attention_heads": None}, r"num_attention_heads: is missing \(or n_head"),
        ({"vocab_size": 3.5}, "vocab_size: must be a whole number"),
        ({"state_size": 16}, "state_size: state-space"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder: encoders"),
        ({"architectures": ["BertForMaskedLM"]}, "architectures: BertForMaskedLM does not generate"),
        ({"block_types": ["recurrent", "attention"]}, "block_types: layers other"),
        ({"linear_num_value_heads": 32}, "linear_num_value_heads: linear attention"),
        ({"sliding_window": 8, "layer_types": ["linear_attention"]}, "layer_types: 'linear_attention' is not"),
        ({"layer_types": ["linear_attention"]}, "layer_types: 'linear_attention' is not"),
        ({"num_local_experts": 8}, "moe_intermediate_size: is missing"),
        ({"num_local_experts": 8, "moe_intermediate_size": 64}, "num_experts_per_tok: is missing"),
        ({"num_local_experts": 8, "moe_intermediate_size": 64, "num_experts_per_tok": 9}, "top_k must be 1 to 8"),
        ({"kv_lora_rank": 512}, "qk_nope_head_dim: is missing"),
        ({"num_key_value_heads": 2}, "9 heads do not divide into 2 groups"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method: 'hqq' is not"),
        ({"quantization_config": "fp8"}, "quantization_config: must be an object"),
    ],
)
def test_what_cannot_be_modelled_names_the_field(folder_with, fields, problem):
    with pytest.raises(ConfigurationError, match=rf"config\.json.*{problem}"):
        shape_named(folder_with(**fields))


def test_types_of_weights_and_kv():
    shape = shape_named("llama-3.1-70b")
    fp8 = shape.with_dtypes(weights="fp8", kv="fp8")
    assert fp8.dense_weight_bytes * 2 == shape.dense_weight_bytes
    assert shape.weight_bytes - fp8.weight_bytes == fp8.dense_weight_bytes
    assert fp8.kv_bytes_per_token * 2 == shape.kv_bytes_per_token
    assert shape_named("llama-3.1-70b-fp8").dense_weight_bytes == fp8.dense_weight_bytes
    oss = shape_named("gpt-oss-120b")
    assert oss.weight_bytes / 2**30 == pytest.approx(60.8, rel=0.01)  # its checkpoint, as published: 60.8 GiB
    assert oss.with_dtypes(weights="bf16").weight_bytes > 230e9
    for arguments in ({"weights": "int3"}, {"kv": "fp4"}):
        with pytest.raises(ConfigurationError, match="there are: bf16, fp8"):
            shape.with_dtypes(**arguments)


def test_heads_must_divide():
    with pytest.raises(ConfigurationError, match="possible are: 1, 3"):
        shape_named("smollm2-135m").check_tensor_parallel(2)
    with pytest.raises(ConfigurationError, match="at least 1"):
        shape_named("smollm2-135m").check_tensor_parallel(0)
    shape_named("llama-3.1-70b").check_tensor_parallel(16)  # each KV head has a copy on two GPUs
    assert shape_named("llama-3.1-70b").kv_bytes_per_token_on_gpu(16) == 2 * 80 * 128 * 2


DIMENSIONS = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 32,
    "intermediate_size": 9,
    "vocab_size": 10,
}


@pytest.mark.parametrize("field", ["num_layers", "hidden_size", "num_kv_heads", "vocab_size"])
def test_dimensions_must_be_positive(field):
    with pytest.raises(ConfigurationError, match=field):
        ModelShape(name="broken", **{**DIMENSIONS, field: 0})


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"num_windowed_layers": 1}, "window_tokens must be at least 1"),
        ({"num_windowed_layers": 3, "window_tokens": 8}, "more windowed layers"),
        ({"kv_dtype": "int3"}, "kv_dtype 'int3'"),
        ({"experts": Experts(num_experts=4, top_k=2, intermediate_size=8, num_layers=3)}, "in 3 of 2 layers"),
    ],
)
def test_shapes_that_cannot_be(fields, problem):
    with pytest.raises(ConfigurationError, match=problem):
        ModelShape(name="broken", **DIMENSIONS, **fields)


def test_capacity_fits_the_memory():
    shape, gpu = shape_named("llama-3.1-70b"), gpu_named("a100-80g")
    four, eight = (kv_capacity(shape, gpu, n, 16) for n in (4, 8))
    assert eight.num_blocks > 2 * four.num_blocks  # the weights shrink and so does the KV of a token
    assert eight.kv_bytes + shape.weight_bytes / 8 < 0.9 * gpu.memory_bytes
    staged = kv_capacity(shape, gpu, 4, 16, pipeline_parallel=2)
    assert staged.num_blocks == pytest.approx(eight.num_blocks, rel=0.05)


def test_experts_on_more_gpus_leave_more_room_and_groups_hold_kv_of_their_own():
    shape, gpu = shape_named("deepseek-v3"), gpu_named("h200")
    with pytest.raises(ConfigurationError, match="does not fit 4 x h200"):
        kv_capacity(shape, gpu, 4, 64)
    eight = kv_capacity(shape, gpu, 8, 64)
    assert kv_capacity(shape, gpu, 8, 64, expert_parallel=8) == eight
    apart = kv_capacity(shape, gpu, 1, 64, expert_parallel=32)
    assert apart.num_blocks > 32 * eight.num_blocks  # a latent vector is copied to all eight, but kept once here


def test_model_too_large_names_the_gpus_that_it_takes():
    shape, gpu = shape_named("llama-3.1-70b"), gpu_named("a100-80g")
    with pytest.raises(ConfigurationError, match="takes at least 2"):
        kv_capacity(shape, gpu, 1, 16)
    kv_capacity(shape, gpu, 2, 16)
    with pytest.raises(ConfigurationError, match="takes at least 16"):
        kv_capacity(shape_named("llama-3.1-405b"), gpu, 8, 16)
    kv_capacity(shape_named("llama-3.1-405b"), gpu, 8, 16, pipeline_parallel=2)


def test_gpus_of_a_file_and_prices(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('like = "h100"\nmemory_bandwidth = 2e12\nprice_per_hour = 1\n')
    mine, h100 = gpu_named(str(path)), gpu_named("h100")
    assert (mine.name, mine.memory_bandwidth, mine.price_per_hour) == ("mine", 2e12, 1)
    assert (mine.flops, mine.kernels) == (h100.flops, h100.kernels)
    assert gpu_named(str(path), {"mine": 3.0}).price_per_hour == 3.0
    assert gpu_named("h100", {"h100": 2.5}).price_per_hour == 2.5
    assert gpu_named("h200", {"h100": 2.5}) == gpu_named("h200")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("like = h100", "cannot be read"),
        ("flops = 1e12", "like must name the GPU"),
        ('like = "v100"', "like must name the GPU.*h100"),
        ('like = "h100"\nspeed = 1', "no field 'speed'; there are: like, name, memory_bytes"),
        ('like = "h100"\nkernels = 1', "no field 'kernels'"),
        ('like = "h100"\nflops = "fast"', "flops must be float"),
        ('like = "h100"\nmemory_bytes = 8e10', "memory_bytes must be int"),
        ('like = "h100"\nflops = -1.0', "flops must be above 0"),
        ('like = "h100"\nmemory_bandwidth = nan', "memory_bandwidth must be above 0"),
        ('like = "h100"\nhost_efficiency = 1.5', "host_efficiency must be at most 1"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path, text, problem):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=problem):
        gpu_named(str(path))
    with pytest.raises(ConfigurationError, match="cannot be read"):
        gpu_named(str(tmp_path / "none.toml"))
