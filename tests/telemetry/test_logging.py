"""Lines of the log: JSON if asked for, and a line per request."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from exchange_records import answered

from expediter.telemetry.exchanges import Attempt, Outcome
from expediter.telemetry.logging_setup import RequestLog
from expediter.telemetry.trace_context import TraceContext

PROGRAM = """
import logging
from expediter.telemetry.logging_setup import setup_logging
setup_logging("gateway", log_format="{log_format}")
logging.getLogger("expediter.door").warning('a "quoted"\\nmessage of %d lines', 2)
logging.getLogger("asyncio").info("a slow callback of a secret")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("expediter.door").exception("failed")
"""


def run(log_format: str) -> str:
    program = PROGRAM.format(log_format=log_format)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stderr


def test_json_lines() -> None:
    first, second = (json.loads(line) for line in run("json").splitlines())
    assert first["message"] == 'a "quoted"\nmessage of 2 lines'
    assert (first["level"], first["process"], first["logger"]) == ("WARNING", "gateway", "expediter.door")
    assert first["time"] > 1.7e9
    assert "ZeroDivisionError" in second["exception"]


def test_text_lines() -> None:
    assert 'WARNING gateway expediter.door: a "quoted"' in run("text")


def test_a_line_per_request(capsys: pytest.CaptureFixture[str]) -> None:
    log = RequestLog("gateway")
    failed = Attempt(backend="b1", dispatched_s=100.1, ended_s=100.2, failure="connect")
    log.record(
        answered(attempts=(failed, *answered().attempts), trace=TraceContext(0xABC, 1), client_request_id="mine")
    )
    log.record(answered(attempts=(), queued_s=None, first_byte_s=None, outcome=Outcome.OVER_LIMIT, status=429))
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert first["trace_id"] == f"{0xABC:032x}"
    wanted = {
        "request_id": "req-1",
        "client_request_id": "mine",
        "tenant": "alice",
        "backend": "b0",
        "attempts": 2,
        "failures": ["connect"],
        "ttft_s": 1.0,
        "e2e_s": 2.0,
        "prompt_tokens": 100,
        "slo_met": True,
        "status": 200,
    }
    assert {name: first[name] for name in wanted} == wanted
    assert (second["outcome"], second["status"]) == ("over_limit", 429)
    assert "backend" not in second
    assert "ttft_s" not in second
