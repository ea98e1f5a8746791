"""Flags of clusters whose replicas differ or work together, and what a report says of them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from expediter.sim.report import Report


def add_cluster_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags to a group."""
    group.add_argument(
        "--pool",
        action="append",
        default=[],
        metavar="ROLE:NAME=VALUE,...",
        help="replicas of a role in place of --tp, --pp, --ep and --replicas, such as prefill:replicas=2,tp=2; "
        "may be repeated (roles: prefill, decode, mixed; names: replicas, tp, pp, ep, gpu, blocks)",
    )
    group.add_argument(
        "--transfer",
        default="pull",
        metavar="STYLE",
        help="when KV goes from prefill to decode: pull, push or layerwise (default: %(default)s)",
    )


def cluster_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a `SimulationConfig` that the flags set.

    Raises:
        ConfigurationError: a flag's value cannot be used.
    """
    from expediter.assembly.pools import parse_pool

    return {"pools": tuple(map(parse_pool, args.pool)), "transfer": args.transfer}


def hardware_text(setup: dict[str, Any]) -> str:
    """Return a configuration's replicas in words: number x GPUs of each."""
    pools = [
        f"{pool['replicas']} x {pool['tensor_parallel'] * pool['pipeline_parallel']} "
        f"{pool.get('gpu', setup['gpu'])} {pool['role']}"
        for pool in setup["pools"]
    ]
    return " + ".join(pools) or f"{setup['replicas']} x {setup['tensor_parallel']} {setup['gpu']}"


def cluster_facts(report: Report) -> list[tuple[str, str]]:
    """Return lines of name and text about transfers, if there could be any."""
    totals = report.transfers
    if totals is None:
        return []
    mean_ms = totals.exposed_s / totals.num_transfers * 1e3 if totals.num_transfers else 0.0
    text = f"{totals.num_transfers} of {totals.num_bytes / 1e9:.3g} GB together, {mean_ms:.4g} ms exposed on average"
    if totals.num_lost:
        text += f"; {totals.num_lost} lost, {totals.num_recomputed} computed again"
    return [("transfers", text)]


def pools_table(report: Report) -> Table:
    """Return a table of the pools."""
    from rich.table import Table

    table = Table("pool", "replicas", "GPUs", "busy", "steps")
    for column in table.columns[1:]:
        column.justify = "right"
    for pool in report.pools:
        busy = "-" if pool.busy_share is None else f"{pool.busy_share:.1%}"
        table.add_row(pool.role, str(pool.replicas), str(pool.num_gpus), busy, str(pool.num_steps))
    return table
