"""`expediter plan`: the cheapest GPUs that meet the targets."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from expediter.cli.again import command_again
from expediter.cli.progress import progress_bar
from expediter.cli.simulate import output_file

if TYPE_CHECKING:
    from expediter.assembly.simulation import SimulationConfig
    from expediter.studies.planning.setups import SearchSpace
    from expediter.studies.planning.trial import Traffic

_Number = TypeVar("_Number", int, float)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command; imports nothing heavy."""
    parser = subparsers.add_parser(
        "plan",
        help="find the cheapest GPUs that meet the targets",
        description="Search for the cheapest set-ups that meet the targets, by bounds and simulation.",
    )
    parser.set_defaults(run=run)
    _add_traffic_flags(parser.add_argument_group("what is asked for: a trace, or a rate with lengths"))
    what = parser.add_argument_group("targets")
    what.add_argument(
        "--slo",
        default="ttft=2,tpot=0.1",
        metavar="ttft=S,tpot=S,e2e=S",
        help="targets in seconds of requests without any (default: %(default)s)",
    )
    what.add_argument("--config", metavar="FILE", help="TOML file with the SLO classes that the trace names")
    what.add_argument(
        "--attainment",
        type=float,
        default=0.99,
        metavar="X",
        help="share of the requests that must meet all their targets (default: %(default)s)",
    )
    _add_space_flags(parser.add_argument_group("what may be chosen; lists are comma-separated"))
    effort = parser.add_argument_group("how hard to look")
    effort.add_argument("--top", type=int, default=5, metavar="N", help="set-ups to find (default: %(default)s)")
    effort.add_argument(
        "--seeds", type=int, default=3, metavar="N", help="draws of the traffic that must be served (default: 3)"
    )
    effort.add_argument(
        "--max-simulations", type=int, default=400, metavar="N", help="most simulations (default: %(default)s)"
    )
    effort.add_argument(
        "--budget-s", type=float, metavar="S", help="most seconds; the answer may then depend on the machine"
    )
    effort.add_argument("--workers", type=int, metavar="N", help="processes (default: one per CPU)")
    out = parser.add_argument_group("output")
    out.add_argument("--json", metavar="FILE", help="write the plan as JSON; - for standard output, without tables")
    out.add_argument("--html", metavar="FILE", help="write a page with the plots, which needs nothing but itself")


def _add_traffic_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--trace", metavar="NAME|FILE", help="Mooncake jsonl, Azure csv or parquet, own jsonl; or: demo")
    group.add_argument(
        "--rate-scale", type=float, default=1.0, metavar="X", help="rate as a multiple of the trace's (default: 1)"
    )
    group.add_argument("--limit", type=int, metavar="N", help="only the trace's first N requests")
    group.add_argument("--rate", type=float, metavar="X", help="mean requests/s of generated traffic")
    group.add_argument(
        "--cv", type=float, default=1.0, help="variation of the gaps between them; 1 is Poisson (default: 1)"
    )
    group.add_argument(
        "--input-tokens", metavar="MEAN[,CV]", help="lognormal prompt lengths (default: 1024,1; with --rate)"
    )
    group.add_argument(
        "--output-tokens", metavar="MEAN[,CV]", help="lognormal output lengths (default: 256,1; with --rate)"
    )
    group.add_argument(
        "--requests", type=int, metavar="N", help="length of generated traffic (default: 1000; with --rate)"
    )
    group.add_argument("--seed", type=int, default=0, help="of the traffic's first draw (default: 0)")


def _add_space_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model", default="llama-3.1-8b", metavar="SHAPE", help="name, or folder with a config.json (default: 8B)"
    )
    group.add_argument("--weight-dtype", metavar="TYPE", help="bf16, fp8 or fp4 (default: the model's)")
    group.add_argument("--kv-dtype", metavar="TYPE", help="bf16 or fp8 (default: the model's)")
    group.add_argument(
        "--gpu",
        action="append",
        default=[],
        metavar="KIND[=PRICE]",
        help="kind that may be used, in US dollars per GPU and hour if not at list price; repeatable (default: all)",
    )
    group.add_argument("--tp", metavar="N,N", help="GPUs that share each layer (default: powers of two within a node)")
    group.add_argument("--pp", default="1,2", metavar="N,N", help="pipeline stages (default: %(default)s)")
    group.add_argument("--ep", default="1", metavar="N,N", help="groups that share experts (default: %(default)s)")
    group.add_argument(
        "--preset",
        default="sarathi,sglang,expediter,distserve",
        metavar="NAME,NAME",
        help="compositions of scheduling parts (default: %(default)s)",
    )
    group.add_argument(
        "--prefill-share",
        default="0.25,0.5,0.75",
        metavar="X,X",
        help="of the replicas, for presets that compute prompts on their own ones (default: %(default)s)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        default="512,2048,8192",
        metavar="N,N",
        help="token budgets of a step (default: %(default)s)",
    )
    group.add_argument("--max-gpus", type=int, default=64, metavar="N", help="most GPUs in all (default: %(default)s)")
    group.add_argument("--max-model-len", type=int, metavar="N", help="prompt and output tokens of a request")
    group.add_argument("--max-num-seqs", type=int, metavar="N", help="running sequences of a replica")
    group.add_argument(
        "--engine", default="vllm", metavar="NAME", help="whose overhead the GPUs carry (default: %(default)s)"
    )
    group.add_argument("--calibration", type=Path, metavar="FILE", help="measured steps (docs/perfmodel.md)")


def run(args: argparse.Namespace) -> int:
    """Plan, print, and write what was asked for; 1 if nothing meets the targets.

    Raises:
        ConfigurationError: the traffic or a flag cannot be used.
    """
    from expediter.cli.plan_tables import print_plan
    from expediter.studies.planning.page import plan_page
    from expediter.studies.planning.planner import PlanConfig, make_plan
    from expediter.studies.workers import Workers

    config = PlanConfig(
        traffic=_traffic(args),
        space=_space(args),
        base=_base(args),
        attainment=args.attainment,
        top=args.top,
        seeds=args.seeds,
        max_simulations=args.max_simulations,
        max_s=args.budget_s,
    )
    json_name = None if args.json == "-" else args.json
    with output_file(json_name) as json_file, output_file(args.html) as html_file:
        shown = progress_bar("planning", "simulations at most", config.max_simulations)
        with Workers(args.workers) as workers, shown as bar:
            told = None if bar is None else lambda doing, num_done: bar(num_done, doing)
            plan = make_plan(config, workers, told)
        if json_file is not None:
            json_file.write(plan.to_json())
        if html_file is not None:
            html_file.write(plan_page(plan, command_again(args.words, "plan.html")).encode())
    if args.json == "-":
        sys.stdout.write(plan.to_json().decode())
    else:
        print_plan(plan)
    return 0 if plan.choices else 1


def _traffic(args: argparse.Namespace) -> Traffic:
    from expediter.assembly.trace_generation import GenerationConfig
    from expediter.core.errors import ConfigurationError
    from expediter.studies.runs import TraceSpec

    if (args.trace is None) == (args.rate is None):
        raise ConfigurationError("say what to serve: either --trace, or --rate with lengths")
    if args.trace is not None:
        for name in ("input_tokens", "output_tokens", "requests"):
            if getattr(args, name) is not None:
                raise ConfigurationError(
                    f"--{name.replace('_', '-')} is for generated traffic (--rate), not for a trace"
                )
        return TraceSpec(name=args.trace, rate_scale=args.rate_scale, limit=args.limit, seed=args.seed)
    input_mean, input_cv = _lengths(args.input_tokens or "1024", "--input-tokens")
    output_mean, output_cv = _lengths(args.output_tokens or "256", "--output-tokens")
    return GenerationConfig(
        num_requests=1000 if args.requests is None else args.requests,
        rate_rps=args.rate * args.rate_scale,
        cv=args.cv,
        input_mean=input_mean,
        input_cv=input_cv,
        output_mean=output_mean,
        output_cv=output_cv,
        seed=args.seed,
    )


def _lengths(text: str, flag: str) -> tuple[float, float]:
    """Return MEAN and CV of `MEAN[,CV]`; 1 if the latter is left out."""
    from expediter.core.errors import ConfigurationError

    mean, has_cv, cv = text.partition(",")
    try:
        return float(mean), float(cv) if has_cv else 1.0
    except ValueError:
        raise ConfigurationError(f"{flag} takes MEAN or MEAN,CV, not {text!r}") from None


def _numbers(text: str, flag: str, kind: Callable[[str], _Number]) -> tuple[_Number, ...]:
    from expediter.core.errors import ConfigurationError

    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise ConfigurationError(f"{flag} takes {what} with commas between them, not {text!r}") from None


def _space(args: argparse.Namespace) -> SearchSpace:
    from expediter.core.errors import ConfigurationError
    from expediter.perfmodel.hardware import GPU_NAMES, gpu_named
    from expediter.studies.planning.setups import SearchSpace

    prices: dict[str, float] = {}
    for text in args.gpu or GPU_NAMES:
        kind, has_price, price = text.partition("=")
        try:
            prices[kind] = float(price) if has_price else gpu_named(kind).price_per_hour
        except ValueError:
            raise ConfigurationError(f"--gpu takes KIND or KIND=DOLLARS, not {text!r}") from None
    return SearchSpace(
        gpus=prices,
        tensor_parallel=() if args.tp is None else _numbers(args.tp, "--tp", int),
        pipeline_parallel=_numbers(args.pp, "--pp", int),
        expert_parallel=_numbers(args.ep, "--ep", int),
        presets=tuple(args.preset.split(",")),
        prefill_shares=_numbers(args.prefill_share, "--prefill-share", float),
        budgets=_numbers(args.max_num_batched_tokens, "--max-num-batched-tokens", int),
        max_gpus=args.max_gpus,
    )


def _base(args: argparse.Namespace) -> SimulationConfig:
    from expediter.assembly.file_config import load_file_config
    from expediter.assembly.simulation import SimulationConfig
    from expediter.core.slo import parse_slo

    return SimulationConfig(
        model=args.model,
        weight_dtype=args.weight_dtype,
        kv_dtype=args.kv_dtype,
        slo=parse_slo(args.slo),
        slo_classes=load_file_config(args.config).slo_classes,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        engine=args.engine,
        calibration=args.calibration,
    )
