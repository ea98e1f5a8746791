"""Flags of a simulation, whatever its preset: traffic, targets, hardware and limits."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from expediter.cli.cluster_flags import add_cluster_flags, add_failure_flags, cluster_fields, failures_of
from expediter.cli.sizes import gibibytes, price

if TYPE_CHECKING:
    from expediter.assembly.simulation import SimulationConfig


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
