"""Trace files: which formats there are, and what is done with rows that are odd.

Formats, recognised by content (gzip is seen through, CRLF and a byte order mark are accepted):

- **Mooncake** jsonl: `timestamp` (ms), `input_length`, `output_length`, `hash_ids`; one id per started block of 512
  tokens, or one per whole block of 16. Source: kvcache-ai/Mooncake.
- **Azure** LLM inference traces: CSV `TIMESTAMP` (ISO), `ContextTokens`, `GeneratedTokens`; or the same as parquet with
  `arrival_s`, `input_len`, `output_len`. Source: Azure/AzurePublicDataset.
- **vLLM's and SGLang's request logs** as CSV: `arrival_time`, `num_prompt_tokens`, `num_generation_tokens` (vLLM's
  per-request statistics), or `request_received_ts`, `prompt_tokens`, `completion_tokens` (SGLang's `meta_info`).
- **Expediter** jsonl: `arrival_s`, `input_tokens`, `output_tokens`; optionally `prefix_ids` with `prefix_block_tokens`
  (512 if absent, one size per file), `priority` (lower runs first), `tenant`, `session`, `cache_hint` (`"drop"` or
  `{"pin_s": 30}`) and `n` (sequences of the prompt, each of which has `output_tokens`; 1 if absent).

Rules:

- A CSV's columns may stand in any order among others, in upper or lower case. Its times are ISO or seconds, the same in
  all rows, and count from the earliest row.
- Other times are seconds from the trace's start (Mooncake: milliseconds), finite and not negative. Rows out of order
  are sorted by time; rows at the same time keep the file's order. `read_trace` holds all rows and sorts any file;
  `stream_trace` holds `WINDOW_ROWS` rows and refuses a file that needs more, naming the line.
- A prompt has 1 to 2**24 tokens. An output has 0 to 2**24; 0 counts as 1, because a request yields at least one token.
- Blank lines are skipped. A row that is otherwise not as above is a defect: it is left out, counted, and named by file
  and line (parquet: row). `strict` stops at the first. A file without a usable row, cut short, or of no known format is
  an error in any case.
- Mooncake's conversation trace has its times rounded to ticks of three seconds. Where, among the first `WINDOW_ROWS`
  rows, most share their time with the row before and the ticks lie a second or more apart, arrivals are spread evenly
  at random within their tick, in the file's order, unless `spread_ticks` is off.
"""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from array import array
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Final, TypeVar, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from expediter.core.request import CacheHint
from expediter.core.slo import NO_SLO, Slo
from expediter.sim.synthetic_tokens import MAX_NUMBERS
from expediter.sim.trace import Trace, TraceError
from expediter.sim.trace_formats import FORMATS, Lines, RowSource, parquet_source, text_source
from expediter.sim.trace_rows import (
    WINDOW_ROWS,
    Defects,
    NumberedRows,
    PinHint,
    TraceRow,
    from_earliest,
    in_order,
    spread,
    tick_of,
)

_SUFFIXES: Final = (".jsonl", ".jsonl.gz", ".csv", ".csv.gz", ".parquet")
_UNREADABLE: Final = (EOFError, zlib.error, OSError, UnicodeDecodeError, csv.Error, pa.ArrowException)

_Cell = TypeVar("_Cell")


def read_trace(path: str | Path, *, seed: int = 0, spread_ticks: bool = True, strict: bool = False) -> Trace:
    """Read a trace file of any known format into memory; see the module for formats and rules.

    Args:
        seed: of the spread within ticks.
        spread_ticks: spread arrivals that were rounded to coarse ticks.
        strict: stop at the first defect instead of leaving its row out.
    Raises:
        TraceError: there is no such file (the message lists the formats, and the traces that lie where it was looked
            for), the format is unknown, no row can be used, or `strict` is on and a row has a defect.
    """
    defects = Defects(Path(path), strict=strict)
    columns = _Columns()
    with _opened(defects) as source:
        for _, row in source.rows:
            columns.add(row)
    if not columns.arrival_s:
        raise _no_rows(defects)
    if source.times_from_earliest:
        earliest_s = min(columns.arrival_s)
        columns.arrival_s = array("d", (time - earliest_s for time in columns.arrival_s))
    trace = replace(columns.build(defects.path.name), num_defects=defects.count, defects=defects.report())
    return _spread(trace, seed) if source.maybe_coarse and spread_ticks else trace


def trace_from_rows(rows: Iterable[TraceRow], name: str) -> Trace:
    """Return rows as a trace in memory, sorted by arrival.

    Raises:
        TraceError: there are none.
    """
    columns = _Columns()
    for row in rows:
        columns.add(row)
    return columns.build(name)


def stream_trace(defects: Defects, *, seed: int = 0, spread_ticks: bool = True) -> Iterator[TraceRow]:
    """Yield a file's requests in order of arrival, with what `read_trace` makes of them, in bounded memory.

    Args:
        defects: of the file to read; counts the rows that are left out.
        seed, spread_ticks: as in `read_trace`.
    Raises:
        TraceError: as `read_trace`, and if a row stands more than `WINDOW_ROWS` rows from its place.
    """
    num_rows = 0
    with _opened(defects) as source:
        rows = in_order(source.rows, defects)
        if source.times_from_earliest:
            rows = from_earliest(rows)
        if source.maybe_coarse and spread_ticks:
            rows = spread(rows, seed)
        for row in rows:
            num_rows += 1
            row.output_tokens = max(row.output_tokens, 1)
            yield row
    if not num_rows:
        raise _no_rows(defects)


def _no_rows(defects: Defects) -> TraceError:
    return TraceError("; ".join((f"{defects.path}: the trace holds no requests", *defects.report())))


@contextmanager
def _opened(defects: Defects) -> Iterator[RowSource]:
    path = defects.path
    if not path.is_file():
        raise TraceError(_no_such_trace(path))
    with ExitStack() as stack:
        try:
            file: BinaryIO = stack.enter_context(path.open("rb"))
            magic = file.read(4)
            file.seek(0)
            if magic == b"PAR1":
                source = parquet_source(stack.enter_context(pq.ParquetFile(file)), defects)
            else:
                if magic[:2] == b"\x1f\x8b":
                    unzipped = stack.enter_context(gzip.GzipFile(fileobj=file))
                    file = cast("BinaryIO", io.BufferedReader(unzipped))
                source = text_source(_lines(file), defects)
        except _UNREADABLE as error:
            raise TraceError(f"{path}: cannot be read: {error}") from error
        yield replace(source, rows=_guarded(source.rows, path))


def _guarded(rows: NumberedRows, path: Path) -> NumberedRows:
    """Turn what goes wrong while a file is read, and only that, into an error that names it."""
    try:
        yield from rows
    except _UNREADABLE as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error


def _no_such_trace(path: Path) -> str:
    message = f"no trace file {str(path)!r}; a trace is a file in one of these formats: {'; '.join(FORMATS)}"
    folder = path.parent
    there = sorted(f.name for f in folder.iterdir() if f.name.endswith(_SUFFIXES)) if folder.is_dir() else []
    return f"{message}. Such files in {str(folder)!r}: {', '.join(there) or 'none'}"


def _lines(file: BinaryIO) -> Lines:
    """Yield (line number from 1, line without its end) of every line that is not blank."""
    for number, line in enumerate(file, 1):
        stripped = line.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else line.strip()
        if stripped:
            yield number, stripped


class _Columns:
    """Rows as they are read; `build` sorts them."""

    def __init__(self) -> None:
        self.arrival_s = array("d")
        self.input_tokens = array("i")
        self.output_tokens = array("i")
        self.prefix_ids = array("q")
        self.prefix_counts = array("q")
        self.priorities = array("i")
        self.tenants: list[str] = []
        self.sessions: list[str] = []
        self.cache_hints: list[CacheHint | None] = []
        self.num_sequences = array("i")
        self.slo_classes: list[str] = []
        self.slos: list[Slo] = []

        self.prefix_block_tokens = 512
        self._same_slos: dict[tuple[float | None, ...], Slo] = {}  # a few different ones for many rows

    def add(self, row: TraceRow) -> None:
        self.arrival_s.append(row.arrival_s)
        self.input_tokens.append(row.input_tokens)
        self.output_tokens.append(max(row.output_tokens, 1))
        self.prefix_counts.append(len(row.prefix_ids))
        if row.prefix_ids:
            self.prefix_ids.extend(row.prefix_ids)
            self.prefix_block_tokens = row.prefix_block_tokens
        self.priorities.append(row.priority)
        self.num_sequences.append(row.n)
        self._add_to(self.tenants, row.tenant, "")
        self._add_to(self.sessions, row.session, "")
        self._add_to(self.slo_classes, row.slo_class, "")
        hint = row.cache_hint
        pin_s = hint.pin_s if isinstance(hint, PinHint) else 0.0
        self._add_to(self.cache_hints, None if hint is None else CacheHint(pin_s=pin_s, drop=hint == "drop"), None)
        slo = (row.ttft_s, row.tpot_s, row.e2e_s)
        if slo not in self._same_slos:
            self._same_slos[slo] = Slo(ttft_s=row.ttft_s, tpot_s=row.tpot_s, e2e_s=row.e2e_s)
        self._add_to(self.slos, self._same_slos[slo], NO_SLO)

    def _add_to(self, column: list[_Cell], value: _Cell, absent: _Cell) -> None:
        """Append to a column that stays empty until a row has a value in it."""
        if column or value != absent:
            column.extend([absent] * (len(self.arrival_s) - 1 - len(column)))
            column.append(value)

    def build(self, name: str) -> Trace:
        arrival_s = np.array(self.arrival_s, np.float64)
        counts = np.array(self.prefix_counts, np.int64)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        trace = Trace(
            name=name,
            arrival_s=arrival_s,
            input_tokens=np.array(self.input_tokens, np.int32),
            output_tokens=np.array(self.output_tokens, np.int32),
            prefix_ids=_dense(np.array(self.prefix_ids, np.int64)),
            prefix_offsets=offsets,
            prefix_block_tokens=self.prefix_block_tokens,
            priorities=np.array(self.priorities, np.int32) if any(self.priorities) else None,
            tenants=tuple(self.tenants) or None,
            sessions=tuple(self.sessions) or None,
            cache_hints=tuple(self.cache_hints) or None,
            num_sequences=np.array(self.num_sequences, np.int32) if any(n > 1 for n in self.num_sequences) else None,
            slo_classes=tuple(self.slo_classes) or None,
            slos=tuple(self.slos) or None,
        )
        return trace if (arrival_s[1:] >= arrival_s[:-1]).all() else _sorted(trace)


def _dense(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Renumber ids that are hashes rather than counts."""
    if len(ids) and int(ids.max()) >= MAX_NUMBERS:
        return np.unique(ids, return_inverse=True)[1].astype(np.int64)
    return ids


def _sorted(trace: Trace) -> Trace:
    order = np.argsort(trace.arrival_s, kind="stable")
    counts = np.diff(trace.prefix_offsets)[order]
    pieces = [trace.prefix_ids[trace.prefix_offsets[row] : trace.prefix_offsets[row + 1]] for row in order.tolist()]
    return replace(
        trace,
        arrival_s=trace.arrival_s[order],
        input_tokens=trace.input_tokens[order],
        output_tokens=trace.output_tokens[order],
        prefix_ids=np.concatenate(pieces),
        prefix_offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]),
        priorities=None if trace.priorities is None else trace.priorities[order],
        tenants=_picked(trace.tenants, order),
        sessions=_picked(trace.sessions, order),
        cache_hints=_picked(trace.cache_hints, order),
        num_sequences=None if trace.num_sequences is None else trace.num_sequences[order],
        slo_classes=_picked(trace.slo_classes, order),
        slos=_picked(trace.slos, order),
    )


def _picked(column: tuple[_Cell, ...] | None, order: npt.NDArray[np.intp]) -> tuple[_Cell, ...] | None:
    return None if column is None else tuple(column[row] for row in order.tolist())


def _spread(trace: Trace, seed: int) -> Trace:
    """Do what `trace_rows.spread` does, on columns."""
    tick_s = tick_of(trace.arrival_s[:WINDOW_ROWS])
    if tick_s is None:
        return trace
    ticks, counts = np.unique(trace.arrival_s, return_counts=True)
    widths = np.minimum(np.append(np.diff(ticks), tick_s), tick_s)
    places = np.random.default_rng(seed).random(len(trace))
    spread_s = np.sort(np.repeat(ticks, counts) + places * np.repeat(widths, counts))
    return replace(trace, arrival_s=spread_s)
