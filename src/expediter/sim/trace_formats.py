"""What each trace format's rows look like, and how they become `TraceRow`s. `trace_readers` has the rules."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from expediter.sim.trace import TraceError
from expediter.sim.trace_rows import (
    MAX_LENGTH,
    WINDOW_ROWS,
    Defects,
    InputLength,
    NumberedRows,
    OutputLength,
    PrefixId,
    Time,
    TraceRow,
)

FORMATS: Final = (
    "Mooncake jsonl (timestamp, input_length, output_length, hash_ids)",
    "Azure csv (TIMESTAMP, ContextTokens, GeneratedTokens) or parquet (arrival_s, input_len, output_len)",
    "vLLM's request log as csv (arrival_time, num_prompt_tokens, num_generation_tokens)",
    "SGLang's request log as csv (request_received_ts, prompt_tokens, completion_tokens)",
    "Expediter jsonl (arrival_s, input_tokens, output_tokens"
    "[, prefix_ids, prefix_block_tokens, priority, tenant, session, cache_hint, n, slo_class, ttft_s, tpot_s, e2e_s])",
)
_MOONCAKE_BLOCKS: Final = (512, 16)
_CSV_COLUMNS: Final = (
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    ("arrival_time", "num_prompt_tokens", "num_generation_tokens"),
    ("request_received_ts", "prompt_tokens", "completion_tokens"),
)
_PARQUET_COLUMNS: Final = ("arrival_s", "input_len", "output_len")

Lines = Iterator[tuple[int, bytes]]
_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True)
class RowSource:
    """A file's rows as they stand there, and how their times are to be read.

    Attributes:
        times_from_earliest: times have their own origin; the trace's start is the earliest of them.
        maybe_coarse: times may have been rounded to coarse ticks.
    """

    rows: NumberedRows
    times_from_earliest: bool = False
    maybe_coarse: bool = False


class _MooncakeRow(msgspec.Struct):
    timestamp: Time
    input_length: InputLength
    output_length: OutputLength
    hash_ids: list[PrefixId]


def text_source(lines: Lines, defects: Defects) -> RowSource:
    """Recognise a text format by its first line.

    Raises:
        TraceError: the file is empty, or its first line belongs to no known format.
    """
    first = next(lines, None)
    if first is None:
        raise TraceError(f"{defects.path}: the file is empty")
    number, head = first
    if head.startswith(b"{"):
        try:
            keys = set(msgspec.json.decode(head, type=dict[str, msgspec.Raw]))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TraceError(defects.at(number, str(error))) from error
        if "timestamp" in keys:
            return RowSource(_mooncake(_chain(first, lines), defects), maybe_coarse=True)
        if "arrival_s" in keys:
            return RowSource(_own(_chain(first, lines), defects))
    else:
        names = [cell.strip() for cell in next(csv.reader([head.decode("utf-8", "replace")]), [])]
        for columns in _CSV_COLUMNS:
            if all(column.lower() in map(str.lower, names) for column in columns):
                return RowSource(_csv(lines, names, columns, defects), times_from_earliest=True)
    raise TraceError(f"{defects.path}: not a known trace format; there are: {'; '.join(FORMATS)}")


def _chain(first: tuple[int, bytes], rest: Lines) -> Lines:
    yield first
    yield from rest


def _decoded(lines: Lines, row_type: type[_Row], defects: Defects) -> Iterator[tuple[int, _Row]]:
    decode: Callable[[bytes], _Row] = msgspec.json.Decoder(row_type).decode
    for number, line in lines:
        try:
            row = decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            defects.found(number, str(error))
            continue
        yield number, row


def _mooncake(lines: Lines, defects: Defects) -> NumberedRows:
    block_sizes = list(_MOONCAKE_BLOCKS)
    undecided: list[tuple[int, TraceRow]] = []  # rows above the first that tells blocks of 512 from blocks of 16
    for number, row in _decoded(lines, _MooncakeRow, defects):
        num_ids = len(row.hash_ids)
        if num_ids:
            fitting = [b for b in block_sizes if num_ids == _num_ids(row.input_length, b)]
            if not fitting:
                expected = " or ".join(f"{_num_ids(row.input_length, b)} (blocks of {b} tokens)" for b in block_sizes)
                defects.found(number, f"{num_ids} hash_ids for input_length {row.input_length}; it takes {expected}")
                continue
            block_sizes = fitting
        made = TraceRow(row.timestamp / 1000.0, row.input_length, row.output_length, row.hash_ids, block_sizes[0])
        undecided.append((number, made))
        if len(undecided) == WINDOW_ROWS:
            block_sizes = block_sizes[:1]
        if len(block_sizes) == 1:
            yield from _with_blocks(undecided, block_sizes[0])
            undecided = []
    yield from _with_blocks(undecided, block_sizes[0])


def _with_blocks(rows: list[tuple[int, TraceRow]], block_tokens: int) -> NumberedRows:
    for number, row in rows:
        row.prefix_block_tokens = block_tokens
        yield number, row


def _num_ids(input_length: int, block_tokens: int) -> int:
    """Return how many ids a prompt has: of blocks of 512 the last, partial one counts, of blocks of 16 it does not."""
    return -(-input_length // block_tokens) if block_tokens == 512 else input_length // block_tokens


def _own(lines: Lines, defects: Defects) -> NumberedRows:
    block_tokens: int | None = None
    for number, row in _decoded(lines, TraceRow, defects):
        if row.prefix_ids:
            own = row.prefix_block_tokens
            if block_tokens not in (None, own):
                defects.found(
                    number, f"prefix_block_tokens is {own}, but {block_tokens} before; one trace has one size"
                )
                continue
            if len(row.prefix_ids) > -(-row.input_tokens // own):
                defects.found(
                    number,
                    f"{len(row.prefix_ids)} prefix_ids of {own} tokens are more than input_tokens {row.input_tokens}",
                )
                continue
            block_tokens = own
        yield number, row


def _csv(lines: Lines, names: list[str], columns: tuple[str, str, str], defects: Defects) -> NumberedRows:
    lowered = [name.lower() for name in names]
    time_at, input_at, output_at = (lowered.index(column.lower()) for column in columns)
    clock = _Clock()
    for number, line in lines:
        try:
            cells = next(csv.reader([line.decode("utf-8")]))
            if len(cells) != len(names):
                raise ValueError(f"{len(cells)} columns instead of {len(names)}")
            row = TraceRow(
                clock.seconds(columns[0], cells[time_at].strip()),
                _length(columns[1], cells[input_at], at_least=1),
                _length(columns[2], cells[output_at], at_least=0),
            )
        except (ValueError, csv.Error) as error:
            defects.found(number, str(error))
            continue
        yield number, row


class _Clock:
    """ISO times or seconds, as the first row has them, to seconds from the first row (negative before it)."""

    def __init__(self) -> None:
        self._start: datetime | None = None
        self._in_seconds: bool | None = None

    def seconds(self, column: str, cell: str) -> float:
        if self._in_seconds is not False:
            try:
                seconds = float(cell)
            except ValueError:
                if self._in_seconds:
                    raise ValueError(f"{column}: must be seconds as in the rows above, not {cell!r}") from None
            else:
                if not np.isfinite(seconds):
                    raise ValueError(f"{column}: must be finite, not {cell!r}")
                self._in_seconds = True
                return seconds
        try:
            time = datetime.fromisoformat(cell)
        except ValueError as error:
            raise ValueError(f"{column}: {error}") from error
        # A time without zone is taken as UTC: the local zone of whoever reads the trace must not matter.
        time = time.replace(tzinfo=UTC) if time.tzinfo is None else time
        self._in_seconds = False
        self._start = time if self._start is None else self._start
        return (time - self._start).total_seconds()


def _length(column: str, cell: str, *, at_least: int) -> int:
    text = cell.strip()
    value = int(text) if text.isascii() and text.isdigit() and len(text) < 12 else -1
    if not at_least <= value <= MAX_LENGTH:
        raise ValueError(f"{column} must be an integer from {at_least} to {MAX_LENGTH}, not {cell!r}")
    return value


def parquet_source(file: pq.ParquetFile, defects: Defects) -> RowSource:
    """Return the rows of a parquet file.

    Raises:
        TraceError: it lacks a column.
    """
    names = file.schema_arrow.names
    missing = [name for name in _PARQUET_COLUMNS if name not in names]
    if missing:
        raise TraceError(
            f"{defects.path}: no column {', '.join(missing)}; the file has {', '.join(names)}. Known formats: "
            f"{'; '.join(FORMATS)}"
        )
    defects.unit = ": row "
    return RowSource(_parquet(file, defects))


def _parquet(file: pq.ParquetFile, defects: Defects) -> NumberedRows:
    number = 0
    for batch in file.iter_batches(batch_size=WINDOW_ROWS, columns=list(_PARQUET_COLUMNS)):
        cells = [_floats(defects, batch, name) for name in _PARQUET_COLUMNS]
        for arrival_s, num_input, num_output in zip(*cells, strict=True):
            number += 1
            problem = (
                _problem("arrival_s", arrival_s, 0, None)
                or _problem("input_len", num_input, 1, MAX_LENGTH)
                or _problem("output_len", num_output, 0, MAX_LENGTH)
            )
            if problem:
                defects.found(number, problem)
                continue
            yield number, TraceRow(arrival_s, int(num_input), int(num_output))


def _floats(defects: Defects, batch: pa.RecordBatch, name: str) -> list[float]:
    """Return a column as floats; null becomes NaN, which every check refuses."""
    try:
        values: list[float] = batch.column(name).cast(pa.float64()).to_numpy(zero_copy_only=False).tolist()
    except pa.ArrowException as error:
        raise TraceError(f"{defects.path}: column {name}: {error}") from error
    return values


def _problem(name: str, value: float, at_least: int, at_most: int | None) -> str | None:
    if at_most is None:
        fine, rule = at_least <= value < float("inf"), f"a finite number of seconds from {at_least}"
    else:
        fine = at_least <= value <= at_most and value == int(value)
        rule = f"an integer from {at_least} to {at_most}"
    return None if fine else f"{name} must be {rule}, not {value}"
