"""What the benchmarks share: timing on the thread's CPU clock, and the table they print."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

Row = dict[str, Any]


def cpu_us(function: Callable[[], object]) -> float:
    """Return the CPU time of this thread that one call takes, in microseconds."""
    start = time.thread_time_ns()
    function()
    return (time.thread_time_ns() - start) / 1e3


def spread(samples: Sequence[float]) -> Row:
    """Return median and minimum."""
    return {"median_us": round(statistics.median(samples), 2), "min_us": round(min(samples), 2)}


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the table there")


def machine() -> Row:
    """Return what the figures depend on."""
    return {"python": platform.python_version(), "numpy": np.__version__, "machine": platform.machine()}


def publish(title: str, rows: Sequence[Row], path: Path | None) -> None:
    """Print the rows as a table and write them, with the machine they were measured on, if a path is given."""
    table = Table(title=title)
    for column in rows[0]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console(width=140).print(table)
    if path is not None:
        path.write_text(json.dumps({"title": title, "machine": machine(), "rows": list(rows)}, indent=2) + "\n")
