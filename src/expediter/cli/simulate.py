"""`expediter simulate`: replay a trace on modelled GPUs."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TextIO

from expediter.cli.cluster_flags import (
    add_cluster_flags,
    add_failure_flags,
    cluster_facts,
    cluster_fields,
    failures_of,
    hardware_text,
    pools_table,
)
from expediter.cli.progress import progress_bar
from expediter.cli.sizes import gibibytes, price

if TYPE_CHECKING:
    from rich.table import Table

    from expediter.assembly.simulation import SimulationConfig
    from expediter.core.explanation import Span
    from expediter.sim.distribution import Distribution
    from expediter.sim.report import GroupReport, Report


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command; imports nothing heavy."""
    parser = subparsers.add_parser(
        "simulate",
        help="replay a trace on modelled GPUs",
        description="Replay a request trace on replicas that run the real scheduler and modelled GPUs.",
    )
    parser.set_defaults(run=run)
    what = parser.add_argument_group("what is asked for")
    add_trace_flags(what)
    what.add_argument(
        "--rate-scale",
        type=float,
        default=1.0,
        metavar="X",
        help="arrival rate as a multiple of the trace's: 2 is twice as fast (default: 1)",
    )
    system = parser.add_argument_group("what serves it")
    system.add_argument(
        "--preset", default="sarathi", metavar="NAME", help="composition of scheduling parts (default: %(default)s)"
    )
    add_hardware_flags(system)
    system.add_argument("--routing", metavar="NAME", help="routing policy instead of the preset's")
    add_limit_flags(parser.add_argument_group("limits of each replica (default: the preset's)"))
    _add_policy_flags(parser.add_argument_group("parts of the policy (default: the preset's; a wrong name lists them)"))
    out = parser.add_argument_group("output")
    out.add_argument(
        "--json", metavar="FILE", help="write the report as JSON; - for standard output, without the table"
    )
    out.add_argument(
        "--timeline", action="store_true", help="add to the JSON how the run went over time, and whole distributions"
    )
    out.add_argument(
        "--explain", action="append", default=[], metavar="ID", help="say what held this request; may be repeated"
    )
    out.add_argument("--events", metavar="FILE", help="write what happened to each request as JSON lines")


def add_trace_flags(what: argparse._ArgumentGroup) -> None:
    """Add what traffic is made of, but for its rate."""
    what.add_argument(
        "--trace", required=True, metavar="NAME|FILE", help="Mooncake jsonl, Azure csv or parquet, own jsonl; or: demo"
    )
    what.add_argument("--limit", type=int, metavar="N", help="only the first N requests")
    what.add_argument(
        "--slo",
        default="ttft=2,tpot=0.1",
        metavar="ttft=S,tpot=S,e2e=S",
        help="targets in seconds of requests without any (default: %(default)s)",
    )
    what.add_argument("--config", metavar="FILE", help="TOML file: SLO classes, failures")
    what.add_argument("--seed", type=int, default=0, help="of the spread of arrivals within coarse ticks (default: 0)")
    what.add_argument("--no-spread-ticks", action="store_true", help="keep arrivals on a trace's coarse ticks")
    what.add_argument("--strict", action="store_true", help="stop at the trace's first defect; else it is left out")


def add_hardware_flags(group: argparse._ArgumentGroup) -> None:
    """Add model, GPUs and replicas."""
    group.add_argument(
        "--model",
        default="llama-3.1-8b",
        metavar="SHAPE",
        help="name, or folder with a config.json (default: %(default)s)",
    )
    group.add_argument(
        "--gpu",
        default="a100-80g",
        metavar="KIND",
        help="GPU of every replica, or a .toml file that describes one (default: %(default)s)",
    )
    group.add_argument(
        "--price",
        type=price,
        action="append",
        default=[],
        metavar="GPU=USD",
        help="dollars per hour; may be repeated",
    )
    group.add_argument("--weight-dtype", metavar="TYPE", help="bf16, fp8 or fp4 (default: the model's)")
    group.add_argument("--kv-dtype", metavar="TYPE", help="bf16 or fp8 (default: the model's)")
    group.add_argument("--tp", type=int, default=1, metavar="N", help="GPUs that share every layer (default: 1)")
    group.add_argument("--pp", type=int, default=1, metavar="N", help="pipeline stages per replica (default: 1)")
    group.add_argument(
        "--ep", type=int, default=1, metavar="N", help="groups of GPUs that share a mixture's experts (default: 1)"
    )
    group.add_argument(
        "--engine", default="vllm", metavar="NAME", help="whose overhead the GPUs carry (default: %(default)s)"
    )
    group.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="measured steps to fit the engine to: a CSV, or a server's steps (docs/perfmodel.md)",
    )
    group.add_argument("--replicas", type=int, default=1, metavar="N", help="replicas behind the router (default: 1)")
    add_cluster_flags(group)
    add_failure_flags(group)


def add_limit_flags(group: argparse._ArgumentGroup) -> None:
    """Add the scheduler's limits under vLLM's names."""
    group.add_argument("--max-num-seqs", type=int, metavar="N", help="running sequences")
    group.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="token budget of a step")
    group.add_argument("--max-model-len", type=int, metavar="N", help="prompt and output tokens of a request")
    group.add_argument("--block-size", type=int, metavar="N", help="tokens per KV block")
    group.add_argument("--num-gpu-blocks-override", type=int, metavar="N", help="KV blocks per replica")
    group.add_argument(
        "--swap-space",
        type=gibibytes,
        default=0,
        metavar="GIB",
        help="host memory per GPU for the KV of preempted requests (default: 0)",
    )


def _add_policy_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--ordering", "--scheduling-policy", metavar="NAME", help="who starts next (the second name is vLLM's)"
    )
    group.add_argument("--batching", metavar="NAME", help="what goes into a step together")
    group.add_argument("--memory", metavar="NAME", help="how many KV blocks a request must find to start")
    group.add_argument("--budget", metavar="NAME", help="how many tokens a step computes")
    group.add_argument("--victims", metavar="NAME", help="who gives way when blocks run out")
    group.add_argument("--preemption-mode", metavar="NAME", help="recompute, swap, or the cheaper of them")


def shared_config(args: argparse.Namespace) -> SimulationConfig:
    """Return the configuration that targets, hardware and limits give, whatever the preset.

    Raises:
        ConfigurationError: a flag cannot be used.
    """
    from expediter.assembly.file_config import load_file_config
    from expediter.assembly.simulation import SimulationConfig
    from expediter.core.slo import parse_slo

    file_config = load_file_config(args.config)
    return SimulationConfig(
        model=args.model,
        gpu=args.gpu,
        prices=dict(args.price),
        weight_dtype=args.weight_dtype,
        kv_dtype=args.kv_dtype,
        tensor_parallel=args.tp,
        pipeline_parallel=args.pp,
        expert_parallel=args.ep,
        engine=args.engine,
        calibration=args.calibration,
        replicas=args.replicas,
        **cluster_fields(args),
        failures=failures_of(args, file_config.failures),
        slo=parse_slo(args.slo),
        slo_classes=file_config.slo_classes,
        tenant_weights=file_config.weights,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        block_size=args.block_size,
        num_blocks=args.num_gpu_blocks_override,
        swap_space_bytes=args.swap_space,
    )


def run(args: argparse.Namespace) -> int:
    """Simulate, print, and write what was asked for.

    Raises:
        ConfigurationError: the trace or a flag cannot be used.
    """
    from expediter.assembly.simulation import build_simulation, prepare_trace

    config = replace(
        shared_config(args),
        preset=args.preset,
        routing=args.routing,
        ordering=args.ordering,
        batching=args.batching,
        memory=args.memory,
        budget=args.budget,
        victims=args.victims,
        preemption_mode=args.preemption_mode,
        timeline=args.timeline,
    )
    trace = prepare_trace(
        args.trace,
        rate_scale=args.rate_scale,
        limit=args.limit,
        seed=args.seed,
        spread_ticks=not args.no_spread_ticks,
        strict=args.strict,
    )
    for line in trace.defects:
        print(f"expediter: {line}", file=sys.stderr)
    simulation = build_simulation(config)
    with output_file(args.events) as events, output_file(None if args.json == "-" else args.json) as json_file:
        with progress_bar("simulating", "requests", len(trace)) as progress:
            report = simulation.run(trace, events=events, progress=progress, explain=args.explain)
        if json_file is not None:
            json_file.write(report.to_json())
    if args.json == "-":
        sys.stdout.write(report.to_json().decode())
    else:
        _print_report(report)
    for request_id in args.explain:
        # Standard output belongs to the JSON if that was asked for.
        _print_explanation(request_id, simulation.explanations, sys.stderr if args.json == "-" else sys.stdout)
    return 0


def _print_explanation(request_id: str, explanations: Mapping[str, tuple[Span, ...]], file: TextIO) -> None:
    from expediter.core.errors import ConfigurationError
    from expediter.core.explanation import timeline

    spans = explanations.get(request_id)
    if spans is None:
        raise ConfigurationError(f"no request {request_id!r}; the trace's are r0000000, r0000001 and so on")
    print(f"{request_id} arrived at {spans[0].from_s:.3f} s", file=file)
    print(*timeline(spans), sep="\n", file=file)


@contextlib.contextmanager
def output_file(name: str | None) -> Iterator[BinaryIO | None]:
    """Open an output file before the work is done, so that a bad path costs no simulation."""
    from expediter.core.errors import ConfigurationError

    if name is None:
        yield None
        return
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(Path(name).open("wb"))
        except OSError as error:
            raise ConfigurationError(f"cannot write {name!r}: {error.strerror}") from error
        yield file


def _print_report(report: Report) -> None:
    from rich.console import Console

    console = Console()
    setup = report.configuration
    console.print(
        f"[bold]{setup['model']}[/] on {hardware_text(setup)}, preset "
        f"{setup['preset']}, {setup['policy']['ordering']}, {setup['routing']}, {setup['num_blocks']} blocks of "
        f"{setup['block_size']} tokens each"
    )
    if report.trace is not None:
        trace = report.trace
        rate = "all at once" if trace.mean_rate_rps is None else f"{trace.mean_rate_rps:.2f} requests/s"
        reuse = "" if trace.prefix_reuse is None else f", {trace.prefix_reuse:.1%} of the prompt tokens reusable"
        console.print(
            f"[bold]{trace.name}[/] {rate}, input {trace.input_tokens_mean:.0f} tokens, output "
            f"{trace.output_tokens_mean:.0f} on average{reuse}"
        )
    console.print(_latency_table(report))
    for name, groups in (("class", report.classes), ("tenant", report.tenants)):
        if groups:
            console.print(_groups_table(name, groups))
    if len(report.pools) > 1:
        console.print(pools_table(report))
    console.print(_facts_table(report))


def _latency_table(report: Report) -> Table:
    from rich.table import Table

    latency = Table(
        "seconds",
        "mean",
        "p50",
        "p90",
        "p99",
    )
    for column in latency.columns[1:]:
        column.justify = "right"
    for name, values in (
        ("queueing", report.queueing_s),
        ("TTFT", report.ttft_s),
        ("TPOT", report.tpot_s),
        ("E2E", report.e2e_s),
    ):
        latency.add_row(name, *_cells(values))
    return latency


def _groups_table(name: str, groups: Mapping[str, GroupReport]) -> Table:
    from rich.table import Table

    table = Table(name, "arrived", "attained", "goodput", "TTFT p50", "TTFT p99", "TPOT p99")
    for column in table.columns[1:]:
        column.justify = "right"
    for key, group in groups.items():
        latencies = (group.ttft_s.p50, group.ttft_s.p99, group.tpot_s.p99)
        table.add_row(
            key or "-",
            str(group.arrived),
            _percent(group.slo_attainment),
            _number(group.goodput_rps),
            *map(_number, latencies),
        )
    return table


def _facts_table(report: Report) -> Table:
    from rich.table import Table

    counts = report.requests
    facts = Table.grid(padding=(0, 2))
    for name, text in (
        (
            "requests",
            f"{counts.arrived} arrived = {counts.finished} finished + {counts.rejected} rejected + "
            f"{counts.unservable} unservable + {counts.aborted} aborted",
        ),
        ("SLO", f"{_targets(report)}: attained by {_percent(report.slo_attainment)}"),
        ("missed", _by_name({_MISSED[name]: str(n) for name, n in report.missed.items()}) or "0"),
        ("goodput", f"{_number(report.goodput_rps)} requests/s, {_number(report.goodput_rps_per_gpu)} per GPU"),
        ("output", f"{_number(report.output_tokens_per_s)} tokens/s"),
        *_cost(report),
        ("prefix hit rate", _percent(report.prefix_hit_rate)),
        ("preemptions", _by_name({name: str(n) for name, n in report.decisions.preemptions.items()}) or "0"),
        ("waiting", _by_name({name: f"{s:.4g} s" for name, s in report.decisions.held_s.items()}) or "-"),
        ("token budget", f"{_percent(report.decisions.budget_used_share)} used by steps with prompts"),
        *cluster_facts(report),
        ("steps", f"{report.num_steps} in {report.simulated_s:.1f} s simulated, {report.wall_s:.2f} s real"),
    ):
        facts.add_row(name, text)
    return facts


def _cost(report: Report) -> list[tuple[str, str]]:
    if report.cost_per_hour is None:
        return []
    per_million = f", {_number(report.cost_per_million_output_tokens)} per million output tokens"
    return [("cost", f"${_number(report.cost_per_hour)} per hour for {report.num_gpus} GPUs{per_million}")]


_MISSED = {"served": "not served", "ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E"}


def _cells(values: Distribution) -> list[str]:
    return [_number(value) for value in (values.mean, values.p50, values.p90, values.p99)]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _by_name(values: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _targets(report: Report) -> str:
    targets = (("TTFT", report.slo.ttft_s), ("TPOT", report.slo.tpot_s), ("E2E", report.slo.e2e_s))
    return ", ".join(f"{name} <= {value:g} s" for name, value in targets if value is not None)
