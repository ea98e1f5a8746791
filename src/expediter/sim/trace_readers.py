"""Trace files: which formats there are, and what is done with rows that are odd.

Formats, recognised by content (gzip is seen through, CRLF and a byte order mark are accepted):

- **Mooncake** jsonl: `timestamp` (ms), `input_length`, `output_length`, `hash_ids`; one id per started block of 512
  tokens, or one per whole block of 16. Source: kvcache-ai/Mooncake.
- **Azure** LLM inference traces: CSV `TIMESTAMP` (ISO), `ContextTokens`, `GeneratedTokens`; or the same as parquet with
  `arrival_s`, `input_len`, `output_len`. Source: Azure/AzurePublicDataset.
- **Expediter** jsonl: `arrival_s`, `input_tokens`, `output_tokens`; optionally `prefix_ids` with `prefix_block_tokens`
  (512 if absent, one size per file), `priority` (lower runs first), `tenant`, `cache_hint` (`"drop"` or
  `{"pin_s": 30}`) and `n` (sequences of the prompt, each of which has `output_tokens`; 1 if absent).

Rules:

- Times are seconds from the trace's start (Mooncake: milliseconds; CSV: from its earliest row), finite and not
  negative. Rows out of order are sorted by time; rows at the same time keep the file's order.
- A prompt has 1 to 2**24 tokens. An output has 0 to 2**24; 0 counts as 1, because a request yields at least one token.
- Blank lines are skipped. Anything else that is not as above is an error that names file and line (parquet: row).
- Mooncake's conversation trace has its times rounded to ticks of three seconds. Where most rows share their time with
  the row before and the ticks lie a second or more apart, arrivals are spread evenly at random within their tick, in
  the file's order, unless `spread_ticks` is off.
"""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, BinaryIO, Final, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from expediter.core.request import MAX_PIN_S, CacheHint
from expediter.core.slo import NO_SLO, Slo
from expediter.sim.synthetic_tokens import MAX_NUMBERS
from expediter.sim.trace import Trace, TraceError

FORMATS: Final = (
    "Mooncake jsonl (timestamp, input_length, output_length, hash_ids)",
    "Azure csv (TIMESTAMP, ContextTokens, GeneratedTokens) or parquet (arrival_s, input_len, output_len)",
    "Expediter jsonl (arrival_s, input_tokens, output_tokens"
    "[, prefix_ids, prefix_block_tokens, priority, tenant, cache_hint, n, slo_class, ttft_s, tpot_s, e2e_s])",
)
MAX_LENGTH: Final = 1 << 24
MAX_SEQUENCES: Final = 1024
_MOONCAKE_BLOCKS: Final = (512, 16)
_SUFFIXES: Final = (".jsonl", ".jsonl.gz", ".csv", ".csv.gz", ".parquet")

_Time = Annotated[float, msgspec.Meta(ge=0)]
_InputLength = Annotated[int, msgspec.Meta(ge=1, le=MAX_LENGTH)]
_OutputLength = Annotated[int, msgspec.Meta(ge=0, le=MAX_LENGTH)]
_Target = Annotated[float, msgspec.Meta(gt=0)]
_PrefixId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Row = TypeVar("_Row")


class _MooncakeRow(msgspec.Struct):
    timestamp: _Time
    input_length: _InputLength
    output_length: _OutputLength
    hash_ids: list[_PrefixId]


class _PinHint(msgspec.Struct, forbid_unknown_fields=True):
    pin_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_PIN_S)]


class _OwnRow(msgspec.Struct, forbid_unknown_fields=True):
    arrival_s: _Time
    input_tokens: _InputLength
    output_tokens: _OutputLength
    prefix_ids: list[_PrefixId] = []
    prefix_block_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_LENGTH)] = 512
    priority: Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)] = 0
    tenant: str = ""
    cache_hint: Literal["drop"] | _PinHint | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_SEQUENCES)] = 1
    slo_class: str = ""
    ttft_s: _Target | None = None
    tpot_s: _Target | None = None
    e2e_s: _Target | None = None


def read_trace(path: str | Path, *, seed: int = 0, spread_ticks: bool = True) -> Trace:
    """Read a trace file of any known format; see the module for formats and rules.

    Args:
        seed: of the spread within ticks.
        spread_ticks: spread arrivals that were rounded to coarse ticks.
    Raises:
        TraceError: there is no such file (the message lists the formats, and the traces that lie where it was looked
            for), the format is unknown, a row is malformed, or there are no rows.
    """
    path = Path(path)
    if not path.is_file():
        raise TraceError(_no_such_trace(path))
    try:
        with path.open("rb") as file:
            magic = file.read(4)
        if magic == b"PAR1":
            return _read_parquet(path)
        with path.open("rb") as raw:
            if magic[:2] == b"\x1f\x8b":
                with gzip.GzipFile(fileobj=raw) as unzipped:
                    return _read_text(path, io.BufferedReader(unzipped), seed, spread_ticks)
            return _read_text(path, raw, seed, spread_ticks)
    except (EOFError, zlib.error, OSError, UnicodeDecodeError, csv.Error, pa.ArrowException) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error


def _no_such_trace(path: Path) -> str:
    message = f"no trace file {str(path)!r}; a trace is a file in one of these formats: {'; '.join(FORMATS)}"
    folder = path.parent
    there = sorted(f.name for f in folder.iterdir() if f.name.endswith(_SUFFIXES)) if folder.is_dir() else []
    return f"{message}. Such files in {str(folder)!r}: {', '.join(there) or 'none'}"


def _read_text(path: Path, file: BinaryIO, seed: int, spread_ticks: bool) -> Trace:
    lines = _lines(file)
    first = next(lines, None)
    if first is None:
        raise TraceError(f"{path}: the file is empty")
    _, head = first
    if head.startswith(b"{"):
        try:
            keys = set(msgspec.json.decode(head, type=dict[str, msgspec.Raw]))
        except msgspec.DecodeError as error:
            raise TraceError(f"{path}:{first[0]}: {error}") from error
        if "timestamp" in keys:
            return _read_mooncake(path, _chain(first, lines), seed, spread_ticks)
        if "arrival_s" in keys:
            return _read_own(path, _chain(first, lines))
    elif head.decode("utf-8", "replace").replace(" ", "").lower() == "timestamp,contexttokens,generatedtokens":
        return _read_azure_csv(path, lines)
    raise TraceError(f"{path}: not a known trace format; there are: {'; '.join(FORMATS)}")


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, line without its end) of every line that is not blank."""
    for number, line in enumerate(file, 1):
        stripped = line.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else line.strip()
        if stripped:
            yield number, stripped


def _chain(first: tuple[int, bytes], rest: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    yield first
    yield from rest


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
        self.cache_hints: list[CacheHint | None] = []
        self.num_sequences = array("i")
        self.slo_classes: list[str] = []
        self.slos: list[Slo] = []

    def add(self, arrival_s: float, num_input: int, num_output: int, prefix_ids: list[int] | tuple[()] = ()) -> None:
        self.arrival_s.append(arrival_s)
        self.input_tokens.append(num_input)
        self.output_tokens.append(max(num_output, 1))
        self.prefix_ids.extend(prefix_ids)
        self.prefix_counts.append(len(prefix_ids))

    def build(self, path: Path, prefix_block_tokens: int = 512) -> Trace:
        arrival_s = np.array(self.arrival_s, np.float64)
        counts = np.array(self.prefix_counts, np.int64)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        trace = Trace(
            name=path.name,
            arrival_s=arrival_s,
            input_tokens=np.array(self.input_tokens, np.int32),
            output_tokens=np.array(self.output_tokens, np.int32),
            prefix_ids=_dense(np.array(self.prefix_ids, np.int64)),
            prefix_offsets=offsets,
            prefix_block_tokens=prefix_block_tokens,
            priorities=np.array(self.priorities, np.int32) if any(self.priorities) else None,
            tenants=tuple(self.tenants) if any(self.tenants) else None,
            cache_hints=tuple(self.cache_hints) if any(self.cache_hints) else None,
            num_sequences=np.array(self.num_sequences, np.int32) if any(n > 1 for n in self.num_sequences) else None,
            slo_classes=tuple(self.slo_classes) if any(self.slo_classes) else None,
            slos=tuple(self.slos) if any(slo != NO_SLO for slo in self.slos) else None,
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
        cache_hints=_picked(trace.cache_hints, order),
        num_sequences=None if trace.num_sequences is None else trace.num_sequences[order],
        slo_classes=_picked(trace.slo_classes, order),
        slos=_picked(trace.slos, order),
    )


def _picked(column: tuple[_Row, ...] | None, order: npt.NDArray[np.intp]) -> tuple[_Row, ...] | None:
    return None if column is None else tuple(column[row] for row in order.tolist())


def _decoded(path: Path, lines: Iterator[tuple[int, bytes]], row_type: type[_Row]) -> Iterator[tuple[int, _Row]]:
    decode: Callable[[bytes], _Row] = msgspec.json.Decoder(row_type).decode
    for number, line in lines:
        try:
            yield number, decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TraceError(f"{path}:{number}: {error}") from error


def _read_mooncake(path: Path, lines: Iterator[tuple[int, bytes]], seed: int, spread_ticks: bool) -> Trace:
    columns = _Columns()
    block_sizes = list(_MOONCAKE_BLOCKS)
    for number, row in _decoded(path, lines, _MooncakeRow):
        num_ids = len(row.hash_ids)
        if num_ids:
            fitting = [b for b in block_sizes if num_ids == _num_ids(row.input_length, b)]
            if not fitting:
                expected = " or ".join(f"{_num_ids(row.input_length, b)} (blocks of {b} tokens)" for b in block_sizes)
                raise TraceError(
                    f"{path}:{number}: {num_ids} hash_ids for input_length {row.input_length}; it takes {expected}"
                )
            block_sizes = fitting
        columns.add(row.timestamp / 1000.0, row.input_length, row.output_length, row.hash_ids)
    trace = columns.build(path, block_sizes[0])
    return _spread(trace, seed) if spread_ticks else trace


def _num_ids(input_length: int, block_tokens: int) -> int:
    """Return how many ids a prompt has: of blocks of 512 the last, partial one counts, of blocks of 16 it does not."""
    return -(-input_length // block_tokens) if block_tokens == 512 else input_length // block_tokens


def _spread(trace: Trace, seed: int) -> Trace:
    """Spread arrivals that share a coarse tick over it; see the module's rules."""
    ticks, counts = np.unique(trace.arrival_s, return_counts=True)
    if len(ticks) < 2 or 2 * len(ticks) > len(trace):
        return trace
    gaps = np.diff(ticks)
    tick_s = float(np.median(gaps))
    if tick_s < 1.0:
        return trace
    widths = np.minimum(np.append(gaps, tick_s), tick_s)
    places = np.random.default_rng(seed).random(len(trace))
    spread = np.sort(np.repeat(ticks, counts) + places * np.repeat(widths, counts))
    return replace(trace, arrival_s=spread)


def _read_own(path: Path, lines: Iterator[tuple[int, bytes]]) -> Trace:
    columns = _Columns()
    block_tokens: int | None = None
    slos: dict[tuple[float | None, ...], Slo] = {}
    for number, row in _decoded(path, lines, _OwnRow):
        if row.prefix_ids:
            if block_tokens not in (None, row.prefix_block_tokens):
                raise TraceError(
                    f"{path}:{number}: prefix_block_tokens is {row.prefix_block_tokens}, but {block_tokens} before; "
                    "one trace has one size"
                )
            block_tokens = row.prefix_block_tokens
            if len(row.prefix_ids) > -(-row.input_tokens // block_tokens):
                raise TraceError(
                    f"{path}:{number}: {len(row.prefix_ids)} prefix_ids of {block_tokens} tokens are more than "
                    f"input_tokens {row.input_tokens}"
                )
        columns.add(row.arrival_s, row.input_tokens, row.output_tokens, row.prefix_ids)
        columns.priorities.append(row.priority)
        columns.tenants.append(row.tenant)
        hint = row.cache_hint
        pin_s = hint.pin_s if isinstance(hint, _PinHint) else 0.0
        columns.cache_hints.append(None if hint is None else CacheHint(pin_s=pin_s, drop=hint == "drop"))
        columns.num_sequences.append(row.n)
        columns.slo_classes.append(row.slo_class)
        slo = (row.ttft_s, row.tpot_s, row.e2e_s)
        if slo not in slos:  # a few different ones for many rows
            slos[slo] = Slo(ttft_s=row.ttft_s, tpot_s=row.tpot_s, e2e_s=row.e2e_s)
        columns.slos.append(slos[slo])
    return columns.build(path, block_tokens or 512)


def _read_azure_csv(path: Path, lines: Iterator[tuple[int, bytes]]) -> Trace:
    columns = _Columns()
    earliest: datetime | None = None
    times: list[datetime] = []
    for number, line in lines:
        cells = next(csv.reader([line.decode("utf-8")]))
        if len(cells) != 3:
            raise TraceError(f"{path}:{number}: {len(cells)} columns instead of 3")
        try:
            time = datetime.fromisoformat(cells[0].strip())
        except ValueError as error:
            raise TraceError(f"{path}:{number}: TIMESTAMP: {error}") from error
        # A time without zone is taken as UTC: the local zone of whoever reads the trace must not matter.
        time = time.replace(tzinfo=UTC) if time.tzinfo is None else time
        num_input = _length(path, number, "ContextTokens", cells[1], at_least=1)
        num_output = _length(path, number, "GeneratedTokens", cells[2], at_least=0)
        times.append(time)
        earliest = time if earliest is None else min(earliest, time)
        columns.add(0.0, num_input, num_output)
    if earliest is not None:
        columns.arrival_s = array("d", ((time - earliest).total_seconds() for time in times))
    return columns.build(path)


def _length(path: Path, number: int, column: str, cell: str, *, at_least: int) -> int:
    text = cell.strip()
    value = int(text) if text.isascii() and text.isdigit() and len(text) < 12 else -1
    if not at_least <= value <= MAX_LENGTH:
        raise TraceError(f"{path}:{number}: {column} must be an integer from {at_least} to {MAX_LENGTH}, not {cell!r}")
    return value


def _read_parquet(path: Path) -> Trace:
    wanted = ("arrival_s", "input_len", "output_len")
    table = pq.read_table(path)
    missing = [name for name in wanted if name not in table.column_names]
    if missing:
        raise TraceError(
            f"{path}: no column {', '.join(missing)}; the file has {', '.join(table.column_names)}. Known formats: "
            f"{'; '.join(FORMATS)}"
        )
    arrival_s, inputs, outputs = (_floats(path, table, name) for name in wanted)
    _check_rows(path, "arrival_s", arrival_s, arrival_s >= 0, "a finite number of seconds from 0")
    for name, values, at_least in (("input_len", inputs, 1), ("output_len", outputs, 0)):
        whole = (values >= at_least) & (values <= MAX_LENGTH) & (values == np.floor(values))
        _check_rows(path, name, values, whole, f"an integer from {at_least} to {MAX_LENGTH}")
    columns = _Columns()
    columns.arrival_s = array("d", arrival_s.tobytes())
    columns.input_tokens = array("i", inputs.astype(np.int32).tobytes())
    columns.output_tokens = array("i", np.maximum(outputs, 1).astype(np.int32).tobytes())
    columns.prefix_counts = array("q", bytes(8 * len(arrival_s)))
    return columns.build(path)


def _floats(path: Path, table: pa.Table, name: str) -> npt.NDArray[np.float64]:
    """Return a column as float64; null becomes NaN, which every check refuses."""
    try:
        column = table.column(name).cast(pa.float64())
    except pa.ArrowException as error:
        raise TraceError(f"{path}: column {name}: {error}") from error
    values: npt.NDArray[np.float64] = column.to_numpy().astype(np.float64)
    return values


def _check_rows(path: Path, name: str, values: npt.NDArray[np.float64], fine: npt.NDArray[np.bool_], rule: str) -> None:
    bad = np.flatnonzero(~(fine & np.isfinite(values)))
    if len(bad):
        raise TraceError(f"{path}: row {int(bad[0]) + 1}: {name} must be {rule}, not {values[bad[0]]}")
