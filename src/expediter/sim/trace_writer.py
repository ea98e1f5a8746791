"""Write rows as Expediter's jsonl."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, Final, cast

import msgspec

from expediter.sim.trace import TraceError
from expediter.sim.trace_rows import TraceRow

_BATCH_ROWS: Final = 256


def write_rows(path: Path, rows: Iterable[TraceRow]) -> int:
    """Write rows, one a line. A file that could not be finished is removed.

    Args:
        path: gzip if it ends in ".gz", without a time of writing, so that equal rows give equal files; "-" is standard
            output.
        rows: in order of arrival.

    Returns:
        How many rows were written.
    Raises:
        TraceError: the file cannot be written, or there was no row.
    """
    rows = iter(rows)
    first = next(rows, None)  # before the file is touched: it is seen here if what is read cannot be
    if first is None:
        raise TraceError("no request is left; nothing was written")
    done = False
    try:
        with ExitStack() as stack:
            raw = sys.stdout.buffer if str(path) == "-" else stack.enter_context(path.open("wb"))
            file = cast("BinaryIO", raw)
            if path.suffix == ".gz":
                file = cast("BinaryIO", stack.enter_context(gzip.GzipFile("", "wb", 6, raw, mtime=0)))
            encoder = msgspec.json.Encoder()
            num_rows, batch = 1, [first]
            for row in rows:
                num_rows += 1
                batch.append(row)
                if len(batch) == _BATCH_ROWS:
                    file.write(encoder.encode_lines(batch))
                    batch.clear()
            file.write(encoder.encode_lines(batch))
            file.flush()  # what cannot be written is noticed here, standard output's end included
        done = True
    except OSError as error:
        raise TraceError(f"cannot write {str(path)!r}: {error.strerror or error}") from error
    finally:
        if not done and path.is_file() and not path.is_symlink():  # /dev/stdout may be a link to a file
            path.unlink()
    return num_rows
