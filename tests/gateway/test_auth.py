"""With a key configured, nothing but the two probes answers without it (CASES 51 for the routes that exist)."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import LiveServer, start_fake_server

from expediter.gateway.app import own_routes
from expediter.gateway.door.door import OPEN_PATHS
from expediter.gateway.door.pages import Pages
from expediter.gateway.observation import Observation
from expediter.gateway.tenants import TenantBook

KEYS = ("secret-one", "secret-two")


@pytest.fixture(scope="module")
def locked(model_folder: Path) -> Iterator[LiveServer]:
    with start_fake_server(model_folder, "--api-key", KEYS[0], "--api-key", KEYS[1]) as live:
        yield live


def status(server: LiveServer, method: str, path: str, **headers: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status


def routes() -> list[str]:
    """Every registered route; handlers are bound, not called."""
    own = own_routes(None, None)  # type: ignore[arg-type]
    pages = Pages(None, None, dict).routes()  # type: ignore[arg-type]
    seen = Observation(None, None, None, None).routes()  # type: ignore[arg-type]
    return [route.path.replace("{name:path}", "fake") for route in (*own, *pages, *seen)]


def test_every_route_needs_a_key(locked: LiveServer) -> None:
    paths = set(routes())
    assert paths > OPEN_PATHS
    assert {"/v1/completions", "/metrics", "/version", "/steps", "/v1/models"} < paths
    for path in sorted(paths - OPEN_PATHS):
        variants = (path, "/" + path, path + "/", path + "?x=/health", path.replace("/v1", "//v1"), "/health/.." + path)
        for variant in (*variants, path.upper(), path.replace("/", "/%2e/", 1), "/x" + path):
            for method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE"):
                assert status(locked, method, variant) == 401, (method, variant)
    for path in ("/", "/docs", "/openapi.json", "/nothing", "/health/", "//health", "/ready/x"):
        assert status(locked, "GET", path) == 401
    for path in OPEN_PATHS:
        assert status(locked, "GET", path) == 200


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "secret-one",
        "Basic secret-one",
        "Bearer secret-one x",
        "Bearer SECRET-ONE",
    ],
)
def test_wrong_keys(locked: LiveServer, header: str) -> None:
    assert status(locked, "GET", "/v1/models", Authorization=header) == 401


@pytest.mark.parametrize("key", KEYS)
def test_right_keys(locked: LiveServer, key: str) -> None:
    for scheme in ("Bearer", "bearer"):
        headers = {"Authorization": f"{scheme} {key}"}
        assert locked.get("/v1/models", headers=headers).status == 200
        assert locked.post("/v1/completions", {"prompt": "hi"}, headers=headers).status == 200
    reply = locked.get("/v1/models")
    assert reply.status == 401
    assert reply.json["error"]["code"] == "invalid_api_key"
    assert reply.headers["www-authenticate"] == "Bearer"


def test_keys_are_kept_as_hashes() -> None:
    book = TenantBook(keys=KEYS)
    assert not any(key in repr(vars(book)) for key in KEYS)
    found = book.of_key(b"secret-two")
    assert found is not None
    assert found.name == "default"
    assert book.of_key(b"secret-twoo") is None
    assert book.anonymous is None
    assert TenantBook().anonymous is not None
