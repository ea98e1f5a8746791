"""Traces by name or by file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

from expediter.sim.trace import Trace, TraceError
from expediter.sim.trace_readers import read_trace, stream_trace
from expediter.sim.trace_rows import Defects, TraceRow

_NAMED = {"demo": "mooncake_conversation_slice.jsonl"}
TRACE_NAMES = tuple(_NAMED)


@contextmanager
def _file_of(name: str | Path) -> Iterator[Path]:
    if str(name) in _NAMED:
        with resources.as_file(resources.files("expediter.assembly") / "data" / _NAMED[str(name)]) as path:
            yield path
        return
    try:
        yield Path(name)
    except TraceError as error:
        if Path(name).is_file():
            raise
        raise TraceError(f"{error}. Traces that come with Expediter: {', '.join(TRACE_NAMES)}") from None


def load_trace(name: str | Path, *, seed: int = 0, spread_ticks: bool = True, strict: bool = False) -> Trace:
    """Return a trace that comes with Expediter, or read one from a file.

    Args:
        name: one of TRACE_NAMES, or a path; `./demo` is a path.
        seed, spread_ticks, strict: as in `read_trace`.
    Raises:
        TraceError: there is neither a name nor a readable file like that.
    """
    with _file_of(name) as path:
        return read_trace(path, seed=seed, spread_ticks=spread_ticks, strict=strict)


def open_trace(
    name: str | Path, *, seed: int = 0, spread_ticks: bool = True, strict: bool = False
) -> tuple[Iterator[TraceRow], Defects]:
    """Return the rows of the same traces as they are read, in order of arrival and in bounded memory, and the defects
    that have been left out so far.

    Args and errors (as rows are taken) as in `load_trace`.
    """
    with _file_of(name) as path:
        defects = Defects(path, strict=strict)

    def rows() -> Iterator[TraceRow]:
        with _file_of(name) as path:
            defects.path = path
            yield from stream_trace(defects, seed=seed, spread_ticks=spread_ticks)

    return rows(), defects
