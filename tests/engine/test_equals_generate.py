"""Tokens equal transformers' own `generate`, whatever the scheduler does to the requests on the way."""

import copy
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_models import VOCAB_SIZE, generate, tiny_llama
from serving import serve

from expediter.core.request import Request
from expediter.engine.executor import TorchExecutor
from expediter.engine.model import load_model
from expediter.engine.tokenizer import Tokenizer
from expediter.scheduling.config import SchedulerConfig

NUM_PROMPTS = 50

SENTENCES = (
    "The capital of France is Paris, and the capital of Italy is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Once upon a time there was a small fox who lived at the edge of a deep forest.",
    "Water boils at one hundred degrees, while ice melts at",
    "In 1969 two astronauts walked on the moon for the first time; their names were",
    "To make bread you need flour, water, salt and",
    "The quick brown fox jumps over the lazy dog and then",
    "Dear Sir or Madam, I am writing to you because",
)


def _requests(prompts: list[list[int]], max_tokens: list[int], stop_token_ids: tuple[int, ...]) -> list[Request]:
    return [
        Request(
            request_id=str(i),
            prompt=np.array(prompt, dtype=np.int32),
            max_tokens=max_tokens[i],
            stop_token_ids=stop_token_ids,
        )
        for i, prompt in enumerate(prompts)
    ]


def _mixed_prompts(rng: random.Random, tokens: list[int], max_length: int) -> list[list[int]]:
    """Return prompts of mixed length: a third with a shared beginning, some twice, one of a single token."""
    shared = tokens[:40]
    prompts = [[tokens[5]]]
    while len(prompts) < NUM_PROMPTS - 5:
        begin = rng.randrange(len(tokens) - max_length)
        own = tokens[begin : begin + rng.randint(2, max_length - 40)]
        prompts.append(shared[: rng.choice((16, 40))] + own if rng.random() < 0.35 else own)
    prompts += rng.sample(prompts[1:], 5)
    rng.shuffle(prompts)
    return prompts


CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_tiny_grouped_query_llama(device: str) -> None:
    rng = random.Random(1)
    model = tiny_llama(device=device)
    prompts = _mixed_prompts(rng, [rng.randrange(VOCAB_SIZE) for _ in range(2000)], 130)
    expected = [generate(model, prompt, 24) for prompt in prompts]
    executor = TorchExecutor(copy.copy(model), num_blocks=70, block_size=4, max_num_seqs=12)
    config = SchedulerConfig(max_num_seqs=12, max_num_batched_tokens=48, max_model_len=256)
    arrivals = [rng.randrange(80) for _ in prompts]
    served = serve(executor, _requests(prompts, [24] * NUM_PROMPTS, ()), config, arrival_steps=arrivals)
    served.assert_stressed()
    assert [served.outputs[str(i)] for i in range(NUM_PROMPTS)] == expected


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_tiny_llama_whose_requests_go_to_the_host_and_back(device: str) -> None:
    rng = random.Random(3)
    model = tiny_llama(device=device)
    prompts = _mixed_prompts(rng, [rng.randrange(VOCAB_SIZE) for _ in range(2000)], 130)
    expected = [generate(model, prompt, 24) for prompt in prompts]
    executor = TorchExecutor(copy.copy(model), num_blocks=70, block_size=4, max_num_seqs=12, num_host_blocks=90)
    config = SchedulerConfig(max_num_seqs=12, max_num_batched_tokens=48, max_model_len=256)
    arrivals = [rng.randrange(80) for _ in prompts]
    requests = _requests(prompts, [24] * NUM_PROMPTS, ())
    served = serve(executor, requests, config, arrival_steps=arrivals, preemption_mode="swap")
    served.assert_stressed()
    assert served.num_restored_tokens > 100
    assert [served.outputs[str(i)] for i in range(NUM_PROMPTS)] == expected


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_greedy_groups(device: str) -> None:
    """Every sequence of a group says what `generate` says, forked inside blocks and at their edges, and preempted."""
    rng = random.Random(5)
    model = tiny_llama(device=device)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (3, 16, 17, 33, 46, 40, 9, 64)]
    expected = [generate(model, prompt, 20) for prompt in prompts]
    executor = TorchExecutor(copy.copy(model), num_blocks=44, block_size=4, max_num_seqs=12)
    config = SchedulerConfig(max_num_seqs=12, max_num_batched_tokens=32, max_model_len=128)
    requests = _requests([prompt for prompt in prompts for _ in range(3)], [20] * 24, ())
    served = serve(executor, requests, config, arrival_steps=[4 * i for i in range(8)], group_size=3)
    served.assert_stressed()
    assert served.num_copies == 2 * 5  # five of the eight prompts end inside a block
    assert [served.outputs[str(i)] for i in range(24)] == [tokens for tokens in expected for _ in range(3)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_smollm2(device: str, smollm2_folder: Path, smollm2_tokenizer: Tokenizer) -> None:
    rng = random.Random(2)
    model = load_model(smollm2_folder, dtype="float32", device=device)
    text = " ".join(rng.choice(SENTENCES) for _ in range(80))
    prompts = _mixed_prompts(rng, smollm2_tokenizer.encode(text), 80)
    max_tokens = [rng.randint(3, 12) for _ in prompts]
    expected = [generate(model, prompt, length) for prompt, length in zip(prompts, max_tokens, strict=True)]
    executor = TorchExecutor(model, num_blocks=64, block_size=4, max_num_seqs=16)
    config = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=64, max_model_len=128)
    requests = _requests(prompts, max_tokens, smollm2_tokenizer.eos_token_ids)
    served = serve(executor, requests, config, arrival_steps=[rng.randrange(60) for _ in prompts])
    served.assert_stressed()
    assert [served.outputs[str(i)] for i in range(NUM_PROMPTS)] == expected
