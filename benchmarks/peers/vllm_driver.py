"""vLLM's scheduler without a model: decode steps and admissions. Runs in vLLM's environment.

Scheduler and KV cache manager as its engine core makes them: block 16, prefix caching on, chunked prefill, fcfs. The
model is only a configuration of a small Llama; nothing of it is loaded. Request creation includes the hashing of its
blocks, as in its engine core.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks.peers.protocol import (
    BLOCK_SIZE,
    DECODE_PROMPT_TOKENS,
    LENGTHS,
    RUNNING,
    VOCAB_SIZE,
    Case,
    serve,
)

_MAX_MODEL_LEN = 65_536
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 32_000,
    "max_position_embeddings": 131_072,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

init_none_hash(sha256)
_hash_blocks = get_request_block_hasher(BLOCK_SIZE, sha256)
_rng = random.Random(0)


def _tokens(count: int) -> list[int]:
    return [_rng.randrange(10, VOCAB_SIZE) for _ in range(count)]


def _request(request_id: str, prompt: list[int], max_tokens: int) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=[2])
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=sampling,
        pooling_params=None,
        block_hasher=_hash_blocks,
    )


def _scheduler(max_num_seqs: int, max_num_batched_tokens: int, num_blocks: int) -> Scheduler:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_LLAMA))
        model = ModelConfig(
            model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=_MAX_MODEL_LEN
        )
        limits = SchedulerConfig(
            max_model_len=_MAX_MODEL_LEN,
            is_encoder_decoder=False,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
        cache.num_gpu_blocks = num_blocks
        config = VllmConfig(
            scheduler_config=limits, model_config=model, cache_config=cache, device_config=DeviceConfig("cpu")
        )
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
    )


def _output(scheduler: Scheduler, scheduled: list[str]) -> ModelRunnerOutput:
    requests = [scheduler.requests[request_id] for request_id in scheduled]
    caught_up = [request.num_computed_tokens >= request.num_prompt_tokens for request in requests]
    return ModelRunnerOutput(
        req_ids=scheduled,
        req_id_to_index={request_id: index for index, request_id in enumerate(scheduled)},
        sampled_token_ids=[[7] if done else [] for done in caught_up],
    )


def _step(scheduler: Scheduler) -> tuple[float, int]:
    """Run a step; return the time of schedule and update, in microseconds, and the number of sequences in it."""
    start = time.thread_time_ns()
    plan = scheduler.schedule()
    planned = time.thread_time_ns()
    output = _output(scheduler, list(plan.num_scheduled_tokens))
    ready = time.thread_time_ns()
    scheduler.update_from_output(plan, output)
    return (planned - start + time.thread_time_ns() - ready) / 1e3, len(output.req_ids)


def decode(num_running: int) -> Case:
    tokens_each = 8192
    scheduler = _scheduler(num_running, 8192, num_running * tokens_each // BLOCK_SIZE + 1)
    for index in range(num_running):
        prompt = _tokens(DECODE_PROMPT_TOKENS - index % BLOCK_SIZE)
        scheduler.add_request(_request(str(index), prompt, tokens_each - len(prompt) - 1))
    while not all(request.num_output_tokens for request in scheduler.requests.values()):
        _step(scheduler)
    for _ in range(4):
        _step(scheduler)
    gc.collect()
    gc.disable()

    def measure(num_samples: int) -> list[float]:
        samples = [_step(scheduler) for _ in range(num_samples)]
        if any(size != num_running for _, size in samples):
            raise SystemExit("a request ended or was preempted while it was measured")
        return [duration for duration, _ in samples]

    return measure


def admission(length: int, *, hit: bool) -> Case:
    scheduler = _scheduler(16, _MAX_MODEL_LEN, 40_000)
    names = map(str, itertools.count())
    known = _tokens(length)

    def admit(prompt: list[int]) -> float:
        start = time.thread_time_ns()
        request = _request(next(names), prompt, 100)
        scheduler.add_request(request)
        plan = scheduler.schedule()
        taken = (time.thread_time_ns() - start) / 1e3
        scheduler.update_from_output(plan, _output(scheduler, list(plan.num_scheduled_tokens)))
        num_cached = plan.scheduled_new_reqs[0].num_computed_tokens
        if num_cached != (length - BLOCK_SIZE if hit else 0):
            raise SystemExit(f"{num_cached} of {length} tokens came from the cache")
        scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
        return taken

    if hit:
        scheduler.add_request(_request(next(names), known, 1))
        while scheduler.requests:
            _step(scheduler)
    gc.collect()
    gc.disable()
    return lambda num_samples: [admit(known if hit else _tokens(length)) for _ in range(num_samples)]


if __name__ == "__main__":
    cases: dict[str, Callable[[], Case]] = {f"decode, {n} running": partial(decode, n) for n in RUNNING}
    for length in LENGTHS:
        cases[f"admission, {length} tokens, cold"] = partial(admission, length, hit=False)
        cases[f"admission, {length} tokens, full hit"] = partial(admission, length, hit=True)
    serve(cases)
