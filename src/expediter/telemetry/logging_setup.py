"""Logging of the server processes: one line per record on standard error, never a prompt or a key."""

from __future__ import annotations

import logging
import sys
import time
from typing import Final, Literal

import msgspec

from expediter.telemetry.exchanges import ExchangeRecord

LogFormat = Literal["text", "json"]
_TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def setup_logging(process: str, level: int = logging.INFO, log_format: LogFormat = "text") -> None:
    """Send the records of this process to standard error.

    Requests are logged by their ids only: a URL may carry anything.

    Args:
        process: name of the process, put into each line.
        log_format: "json" for an object per line, with the keys `time` (seconds since 1970), `level`, `process`,
            `logger`, `message`, and `exception` where there is one.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _JsonLines(process)
        if log_format == "json"
        else logging.Formatter(_TEXT.replace("%(name)s", f"{process} %(name)s"))
    )
    logging.basicConfig(level=level, handlers=[handler])
    logging.getLogger("asyncio").setLevel(logging.WARNING)


class _JsonLines(logging.Formatter):
    """An object per record."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": record.created,
            "level": record.levelname,
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class _RequestLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the log about one request; times in seconds, what does not apply is left out."""

    time: float
    level: str
    process: str
    logger: str
    request_id: str
    client_request_id: str | None
    tenant: str
    model: str
    path: str
    outcome: str
    status: int
    attempts: int
    e2e_s: float
    prompt_tokens: int
    output_tokens: int
    error_code: str | None = None
    backend: str | None = None
    failures: tuple[str, ...] = ()
    queue_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    cached_tokens: int | None = None
    slo_class: str = ""
    slo_met: bool | None = None
    trace_id: str | None = None


class RequestLog:
    """Writes a JSON line per request (`ExchangeSink`) to standard error, beside the other lines of the process."""

    def __init__(self, process: str) -> None:
        self._process = process

    def record(self, record: ExchangeRecord) -> None:
        line = _RequestLine(
            time=time.time(),
            level="INFO",
            process=self._process,
            logger="expediter.requests",
            request_id=record.request_id,
            client_request_id=record.client_request_id,
            tenant=record.tenant,
            model=record.model,
            path=record.path,
            outcome=record.outcome.value,
            status=record.status,
            error_code=record.error_code,
            backend=record.backend or None,
            attempts=len(record.attempts),
            failures=tuple(attempt.failure for attempt in record.attempts if attempt.failure is not None),
            queue_s=_rounded(record.queue_s),
            ttft_s=_rounded(record.ttft_s),
            tpot_s=_rounded(record.tpot_s),
            e2e_s=round(record.e2e_s, 6),
            prompt_tokens=record.num_prompt_tokens,
            output_tokens=record.num_output_tokens,
            cached_tokens=record.num_cached_tokens,
            slo_class=record.slo_class,
            slo_met=record.met_slo,
            trace_id=None if record.trace is None else f"{record.trace.trace_id:032x}",
        )
        # One call, so that a line stays whole beside those of other processes.
        sys.stderr.write(msgspec.json.encode(line).decode() + "\n")


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
