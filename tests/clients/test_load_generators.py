"""NVIDIA's AIPerf and GuideLLM, as their users call them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.peers.environments import AIPERF, GUIDELLM
from client_runs import run
from tests.engines.engine_door import interpreter

from expediter.engine.default_model import DEFAULT_MODEL, resolve_model

NUM_REQUESTS = 8
OUTPUT_TOKENS = 8


@pytest.fixture
def aiperf() -> Path:
    return interpreter(AIPERF, "test-clients").with_name("aiperf")


@pytest.fixture
def guidellm() -> Path:
    return interpreter(GUIDELLM, "test-clients").with_name("guidellm")


def test_aiperf(aiperf: Path, url: str, tmp_path: Path) -> None:
    run(
        [
            *(aiperf, "profile", "--ui", "none", "--artifact-dir", tmp_path),
            *("--url", url, "--model", DEFAULT_MODEL, "--tokenizer", resolve_model()),
            *("--endpoint-type", "chat", "--streaming", "--concurrency", "4", "--request-count", str(NUM_REQUESTS)),
            *("--isl", "64", "--osl", str(OUTPUT_TOKENS), "--extra-inputs", "ignore_eos:true"),
        ]
    )
    report = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert report["error_summary"] == []
    assert report["request_count"]["avg"] == NUM_REQUESTS
    assert report["usage_completion_tokens"]["avg"] == OUTPUT_TOKENS
    assert report["time_to_first_token"]["min"] > 0
    assert report["inter_token_latency"]["min"] > 0
    scraped = json.loads((tmp_path / "server_metrics_export.json").read_text())  # it reads /metrics beside the API
    assert scraped["summary"]["endpoints_successful"] == [f"{url}/metrics"]


def test_guidellm(guidellm: Path, url: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    run(
        [
            *(guidellm, "run", "--disable-console"),
            *("--backend", f"kind=openai_http,target={url}"),
            *("--tokenizer", f"kind=huggingface_auto,model={resolve_model()}"),
            *("--data", f"kind=synthetic_text,prompt_tokens=64,output_tokens={OUTPUT_TOKENS}"),
            *("--profile", "kind=concurrent,streams=4", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
            *("--output", f"kind=json,path={path}"),
        ]
    )
    (benchmark,) = json.loads(path.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (NUM_REQUESTS, 0)
    assert benchmark["metrics"]["time_to_first_token_ms"]["successful"]["min"] > 0
