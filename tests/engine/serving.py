"""The real scheduler and a real executor in one loop, with a record of what happened."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from expediter.core.events import Admitted, Finished, Preempted, Tokens
from expediter.core.plan import TokenLogprobs
from expediter.core.ports import Executor
from expediter.core.request import Carried, Request
from expediter.scheduling.build import CacheConfig, PolicyConfig, build_scheduler
from expediter.scheduling.config import SchedulerConfig


@dataclass
class Served:
    """Tokens by request id, and how they came about."""

    outputs: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs | None]] = field(default_factory=dict)
    num_steps: int = 0
    num_split_prompts: int = 0
    num_mixed_steps: int = 0
    num_preemptions: int = 0
    num_hits: int = 0
    num_restored_tokens: int = 0
    num_copies: int = 0
    num_finished: int = 0

    def assert_stressed(self) -> None:
        """The run proves something only if all of this happened in it."""
        assert self.num_split_prompts > 0
        assert self.num_mixed_steps > 0
        assert self.num_preemptions > 0
        assert self.num_hits > 0


def serve(
    executor: Executor,
    requests: Sequence[Request],
    config: SchedulerConfig,
    *,
    arrival_steps: Sequence[int] = (),
    preemption_mode: str = "recompute",
    group_size: int = 1,
    carried: Mapping[str, Carried] | None = None,
) -> Served:
    """Run the requests to their ends; group i is added before step `arrival_steps[i]`, or at the start.

    Args:
        group_size: so many requests in a row are sequences of one prompt.
        carried: by id of requests that are resumed; only further tokens are recorded of them.
    """
    limits = executor.limits
    scheduler = build_scheduler(
        config=config,
        cache=CacheConfig(
            num_blocks=limits.num_blocks, block_size=limits.block_size, num_host_blocks=limits.num_host_blocks
        ),
        policy=PolicyConfig(preemption_mode=preemption_mode),
    )
    groups = [requests[begin : begin + group_size] for begin in range(0, len(requests), group_size)]
    arrivals = sorted(zip(arrival_steps or [0] * len(groups), groups, strict=True), key=lambda pair: pair[0])
    served = Served({r.request_id: [] for r in requests}, {r.request_id: [] for r in requests})
    step = 0
    while arrivals or scheduler.has_work:
        while arrivals and arrivals[0][0] <= step:
            group = arrivals.pop(0)[1]
            if carried and group[0].request_id in carried:
                scheduler.passage.resume(group[0], carried[group[0].request_id], float(step))
            else:
                scheduler.add_group(group, float(step))
        plan = scheduler.plan(float(step))
        step += 1
        _record(served, plan.events)
        if plan.is_empty:
            assert arrivals, "work is left and nothing is planned"
            continue
        assert plan.features.num_tokens <= config.max_num_batched_tokens
        num_chunks = plan.num_seqs - plan.num_decodes
        served.num_split_prompts += plan.num_seqs - len(np.unique(plan.sampled))
        served.num_copies += plan.copies.shape[1]
        served.num_mixed_steps += plan.num_decodes > 0 and num_chunks > 0
        served.num_steps += 1
        result = executor.execute(plan)
        events = scheduler.apply(result, float(step))
        _record(served, events)
        for event in events:
            if isinstance(event, Tokens) and result.logprobs is not None:
                for state, column in zip(event.states, event.result_index, strict=True):
                    served.logprobs[state.request_id].append(result.logprobs[column])
    assert served.num_finished == len(requests)
    return served


def _record(served: Served, events: Sequence[object]) -> None:
    for event in events:
        if isinstance(event, Tokens):
            for state, tokens in zip(event.states, event.tokens.T, strict=True):
                served.outputs[state.request_id] += np.asarray(tokens).tolist()
        elif isinstance(event, Preempted):
            served.num_preemptions += 1
        elif isinstance(event, Admitted):
            served.num_hits += event.num_cached_tokens > 0 and not event.resumed
            served.num_restored_tokens += event.num_restored_tokens
        elif isinstance(event, Finished):
            served.num_finished += 1
