"""The comparison of routers: its backends and its load are what they say, and the bare forwarder forwards."""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.router.__main__ import LOADS, against_smg, table
from benchmarks.router.processes import Backends, Load, Router, compile_c, floor

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="the mock backend and the load are C programs")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("router")
    for name in ("mock_backend", "load_generator"):
        compile_c(name, folder)
    return folder


@pytest.fixture(scope="module")
def backends(programs: Path) -> Iterator[Backends]:
    running = Backends(programs / "mock_backend", 2, num_chunks=8, gap_us=2000)
    yield running
    running.close()


def test_a_backend_speaks_openais_api(backends: Backends) -> None:
    url = f"http://127.0.0.1:{backends.ports[0]}/v1"
    with urllib.request.urlopen(f"{url}/models") as response:
        assert json.load(response)["data"][0]["id"] == "mock"
    for stream, lines in ((False, 0), (True, 9)):
        body = json.dumps({"model": "mock", "messages": [], "stream": stream}).encode()
        with urllib.request.urlopen(f"{url}/chat/completions", body) as response:
            raw = response.read()
        assert raw.count(b"data: ") == lines
        assert raw.endswith(b"data: [DONE]\n\n") if stream else json.loads(raw)["usage"]["total_tokens"]


@pytest.mark.parametrize("is_stream", [False, True])
def test_the_load_comes_through_the_bare_forwarder(
    programs: Path, backends: Backends, is_stream: bool, tmp_path: Path
) -> None:
    router = Router("floor", floor(), backends.ports, tmp_path)
    try:
        before_s = router.cpu_s()
        figures = Load(8, 400, is_stream=is_stream).run(programs / "load_generator", router.port)
        assert figures["good"] == 400
        assert figures["chunks"] == (400 * 8 if is_stream else 0)
        if is_stream:
            assert figures["p50_ms"] >= 7 * 2
        assert router.cpu_s() >= before_s
    finally:
        router.close()


def test_a_load_whose_requests_fail_gives_no_figures(programs: Path, tmp_path: Path) -> None:
    closing = Backends(programs / "mock_backend", 1, num_chunks=1, gap_us=0)
    router = Router("floor", floor(), closing.ports, tmp_path)
    closing.close()
    try:
        with pytest.raises(SystemExit, match=r"errors.*unfinished"):
            Load(2, 10, is_stream=False, max_s=1).run(programs / "load_generator", router.port)
    finally:
        router.close()


def test_the_tables_are_made_round_by_round() -> None:
    cases = (*LOADS, "added p50")
    samples = {
        (name, case): [cost, 2 * cost]
        for name, cost in (("expediter a", 1.0), ("smg cache_aware", 4.0))
        for case in cases
    }
    assert [row["by smg cache_aware"] for row in against_smg(samples)] == ["0.25 (0.25 to 0.25)"] * len(cases)
    (row, _) = table({"expediter a": floor(), "smg cache_aware": floor()}, samples)
    assert row["added p50 ms, c=1"] == "1.500 (1.000)"
