"""The OpenAPI document is true: requests made from it, and near misses, meet no crash and no answer that it hides."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from live_server import LiveServer, start_fake_server
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from expediter.gateway.api.operations import OWN_OPERATIONS
from expediter.gateway.app import own_routes
from expediter.gateway.bodies import refused_fields
from expediter.gateway.openapi import document

NUM_EXAMPLES = 15
BUDGET_S = 3.0
"""Of each kind per operation; examples beyond it are not tried. Some take seconds: grammars, long outputs."""
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
ASKED_FOR = {"late", "deadline_exceeded"}
"""Refusals that a request asks for itself, with targets that cannot be met."""


@pytest.fixture(scope="module")
def server(model_folder: Path) -> Iterator[LiveServer]:
    with start_fake_server(model_folder, "--num-blocks", "64") as live:
        yield live


@pytest.fixture(scope="module")
def operations(server: LiveServer) -> dict[str, Any]:
    schema = schemathesis.openapi.from_dict(server.get("/openapi.json").json)
    found = [result.ok() for result in schema.get_all_operations()]
    return {operation.path: operation for operation in found}


PATHS = sorted(path for path in OWN_OPERATIONS if path not in ("/metrics", "/openapi.json"))


def test_every_route_is_described(server: LiveServer) -> None:
    served = server.get("/openapi.json").json
    own = [route.path.replace("{name:path}", "{name}") for route in own_routes(None, None)]  # type: ignore[arg-type]
    assert set(served["paths"]) == set(OWN_OPERATIONS) > set(own)
    assert served["components"]["schemas"]["ChatBody"]["properties"]["audio"] == {"enum": [None]}
    for path, operation in OWN_OPERATIONS.items():
        assert operation.summary.endswith("."), path
        assert server.get(path.replace("{name}", "fake")).status != 404 or "/requests/" in path
    with pytest.raises(KeyError):
        document(["/unheard-of"], OWN_OPERATIONS)


def test_what_is_forwarded_is_described_as_that() -> None:
    told = document(["/health"], OWN_OPERATIONS, ["/v1/embeddings", "/health"])["paths"]
    assert set(told) == {"/health", "/v1/embeddings"}
    assert list(told["/v1/embeddings"]["post"]["responses"]) == ["default"]
    assert "get" in told["/health"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_requests_made_from_the_document(
    server: LiveServer, operations: dict[str, Any], path: str, mode: GenerationMode
) -> None:
    operation = operations[path]
    if mode is GenerationMode.NEGATIVE and not (operation.body or operation.query):
        return  # nothing can be wrong with it
    started_s, tried = time.monotonic(), list[Any]()

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def run(case: Any) -> None:
        if time.monotonic() > started_s + BUDGET_S:
            return
        tried.append(case)
        response = case.call(base_url=server.url, timeout=60)
        if response.status_code >= 500:
            assert response.status_code in (503, 504), response.text
            assert response.json()["error"]["code"] in ASKED_FOR, response.text
        case.validate_response(response, checks=CHECKS)

    run()
    assert tried
    assert server.complete("alive").json["choices"][0]["text"] == "alive"


def test_the_page_tells_of_every_parameter() -> None:
    """Each field of each body is in its section of docs/api.md, on the right side."""
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    shared = sections["Fields of every API"]
    for path in (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
    ):
        heading = next(heading for heading in sections if f"`{path}`" in heading)
        kind = OWN_OPERATIONS[path].body
        assert kind is not None
        told: dict[str, str] = {}
        for names, words in re.findall(r"^\| (`.+?) \| (.+?) \|$", shared + sections[heading], re.MULTILINE):
            told |= dict.fromkeys(re.findall(r"`(\w+)`", names), words)
        refused = refused_fields(kind)
        for name in kind.__struct_fields__:
            assert name in told, f"{path}: {name}"
            assert told[name].startswith("refused") == (name in refused), f"{path}: {name} is {told[name]}"
