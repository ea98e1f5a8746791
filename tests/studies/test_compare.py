"""The comparison, its command, its JSON and its page."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields
from html.parser import HTMLParser
from pathlib import Path

import pytest

from expediter.assembly.simulation import SimulationConfig, simulate
from expediter.cli.main import main
from expediter.core.errors import ConfigurationError
from expediter.studies.comparison import FORMAT, Comparison, ComparisonSpec, LoadUnit, compare, num_runs
from expediter.studies.comparison_cell import Cell
from expediter.studies.comparison_page import comparison_page
from expediter.studies.entries import SETTING_NAMES, parse_entries, parse_entry
from expediter.studies.runs import TraceSpec
from expediter.studies.workers import Workers

BASE = SimulationConfig(gpu="h100")
TRACE = TraceSpec(limit=24)


@pytest.fixture(scope="module")
def compared():
    entries = parse_entries(["sarathi", "<b>tiny</b>=sarathi:max_num_seqs=2", "vllm:replicas=2"], BASE)
    spec = ComparisonSpec(entries=entries, trace=TRACE, loads=(1.5, 0.5), seeds=(0, 1))
    seen = []
    result = compare(spec, Workers(1), lambda done, label: seen.append(done))
    assert seen == list(range(1, num_runs(spec) + 1))
    return result


def test_every_entry_at_every_load(compared):
    assert [(cell.load, cell.entry) for cell in compared.cells] == [
        (load, name) for load in (0.5, 1.5) for name in ("sarathi", "<b>tiny</b>", "vllm:replicas=2")
    ]
    assert [point.offered_rps for point in compared.loads] == pytest.approx(
        [0.5 * compared.capacity_rps, 1.5 * compared.capacity_rps]
    )
    for cell in compared.cells:
        assert len(cell.goodput_rps) == len(cell.attainment) == 2
        assert sum(cell.missed.values()) == pytest.approx(1 - sum(cell.attainment) / 2)
        assert 0 < cell.kv_used_share <= cell.kv_used_share_highest <= 1
        if cell.entry == "vllm:replicas=2":
            assert cell.goodput_rps_per_gpu == tuple(rate / 2 for rate in cell.goodput_rps)
    tiny, sarathi = compared.cells_of("<b>tiny</b>")[1], compared.cells_of("sarathi")[1]
    assert tiny.held_s["no_slot"] > sarathi.held_s.get("no_slot", 0.0)


def test_a_single_draw_is_what_simulate_says():
    spec = ComparisonSpec(entries=parse_entries(["sarathi"], BASE), trace=TRACE, loads=(40.0,), unit=LoadUnit.TRACE)
    (cell,) = compare(spec, Workers(1)).cells
    report = simulate("demo", limit=24, rate_scale=40, gpu="h100")
    assert cell.attainment == (report.slo_attainment,)
    assert cell.ttft_s == report.ttft_s
    assert cell.held_s == {name: s / 24 for name, s in report.decisions.held_s.items()}
    assert cell.goodput_rps[0] == pytest.approx(report.slo_attainment * 24 / report.trace.span_s)


def test_the_json_is_stable(compared):
    written = json.loads(compared.to_json())
    assert FORMAT == 1
    assert list(written) == [field.name for field in fields(Comparison)] == [
        "format", "version", "entries", "trace", "slo", "slo_classes", "unit", "capacity_rps", "loads", "seeds",
        "cells", "findings",
    ]  # fmt: skip
    assert list(written["cells"][0]) == [field.name for field in fields(Cell)] == [
        "entry", "load", "goodput_rps", "goodput_rps_per_gpu", "attainment", "class_attainment", "missed", "held_s",
        "ttft_s", "tpot_s", "e2e_s", "queueing_s", "output_tokens_per_s", "prefix_hit_rate", "num_preemptions",
        "budget_used_share", "kv_used_share", "kv_used_share_highest", "drain_share", "curves", "timeline",
    ]  # fmt: skip
    assert list(written["entries"][0]) == ["name", "settings", "num_gpus", "cost_per_hour", "configuration"]
    assert list(written["findings"]) == ["headline", "reach", "limits", "certainty", "caveats", "verdicts", "sustained"]


class _Reader(HTMLParser):
    """Gathers tags, and the data of the page's scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._is_data = False
        self.data = ""

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._is_data = dict(attrs).get("id") == "data"

    def handle_data(self, data):
        if self._is_data:
            self.data += data
        else:
            self.text.append(data)


@pytest.fixture(scope="module")
def page(compared):
    html = comparison_page(compared, "expediter compare --trace demo")
    reader = _Reader()
    reader.feed(html)
    return html, reader


def test_the_page_needs_nothing_else(page):
    html, reader = page
    for tag, attributes in reader.tags:
        assert not {"src", "href", "action", "data", "srcset", "poster"} & set(attributes), (tag, attributes)
        assert tag not in ("link", "iframe", "img", "object", "embed", "base"), tag
    assert "@import" not in html
    assert not re.search(r"url\(|fetch\(|XMLHttpRequest|WebSocket|import\(", html)
    assert "default-src 'none'" in html  # and could not load anything
    assert "Leon Sorokin" in html  # uPlot's licence comes along
    assert len(html) < 400_000


@pytest.mark.skipif(shutil.which("chromium") is None, reason="a look with a browser, where there is one")
def test_a_browser_draws_every_plot(page, tmp_path):
    html, reader = page
    file = tmp_path / "page.html"
    file.write_text(html)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    drawn = subprocess.run(
        ["chromium", *flags, file.as_uri()], capture_output=True, check=True, text=True, timeout=60
    ).stdout
    plots = [attributes["id"] for tag, attributes in reader.tags if attributes.get("class") == "plot"]
    assert drawn.count("<canvas") == len(plots) > 5
    assert '<html lang="en" class="js">' in drawn


def test_the_page_shows_the_figures(page, compared):
    html, reader = page
    assert "<b>tiny</b>" not in html  # names are text
    assert "&lt;b&gt;tiny&lt;/b&gt;" in html
    text = " ".join(reader.text).replace("\u00a0", " ")
    for sentence in (compared.findings.headline, *compared.findings.reach, *compared.findings.limits):
        assert sentence in text
    data = json.loads(reader.data)
    plots = {attributes["id"] for tag, attributes in reader.tags if attributes.get("class") == "plot"}
    assert set(data["figures"]) == plots >= {"goodput", "attainment", "ttft", "tpot", "queue", "kv"}
    assert data["view"] in ("0.5", "1.5")
    for figure in data["figures"].values():
        for view in figure["views"].values():
            assert len(view["y"]) == len(figure["series"])
            assert all(len(row) == len(view["x"]) for row in view["y"])
            assert view["x"] == sorted(view["x"])
    goodput = data["figures"]["goodput"]
    for series, row in zip(goodput["series"], goodput["views"][""]["y"], strict=False):
        values = [sum(cell.goodput_rps_per_gpu) / 2 for cell in compared.cells_of(series["name"])]
        assert row == pytest.approx(values, rel=1e-4)
    for row in data["figures"]["ttft"]["views"]["1.5"]["y"]:
        assert row == sorted(row)  # a distribution
        assert row[-1] <= 1


def test_entries():
    entry = parse_entry("small=sarathi:max-num-batched-tokens=512,prefix_caching=off,swap_space=1.5", BASE)
    assert entry.name == "small"
    assert entry.config.preset == "sarathi"
    assert entry.config.max_num_batched_tokens == 512
    assert entry.config.prefix_caching is False
    assert entry.config.swap_space_bytes == 3 << 29
    assert entry.config.gpu == "h100"
    assert parse_entry("sarathi:tp=2,gpu=a100-80g", BASE).name == "sarathi:tp=2,gpu=a100-80g"
    assert parse_entry("sarathi:tp=2,gpu=a100-80g", BASE).config.tensor_parallel == 2


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["nonsense"], "no preset 'nonsense'; there are: "),
        (["sarathi:max_seqs=4"], f"no setting 'max_seqs'; there are: {', '.join(SETTING_NAMES)}"),
        (["sarathi:max_num_seqs=many"], "max_num_seqs must be a number, not 'many'"),
        (["sarathi:max_num_seqs="], "max_num_seqs must be a number, not ''"),
        (["sarathi:prefix_caching=yes"], "prefix_caching must be on or off, not 'yes'"),
        (["sarathi:ordering=best"], "no ordering 'best'; there are: "),
        (["sarathi:gpu=h1000"], "no GPU 'h1000'; there are: "),
        (["sarathi:routing=best"], "best"),
        (["sarathi:tp=0"], "tensor_parallel must be at least 1"),
        (["sarathi:tp=1,tp=2"], "tp is set twice"),
        (["sarathi:"], "is not of the form"),
        (["=sarathi"], "is not of the form"),
        ([""], "is not of the form"),
        (["sarathi", "sarathi"], "two entries are called 'sarathi'"),
    ],
)
def test_wrong_entries_are_explained(texts, message):
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        parse_entries(texts, BASE)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--preset", "nonsense"], "no preset 'nonsense'"),
        (["--load", "1,fast"], "load must be numbers with commas between them"),
        (["--load", "1,-1"], "a load must be a finite number above 0, not -1"),
        (["--load", "1,1"], "a load is given twice"),
        (["--rate-scale", "x"], "rate scale must be numbers"),
        (["--seeds", "0"], "seeds must be at least 1, not 0"),
        (["--workers", "0"], "workers must be at least 1, not 0"),
        (["--trace", "nowhere"], "nowhere"),
        (["--html", "/nowhere/page.html"], "cannot write '/nowhere/page.html'"),
    ],
)
def test_wrong_flags_are_one_line(capsys, words, message):
    assert main(["compare", "--trace", "demo", "--limit", "4", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("expediter: ")
    assert message in err
    assert err.count("\n") == 1


def test_the_command(capsys, tmp_path):
    words = ["compare", "--trace", "demo", "--limit", "12", "--preset", "sarathi", "--preset", "orca", "--load", "1,2"]
    words += ["--workers", "1", "--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html")]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "sarathi's capacity" in " ".join(out.split())
    assert "orca" in out
    written = json.loads((tmp_path / "a.json").read_text())
    assert [entry["name"] for entry in written["entries"]] == ["sarathi", "orca"]
    again = "compare --trace demo --limit 12 --preset sarathi --preset orca --load 1,2 --html comparison.html"
    assert f"expediter {again}" in (tmp_path / "a.html").read_text()
    # The same again is the same, byte for byte, whoever does it.
    words[words.index("--workers") + 1] = "2"
    assert main([*words[:-3], str(tmp_path / "b.json"), "--html", str(tmp_path / "b.html")]) == 0
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_rows_left_out_are_told_of(tmp_path, capsys):
    trace = tmp_path / "broken.jsonl"
    good = [f'{{"timestamp": {n}, "input_length": 10, "output_length": 2, "hash_ids": [1]}}' for n in range(4)]
    trace.write_text("\n".join([*good, "nonsense"]) + "\n")
    assert main(["compare", "--trace", str(trace), "--load", "1", "--preset", "sarathi", "--workers", "1"]) == 0
    assert "with a defect were left out: 1" in " ".join(capsys.readouterr().out.split())


def test_all_at_once_has_no_load(tmp_path, capsys):
    trace = tmp_path / "at_once.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 10, "output_length": 2, "hash_ids": [1]}\n' * 3)
    assert main(["compare", "--trace", str(trace), "--no-spread-ticks", "--workers", "1"]) == 2
    assert "all requests arrive at once" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="sees in /proc when the workers are there")
def test_ctrl_c_says_so():
    words = ["compare", "--trace", "demo", "--load", ",".join(str(1 + n / 100) for n in range(200)), "--workers", "2"]
    with subprocess.Popen(
        [sys.executable, "-m", "expediter.cli.main", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        children = Path(f"/proc/{program.pid}/task/{program.pid}/children")
        deadline = time.monotonic() + 30
        while not children.read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        program.send_signal(signal.SIGINT)
        out, err = program.communicate(timeout=30)
    assert program.returncode == 130
    assert out == ""
    assert err == "expediter: interrupted\n"
