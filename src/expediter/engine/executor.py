"""The executor that runs a real model: plan in, tokens out."""

from __future__ import annotations

import time
from typing import Final

import numpy as np
import torch
from transformers import PreTrainedModel

from expediter.core.errors import ConfigurationError, InvariantError, RequestError
from expediter.core.plan import StepFeatures, StepPlan, StepResult
from expediter.core.ports import ExecutorLimits
from expediter.core.request import Grammar
from expediter.engine.attention import ATTENTION_NAME, BATCH_KEYWORD, register
from expediter.engine.batch import PackedBatch, pack
from expediter.engine.host_pool import HostPool
from expediter.engine.kv_pool import KVPool, KVShape
from expediter.engine.matching import Matchers
from expediter.engine.sampler import Sampler
from expediter.engine.structured import CompiledGrammars

_MAX_MATCHER_THREADS: Final = 8


class TorchExecutor:
    """`Executor` over an unmodified transformers causal LM and a paged KV pool.

    Each step is one packed forward of all entries, decodes and chunks alike. A block's contents stay valid until the
    scheduler has it written again, so cached prefixes are read like any other context.

    What is promised of the tokens: greedy and seeded sampling depend on the request alone, not on the batch, the chunk
    sizes, preemptions or prefix hits, except where two candidates tie to the last bits of their logits. Matrix products
    of another size round differently: by up to 5e-5 of a logit for a 30-layer model in float32 on CPU, which decides no
    token of the test suite, and by some 1e-2 in bfloat16, which now and then does.

    Not supported, and refused: sliding-window layers, soft-capped scores, attention sinks, recurrent layers, keys and
    values of different width.

    Args:
        model: in evaluation mode on its final device; its attention implementation is switched to ours.
        num_blocks, block_size: of the KV pool.
        max_num_seqs: slots.
        max_model_len: longest sequence, in tokens; None for what the model's config says.
        seed: source of the seeds of requests that bring none.
        num_host_blocks: of the host tier; how fast blocks move there is measured at once.
        grammars: compiles what outputs have to match; None to refuse requests with a grammar.
    Raises:
        ConfigurationError: the model cannot run on paged attention; it is tried out at once.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int | None = None,
        seed: int | None = None,
        num_host_blocks: int = 0,
        grammars: CompiledGrammars | None = None,
    ) -> None:
        config = model.config.get_text_config(decoder=True)
        positions = getattr(config, "max_position_embeddings", None)
        if max_model_len is None:
            max_model_len = positions
        if max_model_len is None:
            raise ConfigurationError("the model's config names no longest sequence; max_model_len has to")
        if positions is not None and max_model_len > positions:
            raise ConfigurationError(f"max_model_len {max_model_len} exceeds the model's {positions} positions")
        register()
        model.set_attn_implementation(ATTENTION_NAME)
        self._model: PreTrainedModel | None = model
        shape = KVShape.of_config(model.config, model.dtype)
        self._grammars = grammars
        self._matchers = None if grammars is None else Matchers(grammars, config.vocab_size, _num_matcher_threads())
        self._sampler = Sampler(
            max_num_seqs=max_num_seqs,
            vocab_size=config.vocab_size,
            device=model.device,
            seed=seed,
            matchers=self._matchers,
        )
        pool = KVPool(shape, num_blocks=num_blocks, block_size=block_size, device=model.device)
        _try_out(model, pool, config.vocab_size)
        self._pool: KVPool | None = pool
        self._host = HostPool(pool, num_host_blocks) if num_host_blocks else None
        self._limits = ExecutorLimits(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            vocab_size=config.vocab_size,
            max_num_seqs=max_num_seqs,
            num_host_blocks=num_host_blocks,
            block_swap_s=None if self._host is None else self._host.measure_block_swap_s(),
        )

    @property
    def limits(self) -> ExecutorLimits:
        return self._limits

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan; `elapsed_s` is the wall time from plan to tokens.

        Raises:
            InvariantError: the plan stands for several steps (those exist in simulation only), or we are closed.
        """
        if plan.num_steps != 1:
            raise InvariantError("a real model runs one step at a time")
        model, pool = self._model, self._pool
        if model is None or pool is None:
            raise InvariantError("executor is closed")
        started_s = time.perf_counter()
        for admission in plan.admitted:
            self._sampler.admit(admission)
        pool.copy(plan.copies)
        if self._host is not None and plan.num_swapped_blocks:
            self._host.swap_out(plan.swap_out)
            self._host.swap_in(plan.swap_in)
        logits = _forward(model, pack(plan, pool))
        sampled = plan.sampled
        num_known = plan.starts[sampled].astype(np.int64) + plan.lengths[sampled]
        drawn = self._sampler.sample(logits, plan.sample_slots, num_known)
        return StepResult(
            step_id=plan.step_id,
            tokens=drawn.tokens[None],
            elapsed_s=time.perf_counter() - started_s,
            logprobs=drawn.logprobs,
            failures=drawn.failures,
        )

    def prepare(self, grammar: Grammar) -> None:
        if self._grammars is None:
            raise RequestError("this model follows no grammar", param="grammar")
        self._grammars.prepare(grammar)

    def close(self) -> None:
        """Drop the model and the pools; their memory goes back when nobody else holds them."""
        self._model = None
        self._pool = None
        self._host = None
        if self._matchers is not None:
            self._matchers.close()


def _num_matcher_threads() -> int:
    """Return how many threads make masks beside the model's own."""
    return min(torch.get_num_threads(), _MAX_MATCHER_THREADS)


def _forward(model: PreTrainedModel, batch: PackedBatch) -> torch.Tensor:
    """Return the logits of the batch's `last_tokens`, shape [num_sampled, vocab_size]."""
    logits: torch.Tensor = model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        use_cache=False,
        logits_to_keep=batch.last_tokens,
        **{BATCH_KEYWORD: batch},
    ).logits[0]
    return logits


@torch.inference_mode()
def _try_out(model: PreTrainedModel, pool: KVPool, vocab_size: int) -> None:
    """Run one token through the empty pool, and see that every layer kept its KV there and nowhere else."""
    one, none = np.ones(1, dtype=np.int32), np.zeros(1, dtype=np.int32)
    plan = StepPlan(
        step_id=0,
        num_decodes=0,
        slots=none,
        starts=none,
        lengths=one,
        tokens=none,
        sampled=np.zeros(1, dtype=np.intp),
        block_tables=np.zeros((1, 1), dtype=np.int32),
        features=StepFeatures(1, 1, 0, 0, 0.5),
        admitted=(),
        events=[],
        sample_slots=none,
    )
    try:
        logits = _forward(model, pack(plan, pool))
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise ConfigurationError(f"the model does not run on paged attention: {error}") from error
    written = pool.data[:, 0, 0].flatten(1).abs().amax(dim=1) > 0
    if logits.shape != (1, vocab_size) or not written.all():
        raise ConfigurationError("the model does not run on paged attention: a layer keeps its state elsewhere")
    pool.data[:, 0, 0] = 0
