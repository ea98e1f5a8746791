"""`expediter trace` as its users run it."""

import json

import pytest
from sim_builders import write_jsonl

from expediter.cli.main import main

OWN = {"arrival_s": 0.5, "input_tokens": 20, "output_tokens": 3}


def test_describe_prints_tables_or_json(capsys, tmp_path):
    assert main(["trace", "describe", "demo"]) == 0
    assert "52 requests" in capsys.readouterr().out
    path = write_jsonl(tmp_path / "t.jsonl", [OWN | {"tenant": "ant", "slo_class": "chat", "n": 2}, OWN])
    assert main(["trace", "describe", str(path)]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("all at once", "not recorded", "ant", "chat", "sequences"))
    assert main(["trace", "describe", str(path), "--json", "-"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert (got["num_requests"], got["num_sequences"], got["tenants"]) == (2, 3, {"": 1, "ant": 1})
    assert main(["trace", "describe", str(path), "--json", str(tmp_path / "d.json")]) == 0
    assert json.loads((tmp_path / "d.json").read_text()) == got
    assert main(["trace", "describe", str(path), "--json", str(tmp_path / "no" / "d.json")]) == 2


def test_convert_then_describe_is_the_same_trace(capsys, tmp_path):
    out = tmp_path / "own.jsonl.gz"
    assert main(["trace", "convert", "demo", "-o", str(out), "--seed", "4"]) == 0
    first = out.read_bytes()
    assert main(["trace", "convert", "demo", "-o", str(out), "--seed", "4"]) == 0
    assert out.read_bytes() == first
    capsys.readouterr()
    described = []
    for name in ("demo", str(out)):
        assert main(["trace", "describe", name, "--json", "-", "--seed", "4"]) == 0
        described.append(json.loads(capsys.readouterr().out))
        described[-1].pop("name")
    assert described[0] == described[1]


def test_defects_go_to_standard_error_and_strict_stops(capsys, tmp_path):
    path = write_jsonl(tmp_path / "t.jsonl", [OWN, OWN | {"input_tokens": 0}])
    assert main(["trace", "slice", str(path), "-o", "-"]) == 0
    captured = capsys.readouterr()
    assert "t.jsonl:2: " in captured.err
    assert "1 row was left out" in captured.err
    for command in (["trace", "describe"], ["trace", "convert", "-o", "-"], ["simulate", "--trace"]):
        assert main([*command, str(path), "--strict"]) == 2
        assert "t.jsonl:2: " in capsys.readouterr().err
    assert main(["simulate", "--trace", str(path)]) == 0
    assert "1 row was left out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--every", "0"], "every must be at least 1"),
        (["--start", "-1"], "start"),
        (["--start", "3", "--end", "2"], "end must be after"),
        (["--start", "1e9"], "no request is left"),
    ],
)
def test_slices_that_mean_nothing(capsys, tmp_path, flags, problem):
    assert main(["trace", "slice", "demo", "-o", str(tmp_path / "o"), *flags]) == 2
    assert problem in capsys.readouterr().err


def test_a_trace_is_not_written_over_itself(capsys, tmp_path):
    path = write_jsonl(tmp_path / "t.jsonl", [OWN])
    assert main(["trace", "convert", str(path), "-o", str(path)]) == 2
    assert "another file" in capsys.readouterr().err
    assert json.loads(path.read_text()) == OWN


@pytest.mark.parametrize("command", [["trace", "describe"], ["trace", "convert", "-o", "-"], ["simulate", "--trace"]])
def test_a_trace_that_is_not_there_is_answered_with_those_that_are(capsys, command):
    assert main([*command, "nowhere"]) == 2
    shown = capsys.readouterr().err
    assert "Expediter jsonl" in shown
    assert "come with Expediter: demo" in shown
