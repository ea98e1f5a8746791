"""The OpenAPI document is true: requests made from it, and near misses, meet no crash and no answer that it hides."""

from __future__ import annotations

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

from expediter.gateway.app import own_routes
from expediter.gateway.openapi import OPERATIONS, document

NUM_EXAMPLES = 25
BUDGET_S = 5.0
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


def routes() -> list[str]:
    return [route.path.replace("{name:path}", "{name}") for route in own_routes(None, None, None)]  # type: ignore[arg-type]


def test_every_route_is_described(server: LiveServer) -> None:
    served = server.get("/openapi.json").json
    assert set(served["paths"]) == set(routes())
    assert served == document(routes())
    assert served["components"]["schemas"]["ChatBody"]["properties"]["audio"] == {"enum": [None]}
    for path, operation in OPERATIONS.items():
        assert operation.summary.endswith("."), path
    with pytest.raises(KeyError):
        document(["/unheard-of"])


@pytest.mark.parametrize("path", sorted(set(routes()) - {"/metrics", "/openapi.json"}))
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
