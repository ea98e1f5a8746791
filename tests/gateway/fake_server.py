"""A server as `expediter serve` makes it, over replicas without a model. Prints the ready line on standard output."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from expediter.assembly.file_config import load_file_config
from expediter.assembly.presets import load_preset
from expediter.assembly.serving import ServeConfig, serve
from expediter.runtime.supervisor import SupervisorConfig
from expediter.telemetry.logging_setup import setup_logging

FAKE_REPLICA = Path(__file__).parents[1] / "runtime" / "fake_replica.py"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--model", default="echo")
    parser.add_argument("--step-s", default="0")
    parser.add_argument("--stall-s", type=float, default=15)
    parser.add_argument("--kill-stalled-s", type=float, default=60)
    parser.add_argument("--max-step-s", type=float, default=300)
    parser.add_argument("--shutdown-timeout", type=float, default=30)
    parser.add_argument("--num-blocks", type=int, default=256)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--api-key", action="append", default=[])
    parser.add_argument("--config")
    parser.add_argument("--ordering", default="fcfs")
    args = parser.parse_args()
    setup_logging("gateway")
    preset = load_preset("sarathi")
    config = ServeConfig(
        model=args.folder,
        model_names=("fake", "also-fake"),
        preset=replace(
            preset,
            scheduler=replace(preset.scheduler, max_num_seqs=args.max_num_seqs, max_explanations=8),
            policy=replace(preset.policy, ordering=args.ordering),
        ),
        port=0,
        num_replicas=args.replicas,
        num_blocks=args.num_blocks,
        api_keys=tuple(args.api_key),
        file=load_file_config(args.config),
        shutdown_timeout_s=args.shutdown_timeout,
        supervisor=SupervisorConfig(
            max_step_s=args.max_step_s,
            stall_s=args.stall_s,
            kill_stalled_s=args.kill_stalled_s,
            min_backoff_s=0.1,
            max_backoff_s=1.0,
        ),
    )
    command = (sys.executable, str(FAKE_REPLICA), "--model", args.model, "--step-s", args.step_s)

    def announce(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    serve(config, announce, replica_command=command)
    return 0


if __name__ == "__main__":
    sys.exit(main())
