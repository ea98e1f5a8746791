"""Flags of clusters whose replicas differ or work together, and what a report says of them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from expediter.control.migration import MigrationConfig
    from expediter.sim.failures import FailureConfig
    from expediter.sim.report import Report
    from expediter.sim.stores import StoreConfig


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
        metavar="STYLE",
        help="when KV goes from prefill to decode: pull, push or layerwise (default: the preset's)",
    )
    group.add_argument(
        "--store",
        action="append",
        default=[],
        metavar="TIER:gib=N[,gbs=N]",
        help="keep prompts' KV below the replicas' caches: host or disk (each replica's own) or remote (shared), of so "
        "many GiB, read at so many GB/s (default: what the hardware has); may be repeated",
    )
    group.add_argument(
        "--migrate",
        metavar="every=S[,below=N][,above=N]",
        help="move running requests from replicas whose requests have room for fewer than below tokens each (default: "
        "256) to those with more than above (1024); looked at every so many seconds",
    )


def add_failure_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags that say what goes wrong."""
    group.add_argument(
        "--crash",
        action="append",
        default=[],
        metavar="replica=N,at=S[,down=S]",
        help="lose a replica with its cache; it is back after a cold start, or after down seconds (inf: never)",
    )
    group.add_argument(
        "--slow",
        action="append",
        default=[],
        metavar="replica=N,at=S,for=S[,factor=X]",
        help="let a replica's steps take 3 or X times as long for a while",
    )
    group.add_argument("--crash-every", type=float, metavar="S", help="mean time between random crashes of a replica")
    group.add_argument("--lose-transfers", type=float, metavar="SHARE", help="share of the transfers that never come")
    group.add_argument("--failure-seed", type=int, metavar="N", help="of all that fails at random")


def failures_of(args: argparse.Namespace, base: FailureConfig) -> FailureConfig:
    """Return what goes wrong: what the flags say, and what a file says where they say nothing.

    Raises:
        ConfigurationError: a flag's value cannot be used.
    """
    from dataclasses import replace

    from expediter.sim.failures import Crash, Slowdown

    given: dict[str, Any] = {
        "crash_every_s": args.crash_every,
        "lose_transfers": args.lose_transfers,
        "seed": args.failure_seed,
    }
    if args.crash:
        names = {"replica": "replica", "at": "at_s", "down": "down_s"}
        given["crashes"] = tuple(Crash(**_fields("--crash", text, names, 2)) for text in args.crash)
    if args.slow:
        names = {"replica": "replica", "at": "at_s", "for": "for_s", "factor": "factor"}
        given["slowdowns"] = tuple(Slowdown(**_fields("--slow", text, names, 3)) for text in args.slow)
    return replace(base, **{name: value for name, value in given.items() if value is not None})


def _fields(flag: str, text: str, names: dict[str, str], num_required: int) -> dict[str, Any]:
    """Read NAME=NUMBER,..., of which the first `num_required` names must be there."""
    from expediter.core.errors import ConfigurationError

    found: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            found[names[name]] = int(value) if name == "replica" else float(value)
        except (KeyError, ValueError):
            known = ", ".join(names)
            raise ConfigurationError(f"{flag} {text!r}: {part!r} is not NAME=NUMBER of the names {known}") from None
    missing = [name for name in list(names)[:num_required] if names[name] not in found]
    if missing:
        raise ConfigurationError(f"{flag} {text!r}: {missing[0]} is missing")
    return found


def cluster_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a `SimulationConfig` that the flags set.

    Raises:
        ConfigurationError: a flag's value cannot be used.
    """
    from expediter.assembly.pools import parse_pool

    return {
        "pools": tuple(map(parse_pool, args.pool)),
        "transfer": args.transfer,
        "stores": tuple(map(_store, args.store)),
        "migration": None if args.migrate is None else _migration(args.migrate),
    }


def _migration(text: str) -> MigrationConfig:
    from expediter.control.migration import MigrationConfig

    names = {"every": "interval_s", "below": "source_below_tokens", "above": "target_above_tokens"}
    return MigrationConfig(**_fields("--migrate", text, names, 1))


def _store(text: str) -> StoreConfig:
    from expediter.sim.stores import StoreConfig

    tier, _, rest = text.partition(":")
    found = _fields("--store", rest, {"gib": "gib", "gbs": "gbs"}, 1)
    bandwidth = found["gbs"] * 1e9 if "gbs" in found else None
    return StoreConfig(tier=tier, num_bytes=int(found["gib"] * (1 << 30)), bandwidth=bandwidth)  # type: ignore[arg-type] # checked on construction


def hardware_text(setup: dict[str, Any]) -> str:
    """Return a configuration's replicas in words: number x GPUs of each."""
    pools = [
        f"{pool['replicas']} x {_num_gpus(pool, setup)} {pool.get('gpu', setup['gpu'])} {pool['role']}"
        for pool in setup["pools"]
    ]
    return " + ".join(pools) or f"{setup['replicas']} x {_num_gpus(setup, setup)} {setup['gpu']}"


def _num_gpus(split: dict[str, Any], default: dict[str, Any]) -> int:
    sizes = (split.get(name, default[name]) for name in ("tensor_parallel", "pipeline_parallel", "expert_parallel"))
    from expediter.perfmodel.parallelism import Parallelism

    tensor, pipeline, expert = sizes
    return Parallelism(tensor=tensor, pipeline=pipeline, expert=expert).num_gpus


def cluster_facts(report: Report) -> list[tuple[str, str]]:
    """Return lines of name and text about transfers and failures, if there were any."""
    facts = []
    totals, failures = report.transfers, report.failures
    if totals is not None and (totals.num_transfers or totals.num_lost):
        mean_ms = totals.exposed_s / totals.num_transfers * 1e3 if totals.num_transfers else 0.0
        text = (
            f"{totals.num_transfers} of {totals.num_bytes / 1e9:.3g} GB together, {mean_ms:.4g} ms exposed on average"
        )
        if totals.num_lost:
            text += f"; {totals.num_lost} lost, {totals.num_recomputed} computed again"
        facts.append(("transfers", text))
    if report.num_migrations:
        facts.append(("migrations", f"{report.num_migrations} running requests moved"))
    for tier, store in report.stores.items():
        text = f"{store.num_tokens} prompt tokens for {store.num_fetches} requests, {store.num_bytes / 1e9:.3g} GB"
        facts.append((f"from {tier}", text))
    if failures is not None:
        text = f"{failures.num_crashes} crashes, {failures.down_s:.4g} s down, {failures.num_slowdowns} slowdowns"
        facts.append(("failures", f"{text}; {failures.num_interrupted} requests went on elsewhere"))
    return facts


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
