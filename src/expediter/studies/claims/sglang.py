"""SGLang: how much of shared prompts a radix cache reuses, and what that is worth in throughput."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappush

import numpy as np

from expediter.assembly.presets import load_preset
from expediter.core.events import Finished, Tokens
from expediter.core.request import Request, RequestState
from expediter.perfmodel.hardware import gpu_named
from expediter.perfmodel.memory import kv_capacity
from expediter.perfmodel.roofline import RooflineModel
from expediter.perfmodel.shapes import shape_named
from expediter.scheduling.build import CacheConfig, build_scheduler, limits_with_budget
from expediter.sim.executor import SimulatedExecutor
from expediter.sim.synthetic_tokens import VOCAB_SIZE
from expediter.studies.claims.driver import Arrival, drive
from expediter.studies.claims.frame import Claim, Conclusion, Effort, Figure, Numbers, Table, number

_NUM_CLIENTS = 64
"""Programs under way at a time: what SGLang's benchmarks run by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Calls of language model programs that share beginnings; sizes are tokens.

    The chains of a group begin with the group's text of `shared` tokens. A chain has `turns` calls, each of which goes
    on from the one before, its answer included, with `own` new tokens.

    Args:
        groups, chains: number of groups, and of chains in each.
        output: (least, most) output tokens, evenly spread.
        own: (least, most) new prompt tokens of a call, evenly spread.
    """

    groups: int
    chains: int
    shared: int
    turns: int
    own: tuple[int, int]
    output: tuple[int, int]


PROGRAMS: Mapping[str, Program] = {
    "few-shot questions": Program(groups=6, chains=246, shared=640, turns=1, own=(48, 160), output=(1, 1)),
    "agents (ReAct)": Program(groups=1, chains=256, shared=1280, turns=4, own=(96, 192), output=(32, 96)),
    "tree of thought": Program(groups=48, chains=8, shared=512, turns=3, own=(64, 128), output=(64, 128)),
    "judge of essays": Program(groups=96, chains=5, shared=768, turns=1, own=(48, 96), output=(48, 96)),
    "chat, short answers": Program(groups=1, chains=256, shared=0, turns=4, own=(256, 512), output=(4, 8)),
    "chat, long answers": Program(groups=1, chains=96, shared=0, turns=4, own=(256, 512), output=(256, 512)),
}
"""In the shape of the paper's. Theirs: 246 questions per subject (MMLU), and what the chats say; the other sizes "
"are ours."""


@dataclass(slots=True)
class _Chain:
    group: int
    prompt: list[int]
    turns_left: int


class ClosedLoop:
    """Clients that run the chains of a program: each sends a call when the one before it has been answered.

    Args:
        num_clients: chains under way at a time, in order of group, as the programs are started.
    Attributes:
        arrivals: what `drive` takes; grows as calls end.
        num_prompt_tokens: of all calls so far.
        num_new_tokens: of those, what nobody had sent or been answered before: an unlimited cache computes these alone.
    """

    def __init__(self, program: Program, *, scale: float, num_clients: int, seed: int = 0) -> None:
        self.arrivals: list[Arrival] = []
        self.num_prompt_tokens = self.num_new_tokens = 0
        self._program = program
        self._rng = np.random.default_rng(seed)
        num_chains = max(2, round(program.chains * scale))
        self._waiting = [_Chain(group, [], program.turns) for group in range(program.groups) for _ in range(num_chains)]
        self._waiting.reverse()
        self._texts: dict[int, list[int]] = {}
        self._under_way: dict[str, _Chain] = {}
        self._num_calls = 0
        for _ in range(min(num_clients, len(self._waiting))):
            self._call(self._waiting.pop(), 0.0)

    def ended(self, request_id: str, output: Sequence[int], now_s: float) -> None:
        """A call has been answered: its chain goes on, or the client takes up the next."""
        chain = self._under_way.pop(request_id)
        chain.prompt.extend(output)
        if chain.turns_left:
            self._call(chain, now_s)
        elif self._waiting:
            self._call(self._waiting.pop(), now_s)

    def _call(self, chain: _Chain, now_s: float) -> None:
        program = self._program
        if not chain.prompt and program.shared:
            if chain.group not in self._texts:
                self._texts[chain.group] = self._tokens(program.shared)
                self.num_new_tokens += program.shared
            chain.prompt.extend(self._texts[chain.group])
        num_own = int(self._rng.integers(program.own[0], program.own[1] + 1))
        chain.prompt.extend(self._tokens(num_own))
        chain.turns_left -= 1
        request = Request(
            request_id=f"{self._num_calls}",
            prompt=np.array(chain.prompt, np.int32),
            max_tokens=int(self._rng.integers(program.output[0], program.output[1] + 1)),
            arrival_s=now_s,
        )
        self._under_way[request.request_id] = chain
        self.num_prompt_tokens += len(chain.prompt)
        self.num_new_tokens += num_own
        heappush(self.arrivals, Arrival(now_s, self._num_calls, request))
        self._num_calls += 1

    def _tokens(self, number_of: int) -> list[int]:
        tokens: list[int] = self._rng.integers(0, VOCAB_SIZE, number_of).tolist()
        return tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A preset, with or without a prefix cache, under a token budget (None: whole prompts)."""

    preset: str
    prefix_caching: bool
    budget: int | None


SYSTEMS: Mapping[str, System] = {
    "sglang": System(preset="sglang", prefix_caching=True, budget=2048),
    "fcfs with cache": System(preset="sarathi", prefix_caching=True, budget=2048),
    "sarathi, no cache": System(preset="sarathi", prefix_caching=False, budget=2048),
    "vllm, no cache": System(preset="vllm", prefix_caching=False, budget=None),
}


def measure(program: Program, system: System, scale: float, *, gpu: str = "a10") -> Numbers:
    """Return hit rate, the most that any order and any cache could reach, and seconds for everything."""
    shape, device = shape_named("llama-2-7b"), gpu_named(gpu)
    preset = load_preset(system.preset)
    limits = limits_with_budget(replace(preset.scheduler, max_model_len=4096), preset.policy, system.budget)
    num_blocks = kv_capacity(shape, device, 1, preset.block_size).num_blocks
    scheduler = build_scheduler(
        config=limits,
        cache=CacheConfig(num_blocks=num_blocks, block_size=preset.block_size, prefix_caching=system.prefix_caching),
        policy=preset.policy,
    )
    executor = SimulatedExecutor(
        num_blocks=num_blocks,
        block_size=preset.block_size,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        step_time=RooflineModel(shape, device, 1),
    )
    clients = ClosedLoop(program, scale=scale, num_clients=_NUM_CLIENTS)
    states: dict[str, RequestState] = {}
    num_cached, end_s = 0, 0.0
    for now_s, events in drive(scheduler, executor, clients.arrivals):
        end_s = now_s
        for event in events:
            if isinstance(event, Tokens):
                states.update((state.request_id, state) for state in event.states.tolist())
            elif isinstance(event, Finished):
                num_cached += event.num_cached_tokens
                clients.ended(event.request_id, states.pop(event.request_id).output, now_s)
    return {
        "hit_rate": num_cached / clients.num_prompt_tokens,
        "optimal": 1 - clients.num_new_tokens / clients.num_prompt_tokens,
        "seconds": end_s,
    }


def _jobs(effort: Effort) -> Mapping[str, Callable[[], Numbers]]:
    scale = 0.25 if effort.quick else 1.0
    jobs: dict[str, Callable[[], Numbers]] = {
        f"{name}/{system}": partial(measure, program, config, scale)
        for name, program in PROGRAMS.items()
        for system, config in SYSTEMS.items()
    }
    for name, program in PROGRAMS.items():
        jobs[f"{name}/a100"] = partial(measure, program, SYSTEMS["sglang"], scale, gpu="a100-80g")
    return jobs


def _conclude(results: Mapping[str, Numbers]) -> Conclusion:
    rows = []
    hits, shares, factors = [], [], []
    for name in PROGRAMS:
        of = {system: results[f"{name}/{system}"] for system in SYSTEMS}
        hit, optimal = of["sglang"]["hit_rate"], of["sglang"]["optimal"]
        hits.append(hit)
        shares.append(hit / optimal)
        factors.append(of["vllm, no cache"]["seconds"] / of["sglang"]["seconds"])
        rows.append(
            (
                name,
                f"{hit:.1%}",
                f"{hit / optimal:.1%}",
                f"{of['fcfs with cache']['hit_rate'] / optimal:.1%}",
                number(factors[-1]),
                number(of["sarathi, no cache"]["seconds"] / of["sglang"]["seconds"]),
                number(of["fcfs with cache"]["seconds"] / of["sglang"]["seconds"]),
            )
        )
    figures = (
        Figure(what="least hit rate of the programs", low=0.5, high=0.99, ours=min(hits)),
        Figure(what="largest hit rate of the programs", low=0.5, high=0.99, ours=max(hits)),
        Figure(
            what="hit rate as a share of the optimum, mean",
            low=0.96,
            high=0.96,
            ours=float(np.mean(shares)),
        ),
        Figure(
            what="largest gain in throughput over vLLM without a prefix cache",
            low=6.4,
            high=6.4,
            ours=max(factors),
            unit="x",
        ),
    )
    table = Table(
        title="Programs (throughput of sglang, as a multiple of each)",
        columns=(
            "program",
            "hit rate",
            "of optimum",
            "fcfs: of optimum",
            "x vllm, no cache",
            "x sarathi, no cache",
            "x sarathi with cache",
        ),
        rows=tuple(rows),
    )
    large = [results[f"{name}/a100"] for name in PROGRAMS]
    large_shares = [each["hit_rate"] / each["optimal"] for each in large]
    larger = Table(
        title="The same on a GPU with more memory: hit rates of sglang",
        columns=("program", "A10 (24 GiB)", "A100 (80 GiB)", "A100: of optimum"),
        rows=tuple(
            (name, f"{hit:.1%}", f"{each['hit_rate']:.1%}", f"{share:.1%}")
            for name, hit, each, share in zip(PROGRAMS, hits, large, large_shares, strict=True)
        ),
    )
    why = (
        "What differs is memory. Beside the weights an A10 holds some 14,000 tokens of KV, and 64 chats with long "
        "answers take several times that, so their past is gone when they come back. On an A100 the least hit "
        f"rate is {min(each['hit_rate'] for each in large):.1%} and the mean share of the optimum "
        f"{np.mean(large_shares):.1%}. Arrival order with the same cache comes close where a group's calls come "
        "one after the other, which is most of them; the order earns its keep where many chains are under way at "
        "once."
    )
    return Conclusion(figures=figures, tables=(table, larger), why=why)


CLAIM = Claim(
    name="sglang",
    title="SGLang: hit rates of 50 to 99 %, 96 % of the optimum, up to 6.4 times the throughput",
    source="arXiv 2312.07104 (NeurIPS 2024), section 6",
    workload=(
        "Six kinds of programs in the shape of the paper's: five-shot questions on several subjects, agents with "
        "a common prompt, trees of thought, a judge of essays, and chats of four turns with 256 to 512 new tokens "
        "each and short (4 to 8) or long (256 to 512) answers."
    ),
    objective="64 programs are under way at a time; throughput is calls per second until the last one ends.",
    method=(
        "Llama-2-7B on a modelled A10. A call that goes on from another is sent when that has been answered, and "
        "its prompt holds the answer. Hit rate is prompt tokens reused at first admission. The optimum is what an "
        "unlimited cache reuses in any order. 2048 tokens per step, SGLang's choice for GPUs of that size. The "
        "chunked-prefill baseline is the preset `sarathi`, with and without its prefix cache."
    ),
    jobs=_jobs,
    conclude=_conclude,
)
