"""A salt per tenant keeps their prefix caches apart in vLLM itself, in every API that takes one."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Iterator, Sequence
from json import dumps
from pathlib import Path
from typing import Any

import pytest
from benchmarks.peers.vllm_server import VllmServer
from tests.engines.engine_door import text
from vllm_door import MODEL

from expediter.assembly.server_process import running_server
from expediter.gateway.tenants import hash_of

KEYS = {"alice": "sk-exp-alice", "bob": "sk-exp-bob"}
ASKED: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/completions": lambda prompt: {"prompt": prompt, "max_tokens": 2},
    "/v1/chat/completions": lambda prompt: {"messages": [{"role": "user", "content": prompt}], "max_tokens": 2},
    "/v1/responses": lambda prompt: {"input": prompt, "max_output_tokens": 2},
}


@pytest.fixture(scope="module")
def salted(pair: Sequence[VllmServer], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A gateway in front of the first server, which is told salts."""
    path: Path = tmp_path_factory.mktemp("salted") / "door.toml"
    who = "".join(f'[tenants.{name}]\nkey_hashes = ["{hash_of(key)}"]\n' for name, key in KEYS.items())
    path.write_text(f'[[backends]]\nurl = "{pair[0].url}"\nsend_cache_salt = true\n{who}')
    with running_server(["--config", str(path)]) as url:
        yield url


def ask(url: str, path: str, tenant: str, body: dict[str, Any]) -> None:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEYS[tenant]}"}
    request = urllib.request.Request(url + path, dumps({"model": MODEL, **body}).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert answer.status == 200
        answer.read()


@pytest.mark.parametrize("path", ASKED)
def test_a_tenant_hits_what_it_has_sent_and_nobody_elses(salted: str, pair: Sequence[VllmServer], path: str) -> None:
    body = ASKED[path](text(len(path), 300))
    hits = []
    for tenant in ("alice", "alice", "bob", "bob", "alice"):
        before = pair[0].metric("vllm:prefix_cache_hits_total")
        ask(salted, path, tenant, body)
        hits.append(pair[0].metric("vllm:prefix_cache_hits_total") - before)
    assert hits[0] == hits[2] == 0, "the first of each computes all of it"
    assert min(hits[1], hits[3], hits[4]) >= 256
