"""A decision tree for serving systems beside what the planner finds, on six workloads.

The tree asks three questions: is the output structured (then SGLang), are more than 1,000 requests per second expected
(if not, vLLM on one machine), and are prompts more than 30 % of the work (then DistServe or Mooncake, else vLLM with
chunked prefill). Systems are the presets of their names; vLLM with chunked prefill is `sarathi`. The share of the
prompts is that of the time that prompts and outputs take, each alone at its best, on one replica.

For each workload the planner looks for the cheapest set-up on A100 and H100: among the presets of the tree's answer,
among those that it would name for more than 1,000 requests per second (served here at the workload's own rate: more
of the same takes more replicas), and among all. `--workload NAME` runs one of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.report import Row, add_json_option, publish
from expediter.assembly.simulation import SimulationConfig
from expediter.assembly.trace_generation import GenerationConfig
from expediter.core.slo import Slo
from expediter.sim.trace_generators import PrefixTree, Sessions
from expediter.studies.planning.answer import Choice, Plan
from expediter.studies.planning.bounds import Bounds
from expediter.studies.planning.demand import demand_of
from expediter.studies.planning.planner import PlanConfig, make_plan
from expediter.studies.planning.setups import SearchSpace, Setup
from expediter.studies.planning.trial import load_traffic
from expediter.studies.workers import Workers

MODEL = "llama-3.1-70b"
GPUS = {"a100-80g": 2.70, "h100": 6.16}
PRESETS = ("vllm", "sarathi", "sglang", "expediter", "distserve", "mooncake")
MANY_RPS = 1000.0
MOSTLY_PROMPTS = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Who asks for what.

    Args:
        is_structured: whether outputs follow a grammar; that changes the tree's answer, and nothing in a simulation.
    """

    traffic: GenerationConfig
    slo: Slo
    is_structured: bool = False


WORKLOADS = {
    "conversation": Workload(
        traffic=GenerationConfig(
            shape=Sessions(turns_mean=5, pause_mean_s=30, system_tokens=256),
            num_requests=700,
            rate_rps=2.5,
            input_mean=256,
            output_mean=220,
        ),
        slo=Slo(ttft_s=1.0, tpot_s=0.08),
    ),
    "code": Workload(
        traffic=GenerationConfig(num_requests=800, rate_rps=8, cv=3, input_mean=2048, output_mean=28, output_cv=2),
        slo=Slo(ttft_s=2.0, tpot_s=0.1),
    ),
    "long shared prefix": Workload(
        traffic=GenerationConfig(
            shape=PrefixTree(depth=2, branches=16, node_tokens=8192),
            num_requests=500,
            rate_rps=8,
            input_mean=512,
            output_mean=200,
        ),
        slo=Slo(ttft_s=2.0, tpot_s=0.1),
    ),
    "reasoning": Workload(
        traffic=GenerationConfig(num_requests=300, rate_rps=2, input_mean=500, output_mean=3000, output_cv=0.7),
        slo=Slo(ttft_s=2.0, tpot_s=0.05),
    ),
    "batch": Workload(
        traffic=GenerationConfig(num_requests=700, rate_rps=10, input_mean=1500, output_mean=300),
        slo=Slo(e2e_s=60.0),
    ),
    "agents": Workload(
        traffic=GenerationConfig(
            shape=Sessions(turns_mean=12, pause_mean_s=2, system_tokens=4096),
            num_requests=700,
            rate_rps=1.2,
            input_mean=768,
            output_mean=128,
        ),
        slo=Slo(ttft_s=1.5, tpot_s=0.08),
        is_structured=True,
    ),
}


def prompt_share(workload: Workload) -> float:
    """Return the prompts' share of the work, on a replica of four H100."""
    trace = load_traffic(workload.traffic, 0)
    setup = Setup(gpu="h100", price_per_hour=1.0, tensor_parallel=4, preset="sarathi")
    bounds = Bounds(SimulationConfig(model=MODEL), demand_of(trace, workload.slo, {}), 1.0)
    prompts_s, outputs_s = bounds.least_work_s(setup)
    return prompts_s / (prompts_s + outputs_s)


def answer_of_the_tree(workload: Workload, share: float, rate_rps: float) -> tuple[str, ...]:
    """Return the presets that the tree names, if so many requests per second are expected."""
    if workload.is_structured:
        return ("sglang",)
    if rate_rps <= MANY_RPS:
        return ("vllm",)
    return ("distserve", "mooncake") if share > MOSTLY_PROMPTS else ("sarathi",)


def plan_for(workload: Workload, presets: Sequence[str], workers: Workers) -> Plan:
    """Return the planner's answer within those presets."""
    question = PlanConfig(
        traffic=workload.traffic,
        base=SimulationConfig(model=MODEL, slo=workload.slo, max_model_len=40_960),
        space=SearchSpace(
            gpus=GPUS,
            tensor_parallel=(4, 8),
            pipeline_parallel=(1,),
            presets=presets,
            prefill_shares=(0.25, 0.5),
            max_gpus=64,
        ),
        attainment=0.95,
        top=1,
        seeds=2,
    )
    return make_plan(question, workers)


def said(choice: Choice | None) -> Row:
    """Return a choice in a few cells."""
    if choice is None:
        return {"set-up": "none", "$/h": "-", "attained": "-", "bears": "-", "breaks first": "-"}
    point = choice.point
    return {
        "set-up": point.setup.describe(point.replicas),
        "$/h": round(point.cost_per_hour, 2),
        "attained": f"{min(point.attainments):.1%}",
        "bears": choice.bears,
        "breaks first": f"{choice.limit.target.upper()} {choice.limit.cause}",
    }


def rows_of(name: str, workers: Workers) -> list[Row]:
    """Return a row for the tree's answer and one for the planner's."""
    workload = WORKLOADS[name]
    share = prompt_share(workload)
    named = {
        "tree": answer_of_the_tree(workload, share, workload.traffic.rate_rps or 0.0),
        "tree, many requests": answer_of_the_tree(workload, share, 2 * MANY_RPS),
        "plan": PRESETS,
    }
    rows = []
    for who, presets in named.items():
        if who == "tree, many requests" and presets == named["tree"]:
            continue
        plan = plan_for(workload, presets, workers)
        choice = plan.choices[0] if plan.choices else None
        rows.append(
            {"workload": name, "prompts": f"{share:.0%}", "by": who, **said(choice), "runs": plan.num_simulations}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="only this one; may be repeated")
    parser.add_argument("--workers", type=int)
    add_json_option(parser)
    args = parser.parse_args()
    with Workers(args.workers) as workers:
        rows = [row for name in args.workload or WORKLOADS for row in rows_of(name, workers)]
    publish(f"{MODEL}, 95 % of the requests in time", rows, args.json)


if __name__ == "__main__":
    main()
