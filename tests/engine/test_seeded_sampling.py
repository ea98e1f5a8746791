"""A request with a seed gets the same tokens alone and among others, chunked, preempted and from a warm cache."""

import copy
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_models import VOCAB_SIZE, tiny_llama
from serving import Served, serve
from transformers import PreTrainedModel

from expediter.core.request import Carried, Request, SamplingParams
from expediter.engine.executor import TorchExecutor
from expediter.engine.model import load_model
from expediter.engine.tokenizer import Tokenizer
from expediter.scheduling.config import SchedulerConfig

KINDS = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.2, top_k=40),
    SamplingParams(temperature=0.9, min_p=0.05),
    SamplingParams(temperature=1.0, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.5),
    SamplingParams(temperature=0.0, logit_bias=((5, 2.0),), repetition_penalty=1.3),
    SamplingParams(temperature=1.0, top_p=0.8, top_k=100, logprobs=3),
    SamplingParams(temperature=0.0, logprobs=1),
)


def _requests(prompts: list[list[int]], max_tokens: int) -> list[Request]:
    return [
        Request(
            request_id=str(i),
            prompt=np.array(prompt, dtype=np.int32),
            max_tokens=max_tokens,
            min_tokens=i % 3,
            stop_token_ids=(2,),
            sampling=replace(KINDS[i % len(KINDS)], seed=1000 + i),
        )
        for i, prompt in enumerate(prompts)
    ]


def _alone(model: PreTrainedModel, request: Request) -> Served:
    executor = TorchExecutor(copy.copy(model), num_blocks=64, block_size=16, max_num_seqs=1)
    return serve(executor, [request], SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=512, max_model_len=256))


def _assert_as_alone(model: PreTrainedModel, requests: list[Request], served: Served) -> None:
    for request in requests:
        alone = _alone(model, request)
        id_ = request.request_id
        assert served.outputs[id_] == alone.outputs[id_], request.sampling
        if request.sampling.logprobs is None:
            continue
        assert len(alone.logprobs[id_]) == len(alone.outputs[id_])
        for here, there in zip(served.logprobs[id_], alone.logprobs[id_], strict=True):
            assert here is not None
            assert there is not None
            assert here.logprob == pytest.approx(there.logprob, abs=1e-3)
            assert (here.rank, [t for t, _ in here.top]) == (there.rank, [t for t, _ in there.top])


def test_tiny_llama_under_stress() -> None:
    rng = random.Random(3)
    model = tiny_llama()
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(24)]
    prompts = [
        [*(shared if rng.random() < 0.4 else []), *(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 60)))]
        for _ in range(32)
    ]
    requests = _requests(prompts, 24)
    executor = TorchExecutor(copy.copy(model), num_blocks=60, block_size=4, max_num_seqs=12)
    config = SchedulerConfig(max_num_seqs=12, max_num_batched_tokens=40, max_model_len=256)
    served = serve(executor, requests, config, arrival_steps=[rng.randrange(40) for _ in requests])
    served.assert_stressed()
    assert len({tuple(output) for output in served.outputs.values()}) == len(requests)
    _assert_as_alone(model, requests, served)


def test_sequences_of_a_group() -> None:
    """Each has its own seed and says what a request with that seed says alone, whatever else its sampling is."""
    rng = random.Random(4)
    model = tiny_llama()
    requests: list[Request] = []
    for kind in KINDS:
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(3, 40))]
        group = _requests([prompt] * 4, 16)
        requests += [
            replace(
                request,
                request_id=str(len(requests) + i),
                min_tokens=2,
                sampling=replace(kind, seed=77 + i),
            )
            for i, request in enumerate(group)
        ]
    executor = TorchExecutor(copy.copy(model), num_blocks=48, block_size=4, max_num_seqs=12)
    config = SchedulerConfig(max_num_seqs=12, max_num_batched_tokens=32, max_model_len=256)
    served = serve(executor, requests, config, group_size=4)
    assert served.num_preemptions > 0
    assert served.num_copies > 0
    _assert_as_alone(model, requests, served)


def test_smollm2_in_a_batch(smollm2_folder: Path, smollm2_tokenizer: Tokenizer) -> None:
    model = load_model(smollm2_folder, dtype="float32", device="cpu")
    prompts = [smollm2_tokenizer.encode(f"Chapter {i}. The road went on and on, and then") for i in range(8)]
    requests = _requests(prompts, 10)
    executor = TorchExecutor(copy.copy(model), num_blocks=40, block_size=4, max_num_seqs=8)
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=24, max_model_len=128)
    served = serve(executor, requests, config)
    assert served.num_mixed_steps > 0
    assert served.num_split_prompts > 0
    _assert_as_alone(model, requests, served)


def test_what_goes_on_at_another_replica_says_the_same() -> None:
    """As after a crash (CASES 35): another executor and scheduler, prompt and half of the output as known tokens."""
    rng = random.Random(5)
    model = tiny_llama()
    requests = _requests([[rng.randrange(VOCAB_SIZE) for _ in range(30)] for _ in KINDS], 24)
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256)
    executor = TorchExecutor(copy.copy(model), num_blocks=64, block_size=16, max_num_seqs=8)
    whole = serve(executor, requests, config).outputs
    cuts = {request.request_id: len(whole[request.request_id]) // 2 for request in requests}
    assert all(cut > 0 for cut in cuts.values())
    other = TorchExecutor(copy.copy(model), num_blocks=64, block_size=16, max_num_seqs=8)
    carried = {
        name: Carried(output=tuple(whole[name][:cut]), first_scheduled_s=0.0, first_token_s=0.0)
        for name, cut in cuts.items()
    }
    rest = serve(other, requests, config, carried=carried).outputs
    assert {name: whole[name][:cut] + rest[name] for name, cut in cuts.items()} == whole
