"""Runs the clients that have an environment of their own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path


def run(command: Sequence[str | Path]) -> str:
    """Return what a command prints; its failure is the test's."""
    # Importing our engine sets HF_HUB_OFFLINE for this process; with it, AIPerf takes no folder for a tokenizer.
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout
