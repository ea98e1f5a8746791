"""What one tenant has sent is nobody else's hit, and no figure says that it was there (SECURITY: prefix caches)."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

import numpy as np
import pytest
from tests.gateway.live_server import LiveServer, make_model_folder, start_fake_server

from expediter.core.clock import VirtualClock
from expediter.core.request import Request
from expediter.gateway.backends.backend import Chosen
from expediter.gateway.backends.config import BackendConfig
from expediter.gateway.backends.registry import Backends

PROMPT = "the same long beginning of a conversation, word for word, again and again " * 4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("model")
    make_model_folder(folder)
    file = tmp_path_factory.mktemp("config") / "tenants.toml"
    tables = [f'[tenants.{name}]\nkey_hashes = ["{sha256(name.encode()).hexdigest()}"]\n' for name in ("alice", "bob")]
    file.write_text("\n".join(tables))
    with start_fake_server(folder, "--config", str(file)) as live:
        yield live


def cached_tokens(server: LiveServer, tenant: str, **fields: object) -> int:
    reply = server.complete(PROMPT, headers={"Authorization": f"Bearer {tenant}"}, max_tokens=2, **fields)
    assert reply.status == 200, reply.body
    found: int = reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def test_usage_tells_of_ones_own_hits_only(server: LiveServer) -> None:
    assert cached_tokens(server, "alice") == 0
    assert cached_tokens(server, "alice") > 200, "a hit is seen, or this test sees nothing"
    assert cached_tokens(server, "bob") == 0
    assert cached_tokens(server, "bob") > 200


def test_a_salt_of_a_request_does_not_lead_to_anothers_cache(server: LiveServer) -> None:
    for salt in ("alice", "bob", sha256(b"alice").hexdigest(), "x"):
        assert cached_tokens(server, "alice", cache_salt=salt) == 0
        assert cached_tokens(server, "bob", cache_salt=salt) == 0
        assert cached_tokens(server, "bob", cache_salt=salt) > 200


def test_the_door_does_not_route_by_what_others_sent() -> None:
    """A tenant who could see where its prompt goes would learn who has sent the same."""
    backends = Backends(clock=VirtualClock())
    for port in (9001, 9002):
        backends.add(BackendConfig(url=f"http://127.0.0.1:{port}", models=("mock",)))
    prompt = np.arange(4096, dtype=np.int32)

    def known(salt: str) -> int:
        request = Request(request_id="r", prompt=prompt, max_tokens=1, cache_salt=salt, arrival_s=0.0)
        chosen = backends.choose(request, "mock", 0.0)
        assert isinstance(chosen, Chosen)
        return chosen.decision.num_cached_tokens

    assert known("alice") == 0
    assert known("alice") > 4000
    assert known("bob") == 0
