"""What the conformance suite does not say of the torch executor: precision, sizes, refusals, long mixed contexts."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_models import VOCAB_SIZE, generate, tiny_llama
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from expediter.core.errors import ConfigurationError, InvariantError
from expediter.core.request import GREEDY, SamplingParams
from expediter.engine.executor import TorchExecutor
from expediter.engine.kv_pool import KVShape
from expediter.engine.model import EngineConfig, load_executor, load_model
from expediter.testing.plan_driver import PlanDriver


def _executor(model: LlamaForCausalLM, **sizes: int) -> TorchExecutor:
    return TorchExecutor(copy.copy(model), **({"num_blocks": 128, "block_size": 4, "max_num_seqs": 16} | sizes))


def test_decodes_of_very_different_length_share_a_step() -> None:
    """Their contexts are read in groups of similar length; each has to come out where it belongs."""
    model = tiny_llama()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB_SIZE, length).tolist() for length in (1, 250, 3, 2, 90, 7, 1, 40)]
    expected = [generate(model, prompt, 8) for prompt in prompts]
    driver = PlanDriver(_executor(model))
    sequences = [driver.admit(prompt) for prompt in prompts]
    for _ in range(8):
        driver.step(*[(sequence, sequence.num_missing) for sequence in sequences])
    assert [sequence.output for sequence in sequences] == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_near_those_of_a_plain_forward(dtype: torch.dtype) -> None:
    model = tiny_llama(dtype)
    prompt = list(range(40))
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1)
    driver = PlanDriver(_executor(model))
    sequence = driver.admit(prompt, SamplingParams(temperature=0.0, logprobs=20))
    driver.generate(sequence, 1, chunk=7)
    report = sequence.logprobs[0]
    assert report is not None
    tolerance = 1e-5 if dtype == torch.float32 else 0.15
    for token, value in report.top:
        assert value == pytest.approx(float(expected[token]), abs=tolerance)


def test_bytes_per_block() -> None:
    config = tiny_llama().config
    shape = KVShape.of_config(config, torch.bfloat16)
    assert shape.bytes_per_token == 2 * 2 * 2 * 16 * 2  # K and V, layers, heads, head_dim, bytes
    assert shape.bytes_per_block(16) == 16 * shape.bytes_per_token
    assert shape.num_blocks(10 * shape.bytes_per_block(16) + 1, 16) == 10
    with pytest.raises(ConfigurationError):
        shape.num_blocks(shape.bytes_per_block(16) - 1, 16)
    pool_bytes = _executor(tiny_llama(torch.bfloat16), num_blocks=10, block_size=16)._pool.data.nbytes
    assert pool_bytes == 10 * shape.bytes_per_block(16)


def test_models_that_cannot_be_paged_are_refused_at_once() -> None:
    sizes = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sliding = MistralForCausalLM(
        MistralConfig(
            **sizes, num_key_value_heads=1, intermediate_size=32, sliding_window=8, max_position_embeddings=64
        )
    )
    with pytest.raises(ConfigurationError, match="sliding"):
        TorchExecutor(sliding, num_blocks=4, block_size=4, max_num_seqs=2)
    recurrent = MambaForCausalLM(MambaConfig(vocab_size=100, hidden_size=32, state_size=4, num_hidden_layers=1))
    with pytest.raises(ConfigurationError):
        TorchExecutor(recurrent, num_blocks=4, block_size=4, max_num_seqs=2, max_model_len=32)


def test_another_architecture_runs_unmodified() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=200,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=64,
            initializer_range=0.1,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).eval()
    prompt = list(range(20))
    expected = generate(model, prompt, 10)
    driver = PlanDriver(TorchExecutor(model, num_blocks=20, block_size=4, max_num_seqs=2))
    assert driver.generate(driver.admit(prompt), 10, chunk=6) == expected


def test_lengths_beyond_the_model_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="512"):
        _executor(tiny_llama(), max_model_len=513)
    assert _executor(tiny_llama()).limits.max_model_len == 512


def test_repeated_plans_and_closed_executors_are_refused() -> None:
    executor = _executor(tiny_llama())
    driver = PlanDriver(executor)
    sequence = driver.admit([1, 2])
    driver.step((sequence, 2))
    plan, _ = driver.plan((sequence, 1), num_steps=3)
    with pytest.raises(InvariantError, match="one step"):
        executor.execute(plan)
    plan.num_steps = 1
    executor.close()
    with pytest.raises(InvariantError, match="closed"):
        executor.execute(plan)


def test_step_of_chunks_without_an_output_samples_nothing() -> None:
    driver = PlanDriver(_executor(tiny_llama()))
    sequence = driver.admit(list(range(9)), SamplingParams(temperature=1.0, logprobs=2))
    result = driver.step((sequence, 4))
    assert result.tokens.shape == (1, 0)
    assert result.logprobs in (None, ())


def test_bad_token_of_one_request_leaves_the_others_alone() -> None:
    """A stop id beyond the vocabulary is legal and never drawn."""
    driver = PlanDriver(_executor(tiny_llama()))
    odd = driver.admit([1], GREEDY, min_tokens=4, stop_token_ids=(10**9,))
    assert len(driver.generate(odd, 3)) == 3


def test_folder_is_loaded_by_config(tmp_path: Path) -> None:
    model = tiny_llama(torch.bfloat16)
    model.save_pretrained(tmp_path)
    executor = load_executor(EngineConfig(model=tmp_path, device="cpu", max_num_seqs=3, max_model_len=100))
    assert executor.limits.max_num_seqs == 3
    assert executor.limits.max_model_len == 100
    assert executor.limits.num_blocks == 3 * 7  # no more than three longest sequences need
    assert executor._pool.data.dtype == torch.bfloat16
    shape = KVShape.of_config(model.config, torch.float32)
    sized = EngineConfig(model=tmp_path, dtype="float32", device="cpu", kv_cache_bytes=9 * shape.bytes_per_block(16))
    assert load_executor(sized).limits.num_blocks == 9
    assert load_executor(EngineConfig(model=tmp_path, device="cpu", num_blocks=5)).limits.num_blocks == 5


def test_swap_space_is_counted_in_blocks_and_timed(tmp_path: Path) -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path)
    block_bytes = KVShape.of_config(model.config, torch.float32).bytes_per_block(16)
    sized = EngineConfig(model=tmp_path, device="cpu", num_blocks=5, swap_space_bytes=7 * block_bytes + 1)
    limits = load_executor(sized).limits
    assert limits.num_host_blocks == 7
    assert limits.block_swap_s is not None
    assert 0 < limits.block_swap_s < 1
    none = load_executor(EngineConfig(model=tmp_path, device="cpu", num_blocks=5)).limits
    assert (none.num_host_blocks, none.block_swap_s) == (0, None)
    with pytest.raises(ConfigurationError, match="swap_space_bytes"):
        EngineConfig(model=tmp_path, swap_space_bytes=-1)


def test_what_cannot_be_loaded_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError):
        load_model(tmp_path, device="cpu")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "pytorch_model.bin").write_bytes(b"not read")
    with pytest.raises(ConfigurationError):
        load_model(tmp_path, device="cpu")
    for device in ("gpu", "cuda:99"):
        with pytest.raises(ConfigurationError):
            load_model(tmp_path, device=device)
    with pytest.raises(ConfigurationError, match="float32"):
        EngineConfig(model=tmp_path, dtype="int4")
    with pytest.raises(ConfigurationError, match="block_size"):
        EngineConfig(model=tmp_path, block_size=0)
