"""One request of a trace as a row, what is wrong with a file's rows, and the order that rows are handed on in."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
import numpy as np

from expediter.core.request import MAX_PIN_S
from expediter.sim.trace import TraceError

MAX_LENGTH: Final = 1 << 24
MAX_SEQUENCES: Final = 1024
WINDOW_ROWS: Final = 1 << 16
"""Rows that streaming holds back to put them in order of arrival, and by which coarse ticks are recognised."""
_SHOWN_DEFECTS: Final = 10

Time = Annotated[float, msgspec.Meta(ge=0)]
InputLength = Annotated[int, msgspec.Meta(ge=1, le=MAX_LENGTH)]
OutputLength = Annotated[int, msgspec.Meta(ge=0, le=MAX_LENGTH)]
PrefixId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Target = Annotated[float, msgspec.Meta(gt=0)]


class PinHint(msgspec.Struct, forbid_unknown_fields=True):
    """Keep the request's KV for `pin_s` seconds after its end."""

    pin_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_PIN_S)]


class TraceRow(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One request: a line of Expediter's own jsonl, and what every other format is turned into.

    Times are seconds from the trace's start; see `trace_readers` for the fields' meaning and ranges.
    """

    arrival_s: Time
    input_tokens: InputLength
    output_tokens: OutputLength
    prefix_ids: list[PrefixId] = []
    prefix_block_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_LENGTH)] = 512
    priority: Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)] = 0
    tenant: str = ""
    session: str = ""
    cache_hint: Literal["drop"] | PinHint | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_SEQUENCES)] = 1
    slo_class: str = ""
    ttft_s: _Target | None = None
    tpot_s: _Target | None = None
    e2e_s: _Target | None = None


class Defects:
    """Rows of one file that are left out: how many, and the first of them in words.

    Args:
        path: for messages.
        strict: the first defect raises instead.
    """

    def __init__(self, path: Path, *, strict: bool = False) -> None:
        self.path = path
        self.strict = strict
        self.unit = ":"
        self.count = 0
        self.first: list[str] = []

    def found(self, number: int, message: str) -> None:
        """Count a defect of that line.

        Raises:
            TraceError: `strict` is on.
        """
        text = self.at(number, message)
        if self.strict:
            raise TraceError(text)
        self.count += 1
        if len(self.first) < _SHOWN_DEFECTS:
            self.first.append(text)

    def at(self, number: int, message: str) -> str:
        """Return a message that names file and line; parquet has rows, and says so through `unit`."""
        return f"{self.path}{self.unit}{number}: {message}"

    def report(self) -> tuple[str, ...]:
        """Return lines for a reader: the first defects, and how many there are; nothing if there are none."""
        if not self.count:
            return ()
        rows = "1 row was" if self.count == 1 else f"{self.count} rows were"
        return (*self.first, f"{self.path}: {rows} left out, the first as above; --strict stops at a defect")


NumberedRows = Iterator[tuple[int, TraceRow]]
"""Rows with the line that each stands in."""


def in_order(rows: NumberedRows, defects: Defects, window_rows: int = WINDOW_ROWS) -> Iterator[TraceRow]:
    """Yield rows by arrival, ties in the file's order, holding back at most `window_rows` of them.

    Prefix ids take 8 bytes each while they are held.

    Raises:
        TraceError: a row belongs before one that has left the window; the message names its line.
    """
    held: list[tuple[float, int, TraceRow, array[int]]] = []
    last_s = -np.inf
    for number, row in rows:
        if row.arrival_s < last_s:
            raise TraceError(
                defects.at(
                    number,
                    f"arrives {last_s - row.arrival_s:g} s before a row that stands more than {window_rows} rows above "
                    "it; streaming sorts no further: sort the file by time first",
                )
            )
        entry = (row.arrival_s, number, row, _packed(row))
        if len(held) < window_rows:
            heapq.heappush(held, entry)
            continue
        last_s, _, first, ids = heapq.heappushpop(held, entry)
        yield _unpacked(first, ids)
    while held:
        _, _, first, ids = heapq.heappop(held)
        yield _unpacked(first, ids)


_NO_IDS: Final = array("q")


def _packed(row: TraceRow) -> array[int]:
    """Take a row's prefix ids out of it."""
    if not row.prefix_ids:
        return _NO_IDS
    ids = array("q", row.prefix_ids)
    row.prefix_ids = []
    return ids


def _unpacked(row: TraceRow, ids: array[int]) -> TraceRow:
    if ids:
        row.prefix_ids = ids.tolist()
    return row


def from_earliest(rows: Iterator[TraceRow]) -> Iterator[TraceRow]:
    """Let time begin with the first of rows that are in order."""
    start_s: float | None = None
    for row in rows:
        start_s = row.arrival_s if start_s is None else start_s
        row.arrival_s -= start_s
        yield row


def tick_of(first_arrivals_s: list[float] | np.ndarray[tuple[int], np.dtype[np.float64]]) -> float | None:
    """Return the coarse tick that a trace's times were rounded to, in seconds, or None if they were not.

    Most rows share their time with the row before, and the ticks lie a second or more apart.

    Args:
        first_arrivals_s: ascending times of the first `WINDOW_ROWS` requests, or of all if there are fewer.
    """
    ticks = np.unique(np.asarray(first_arrivals_s, np.float64))
    if len(ticks) < 2 or 2 * len(ticks) > len(first_arrivals_s):
        return None
    tick_s = float(np.median(np.diff(ticks)))
    return tick_s if tick_s >= 1.0 else None


def spread(rows: Iterator[TraceRow], seed: int) -> Iterator[TraceRow]:
    """Spread rows that share a coarse tick evenly at random over it, in their order; other times stay.

    Holds the first `WINDOW_ROWS` rows, then one tick's.
    """
    head = [(row, _packed(row)) for _, row in zip(range(WINDOW_ROWS), rows, strict=False)]
    tick_s = tick_of([row.arrival_s for row, _ in head])
    if tick_s is None:
        yield from _chained(head, rows)
        return
    rng = np.random.default_rng(seed)
    same: list[TraceRow] = []
    for row in _chained(head, rows):
        if same and row.arrival_s != same[0].arrival_s:
            yield from _spread_tick(same, min(row.arrival_s - same[0].arrival_s, tick_s), rng)
            same = []
        same.append(row)
    yield from _spread_tick(same, tick_s, rng)


def _chained(head: list[tuple[TraceRow, array[int]]], rows: Iterator[TraceRow]) -> Iterator[TraceRow]:
    head.reverse()
    while head:  # lets go of each row, unlike iterating
        yield _unpacked(*head.pop())
    yield from rows


def _spread_tick(same: list[TraceRow], width_s: float, rng: np.random.Generator) -> Iterator[TraceRow]:
    times = np.sort(same[0].arrival_s + rng.random(len(same)) * width_s).tolist()
    for row, time in zip(same, times, strict=True):
        row.arrival_s = time
        yield row
