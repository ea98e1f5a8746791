"""The `expediter serve` command that deploys a set-up, as far as `serve` can."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import NamedTuple

from expediter.assembly.simulation import SimulationConfig
from expediter.studies.planning.setups import Setup


class ServeCommand(NamedTuple):
    """A command line, and what it leaves to do; no line where `serve` cannot do it at all."""

    line: str | None
    notes: tuple[str, ...]


def serve_command(setup: Setup, replicas: int, base: SimulationConfig) -> ServeCommand:
    """Return the command for `replicas` of a set-up.

    The model is its folder if the plan was made from one; else a stand-in for the folder of its weights.
    """
    if setup.is_split:
        return ServeCommand(
            None, ("every replica of `serve` computes prompts and tokens: split ones are only simulated",)
        )
    config = setup.simulation(base, replicas)
    model = config.model if Path(config.model).exists() else f"./{config.model}"
    words = ["expediter", "serve", model, "--replicas", str(replicas), "--preset", setup.preset]
    flags = {
        "--max-num-batched-tokens": config.max_num_batched_tokens,
        "--max-num-seqs": base.max_num_seqs,
        "--max-model-len": config.max_model_len,
        "--block-size": config.block_size,
    }
    for flag, value in flags.items():
        if value is not None:
            words += [flag, str(value)]
    notes = []
    if model != config.model:
        notes.append(f"{model} stands for the folder with the weights of {config.model}")
    if setup.num_gpus(1) > 1:
        notes.append(
            f"each replica spans {setup.num_gpus(1)} GPUs ({setup.split}): the built-in engine runs a replica on one "
            "device, so this needs an engine that spreads one"
        )
    return ServeCommand(shlex.join(words), tuple(notes))
