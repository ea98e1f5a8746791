"""A simulation's report as tables in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from expediter.cli.cluster_flags import cluster_facts, hardware_text, pools_table

if TYPE_CHECKING:
    from rich.table import Table

    from expediter.sim.distribution import Distribution
    from expediter.sim.report import GroupReport, Report


def print_report(report: Report) -> None:
    """Print what a simulation came to, as tables."""
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
