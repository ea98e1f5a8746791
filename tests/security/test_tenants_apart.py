"""Where a prompt goes tells nobody what others have sent (SECURITY: prefix caches); replicas: test_tenants.py."""

from __future__ import annotations

import numpy as np

from expediter.core.clock import VirtualClock
from expediter.core.request import Request
from expediter.gateway.backends.config import BackendConfig
from expediter.gateway.backends.dispatcher import Chosen
from expediter.gateway.backends.registry import Backends


def test_the_door_does_not_route_by_what_others_sent() -> None:
    """A tenant who could see where its prompt goes would learn who has sent the same."""
    backends = Backends(clock=VirtualClock())
    for port in (9001, 9002):
        backends.add(BackendConfig(url=f"http://127.0.0.1:{port}", models=("mock",)))
    prompt = np.arange(4096, dtype=np.int32)

    def known(salt: str) -> int:
        request = Request(request_id="r", prompt=prompt, max_tokens=1, cache_salt=salt, arrival_s=0.0)
        chosen = backends.dispatcher.choose(request, "mock", 0.0)
        assert isinstance(chosen, Chosen)
        return chosen.decision.num_cached_tokens

    assert known("alice") == 0
    assert known("alice") > 4000
    assert known("bob") == 0
