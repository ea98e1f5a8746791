"""Traces by name or by file."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from expediter.sim.trace import Trace
from expediter.sim.trace_readers import read_trace

_NAMED = {"demo": "mooncake_conversation_slice.jsonl"}
TRACE_NAMES = tuple(_NAMED)


def load_trace(name: str | Path, *, seed: int = 0, spread_ticks: bool = True) -> Trace:
    """Return a trace that comes with Expediter, or read one from a file.

    Args:
        name: one of TRACE_NAMES, or a path; `./demo` is a path.
        seed, spread_ticks: as in `read_trace`.
    Raises:
        TraceError: there is neither a name nor a readable file like that.
    """
    if str(name) in _NAMED:
        with resources.as_file(resources.files("expediter.assembly") / "data" / _NAMED[str(name)]) as path:
            return read_trace(path, seed=seed, spread_ticks=spread_ticks)
    return read_trace(name, seed=seed, spread_ticks=spread_ticks)
