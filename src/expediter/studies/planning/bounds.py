"""What no schedule can do better than: set-ups and sizes that need no simulation.

A set-up is out if too many requests would miss their targets even alone on an idle replica, and a size if its GPUs have
less time than the work takes at their best. Every bound errs on the side of the set-up:

- **Memory.** A request whose KV exceeds the pool of a replica, or whose length exceeds the model's, is refused.
- **TTFT.** A prompt takes at least one step with all its tokens, less the longest beginning that any other request has
  (if the preset caches prefixes at all). Steps are subadditive: the same tokens in several steps take longer.
- **TPOT.** A token takes at least the decode step of that request alone, at the start of its output.
- **Work.** Over the steps of all replicas, time is at least that of computing the prompts alone (each distinct
  beginning once, at the best tokens per second of any step within the budget), plus reading the decodes' context; and
  that of the decodes alone at the largest batch, plus prompt attention. The requests that count must be done between
  their first arrival and their last latest end (prompts: their last due first token); the costliest of them are left
  out up to the share that may miss.

They hold for step times that grow with each feature and are additive in decode context and prompt attention, as those
of `RooflineModel` are once launches and the jump of large all-reduces are left out (which only makes steps shorter).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from expediter.assembly.presets import load_preset
from expediter.assembly.simulation import SimulationConfig, hardware_of
from expediter.core.errors import ConfigurationError
from expediter.core.plan import StepFeatures
from expediter.perfmodel.calibration import calibrated_engine
from expediter.perfmodel.constants import Engine, engine_named
from expediter.perfmodel.memory import kv_capacity
from expediter.perfmodel.parallelism import Parallelism
from expediter.perfmodel.roofline import RooflineModel
from expediter.scheduling.build import limits_with_budget
from expediter.scheduling.config import SchedulerConfig
from expediter.studies.planning.demand import Demand, Floats, Ints
from expediter.studies.planning.setups import Setup
from expediter.studies.planning.trial import num_may_miss

_ROUNDING: Final = 1 - 1e-9
"""Bounds are made smaller by this factor: they and the simulation round differently."""
_LONG_TOKENS: Final = 1 << 20
_LENDING: Final = frozenset({"splitwise"})
"""Routing policies under which replicas do the others' work at times."""
_SUBSETS: Final = (50.0, 75.0, 90.0, 95.0, 100.0)
"""Percentiles of the time allowed: requests with short deadlines press harder than the average."""


class Bound(NamedTuple):
    """What is certain about a set-up without a simulation.

    Attributes:
        min_replicas: fewer cannot meet the targets.
        reason: why no number of replicas can; None if it may be possible.
        impossible_share: requests that miss in any case.
    """

    min_replicas: int
    reason: str | None = None
    impossible_share: float = 0.0


class _Replica:
    """The step times of one replica, with everything left out that bounds must not count on, and its KV.

    Where a batch is cut into pieces (pipeline stages), as many as possible: with more sequences beside it, a request
    fills a smaller part of each. Attention counts by its mean cost up to very long contexts, which windows make cheap.
    """

    def __init__(self, model: RooflineModel, num_pieces: int, num_kv_tokens: int) -> None:
        self.num_kv_tokens = num_kv_tokens
        self._model = model
        self._pieces = num_pieces
        prompt = StepFeatures(_LONG_TOKENS, num_pieces, 0, 0, 0.0)
        longest = prompt._replace(prefill_attention=_LONG_TOKENS**2 / 2)
        self.attention_s = (model.step_time_s(longest) - model.step_time_s(prompt)) / longest.prefill_attention
        """Time of prompt attention per token squared."""
        decode = StepFeatures(num_pieces, num_pieces, num_pieces, 0, 0.0)
        read_s = model.step_time_s(decode._replace(decode_context_tokens=_LONG_TOKENS)) - model.step_time_s(decode)
        self.context_token_s = read_s / _LONG_TOKENS
        """Time to read one token of decode context."""

    def prompt_s(self, num_tokens: int, prefix: int) -> float:
        """Return the time of a prompt in one step."""
        return self._tokens_s(num_tokens) + self.attention_s * num_tokens * (prefix + num_tokens / 2)

    def decode_s(self, context: int) -> float:
        """Return the time of one token of one request."""
        return self._batch_s(self._pieces) + self.context_token_s * context

    def prompt_token_s(self, budget: int) -> float:
        """Return the least time per token, attention left out, of steps up to `budget` tokens."""
        return min(self._tokens_s(n) / n for n in _sizes(budget))

    def decode_token_s(self, max_num_seqs: int) -> float:
        """Return the least time per token, context left out, of decode steps up to so many sequences."""
        return min(self._batch_s(n) / n for n in _sizes(max_num_seqs))

    def _tokens_s(self, num_tokens: int) -> float:
        return self._model.step_time_s(StepFeatures(num_tokens, self._pieces, 0, 0, 0.0))

    def _batch_s(self, batch: int) -> float:
        return self._model.step_time_s(StepFeatures(batch, batch, batch, 0, 0.0))


class Bounds:
    """Bounds of set-ups against one trace.

    Args:
        base: what all set-ups have in common; of its fields those that a `Setup` has are ignored.
        demand: of the whole trace.
        attainment: share of the requests that must meet their targets.
    """

    def __init__(self, base: SimulationConfig, demand: Demand, attainment: float) -> None:
        self._base = base
        self._demand = demand
        self._num_may_miss = num_may_miss(len(demand), attainment)
        engine = engine_named(base.engine)
        if base.calibration is not None:
            engine = calibrated_engine(base.calibration, engine)
        self._engine = _at_least(engine)
        self._replicas: dict[tuple[str, Parallelism, int], _Replica] = {}
        self._least_ttft_s: dict[tuple[_Replica, bool], Floats] = {}
        self._least_tpot_s: dict[_Replica, Floats] = {}

    def of(self, setup: Setup) -> Bound:
        """Return what is certain about a set-up."""
        try:
            prompts, limits = self._replica(setup, setup.parallelism), self._limits(setup)
            tokens = self._replica(setup, setup.decode_parallelism)
        except ConfigurationError as error:
            return Bound(0, str(error), 1.0)
        demand, caches = self._demand, self._caches(setup)
        ttft_s = self._ttft_s(prompts, caches)
        tpot_s = self._tpot_s(tokens)
        totals = demand.input_tokens + demand.output_tokens
        # The KV of the last token is never stored; where the first token ends the work of a replica, neither is its.
        held = np.where(demand.output_tokens > 1, totals - 1, 0) if setup.is_split else totals - 1
        holds = min(prompts.num_kv_tokens, tokens.num_kv_tokens)
        misses = {
            f"KV of the request exceeds the {holds} tokens that a replica holds": (
                (demand.input_tokens > prompts.num_kv_tokens) | (held > tokens.num_kv_tokens)
            ),
            f"the request is longer than max_model_len ({limits.max_model_len})": totals > limits.max_model_len,
            "TTFT on an idle replica is above its target": ttft_s > demand.ttft_s,
            "TPOT on an idle replica is above its target": tpot_s > demand.tpot_s,
            "E2E on an idle replica is above its target": (ttft_s + tpot_s * (demand.output_tokens - 1) > demand.e2e_s),
        }
        lost = np.logical_or.reduce(list(misses.values()))
        share = float(lost.mean())
        if lost.sum() > self._num_may_miss:
            words, which = max(misses.items(), key=lambda item: int(item[1].sum()))
            return Bound(0, f"{words}, for {which.mean():.1%} of the requests", share)
        work = self._work_s(prompts, tokens, limits, caches)
        return Bound(_least_size(setup, self._least_replicas(work)), None, share)

    def least_work_s(self, setup: Setup) -> tuple[float, float]:
        """Return the least time, on one replica each, of all prompts alone and of all later tokens alone.

        Raises:
            ConfigurationError: the model does not fit.
        """
        prompts, tokens = self._replica(setup, setup.parallelism), self._replica(setup, setup.decode_parallelism)
        work = self._work_s(prompts, tokens, self._limits(setup), self._caches(setup))
        return float((work.computing + work.attention).sum()), float((work.decoding + work.context).sum())

    def _caches(self, setup: Setup) -> bool:
        own = self._base.prefix_caching
        return load_preset(setup.preset).prefix_caching if own is None else own

    def _limits(self, setup: Setup) -> SchedulerConfig:
        preset = load_preset(setup.preset)
        limits = replace(preset.scheduler, max_num_seqs=setup.max_num_seqs(self._base))
        if self._base.max_model_len is not None:
            limits = replace(limits, max_model_len=self._base.max_model_len)
        return limits_with_budget(limits, preset.policy, setup.max_num_batched_tokens)

    def _replica(self, setup: Setup, split: Parallelism) -> _Replica:
        block_size = load_preset(setup.preset).block_size if self._base.block_size is None else self._base.block_size
        key = (setup.gpu, split, block_size)
        if key not in self._replicas:
            shape, gpu = hardware_of(replace(self._base, gpu=setup.gpu))
            num_blocks = self._base.num_blocks
            if num_blocks is None:
                num_blocks = kv_capacity(
                    shape,
                    gpu,
                    split.tensor,
                    block_size,
                    pipeline_parallel=split.pipeline,
                    expert_parallel=split.expert,
                ).num_blocks
            model = RooflineModel(shape, gpu, split.tensor, split.pipeline, split.expert, engine=self._engine)
            self._replicas[key] = _Replica(model, split.pipeline * split.num_groups, num_blocks * block_size)
        return self._replicas[key]

    def _ttft_s(self, replica: _Replica, caches: bool) -> Floats:
        """Return the least time to each request's first token, float64, shape [n]."""
        if (replica, caches) not in self._least_ttft_s:
            demand = self._demand
            # A full hit still computes one token.
            prefix = np.minimum(demand.reusable_tokens, demand.input_tokens - 1) if caches else 0 * demand.input_tokens
            self._least_ttft_s[replica, caches] = _ROUNDING * _per_pair(
                replica.prompt_s, demand.input_tokens - prefix, prefix
            )
        return self._least_ttft_s[replica, caches]

    def _tpot_s(self, replica: _Replica) -> Floats:
        """Return the least time per later token of each request, float64, shape [n]; 0 where there is none."""
        if replica not in self._least_tpot_s:
            demand = self._demand
            tpot_s = _ROUNDING * (replica.decode_s(0) + replica.context_token_s * (demand.input_tokens + 1))
            self._least_tpot_s[replica] = np.where(demand.output_tokens > 1, tpot_s, 0.0)
        return self._least_tpot_s[replica]

    def _work_s(self, prompts: _Replica, tokens: _Replica, limits: SchedulerConfig, caches: bool) -> _WorkS:
        demand = self._demand
        repeated = demand.repeated_tokens if caches else _followers(demand)
        inputs, num_decodes = demand.input_tokens.astype(np.float64), demand.output_tokens - 1
        contexts = num_decodes * (inputs + 1 + (num_decodes - 1) / 2)
        return _WorkS(
            computing=(inputs - repeated) * prompts.prompt_token_s(limits.max_num_batched_tokens),
            attention=(inputs**2 - repeated.astype(np.float64) ** 2) / 2 * prompts.attention_s,
            decoding=num_decodes.astype(np.float64) * tokens.decode_token_s(limits.max_num_seqs),
            context=contexts * tokens.context_token_s,
        )

    def _least_replicas(self, work: _WorkS) -> _Replicas:
        demand = self._demand
        first_s = np.minimum(demand.arrival_s + demand.ttft_s, demand.latest_end_s)
        beside = work.attention + work.context
        return _Replicas(
            prompts=self._pressure(work.computing + work.attention, first_s),
            tokens=self._pressure(work.decoding + work.context, demand.latest_end_s),
            both=max(
                self._pressure(work.computing + beside, demand.latest_end_s),
                self._pressure(work.decoding + beside, demand.latest_end_s),
            ),
        )

    def _pressure(self, work_s: Floats, due_s: Floats) -> float:
        """Return the most work per second of the time that there is for it, over some subsets of the requests."""
        arrival_s, worst = self._demand.arrival_s, 0.0
        allowed_s = due_s - arrival_s
        for percentile in _SUBSETS:
            chosen = allowed_s <= np.percentile(allowed_s, percentile, method="lower")
            if not np.isfinite(due_s[chosen]).all():
                continue
            costs = np.sort(work_s[chosen])
            kept = costs[: max(len(costs) - self._num_may_miss, 0)]
            worst = max(worst, float(kept.sum()) / float(due_s[chosen].max() - arrival_s[chosen].min()))
        return _ROUNDING * worst


class _WorkS(NamedTuple):
    """Least time of each request's parts on one replica, in seconds, float64, shape [n] each."""

    computing: Floats
    attention: Floats
    decoding: Floats
    context: Floats


class _Replicas(NamedTuple):
    """Least number of them, as a fraction: for prompts in time, for later tokens, and if they do both."""

    prompts: float
    tokens: float
    both: float


def _least_size(setup: Setup, least: _Replicas) -> int:
    if not setup.is_split:
        return max(1, math.ceil(max(least)))
    if load_preset(setup.preset).cluster.routing.name in _LENDING:
        return setup.least_size
    size = max(setup.least_size, math.ceil(least.prompts + least.tokens))
    while setup.num_prefill(size) < least.prompts or size - setup.num_prefill(size) < least.tokens:
        size += 1
    return size


def _at_least(engine: Engine) -> Engine:
    return replace(engine, decode_launch_s=0.0, prefill_launch_s=0.0, bulk_all_reduce_factor=0.0)


def _followers(demand: Demand) -> Ints:
    """Return the prompt tokens that a request need not compute although nothing is cached."""
    return np.where(demand.repeated_tokens == demand.input_tokens, demand.repeated_tokens, 0)


def _sizes(largest: int) -> list[int]:
    """Return numbers up to `largest`, it among them, close enough that none between them is much better."""
    return sorted({largest, *(max(1, largest * part // 32) for part in range(1, 32))})


def _per_pair(function: Callable[[int, int], float], first: Ints, second: Ints) -> Floats:
    """Return the function's value of each pair, asked for once per distinct pair."""
    pairs, places = np.unique(np.stack([first, second]), axis=1, return_inverse=True)
    values = np.array([function(int(a), int(b)) for a, b in pairs.T.tolist()], np.float64)
    return values[places.reshape(-1)]
