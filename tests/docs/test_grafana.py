"""The Grafana dashboard asks for metrics and labels that the server really shows, in PromQL that Prometheus takes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.exposition import generate_latest

from expediter.telemetry.gateway_families import BACKEND_GAUGES, BACKEND_STATE, COUNTED
from expediter.telemetry.gateway_metrics import GatewayMetrics
from expediter.telemetry.metrics import ServerMetrics

DASHBOARD = json.loads((Path(__file__).parents[2] / "docs" / "grafana" / "expediter.json").read_text())
NAME = re.compile(r"\b(?:expediter|vllm):[a-z0-9_]+")
LABELS = re.compile(r"\{([^}]*)\}|\b(?:by|ignoring|on) \(([^)]*)\)")


def panels() -> Iterator[dict[str, Any]]:
    """Yield all panels in their order; those of a closed row lie in it."""
    for panel in DASHBOARD["panels"]:
        yield panel
        yield from panel.get("panels", ())


def expressions() -> Iterator[tuple[str, str]]:
    for panel in panels():
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["definition"]


def exposed() -> dict[str, set[str]]:
    """Return the labels of every name of a sample at /metrics."""
    metrics = ServerMetrics("m")
    GatewayMetrics(metrics.registry)
    suffixes = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    labels = {family.name: {*family.labels, "le"} for family in COUNTED}
    labels |= {name: {"backend"} for name in BACKEND_GAUGES} | {BACKEND_STATE: {"backend", "state"}}
    names = {}
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", generate_latest(metrics.registry).decode(), re.M):
        own = labels.get(name.removesuffix("_total"), {"model_name", "engine", "reason", "cause", "le"})
        names |= {f"{name}{suffix}": own for suffix in suffixes[kind]}
    return names


@pytest.mark.parametrize(("title", "expression"), list(expressions()))
def test_it_asks_for_what_is_there(title: str, expression: str) -> None:
    there = exposed()
    names = NAME.findall(expression)
    assert names, f"{title}: {expression}"
    assert set(names) <= set(there), f"{title}: {set(names) - set(there)}"
    known = set().union(*(there[name] for name in names))
    for selector, grouping in LABELS.findall(expression):
        used = re.findall(r"([a-z_]+)\s*(?:=~?|!=|!~)", selector) + re.findall(r"[a-z_]+", grouping)
        assert set(used) <= known, f"{title}: {set(used) - known} in {expression}"


def test_it_shows_all_that_the_gateway_counts() -> None:
    asked = {name for _, expression in expressions() for name in NAME.findall(expression)}
    for family in COUNTED:
        assert any(name.startswith(family.name) for name in asked), family.name


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in panels()]
    assert len(set(ids)) == len(ids)
    for panel in panels():
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }  # fmt: skip - two axes, two lines
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        assert panel["type"] == "row" or panel["description"], f"{panel['title']} is not explained"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus' own parser, where there is one")
def test_prometheus_takes_it(tmp_path: Path) -> None:
    asked = [e for _, e in expressions() if not e.startswith("label_values")]
    rules: list[dict[str, Any]] = [
        {"record": f"rule_{number}", "expr": e.replace("$__rate_interval", "5m")} for number, e in enumerate(asked)
    ]
    file = tmp_path / "rules.json"  # JSON is YAML
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", str(file)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_metric_of_the_gateway_is_explained() -> None:
    page = (Path(__file__).parents[2] / "docs" / "observe.md").read_text()
    names = [f"{family.name}_total" if family.kind == "counter" else family.name for family in COUNTED]
    for name in (*names, BACKEND_STATE, *BACKEND_GAUGES):
        assert f"`{name}`" in page, name
