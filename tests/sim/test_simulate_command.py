"""The command: output files, flags over preset, errors that help."""

import argparse
import json
import subprocess
import sys
from dataclasses import asdict

import pytest
from sim_builders import write_jsonl

from expediter.assembly.presets import PRESET_NAMES, load_preset
from expediter.cli import simulate
from expediter.core.errors import ConfigurationError


@pytest.fixture
def trace(tmp_path):
    rows = [{"arrival_s": i / 2, "input_tokens": 30 + i, "output_tokens": 5} for i in range(20)]
    return str(write_jsonl(tmp_path / "trace.jsonl", rows))


def command(*words):
    parser = argparse.ArgumentParser()
    simulate.add_parser(parser.add_subparsers())
    args = parser.parse_args(["simulate", *words])
    return args.run(args)


def report_of(capsys, *words):
    assert command(*words, "--json", "-") == 0
    return json.loads(capsys.readouterr().out)


def test_table_and_files(trace, tmp_path, capsys):
    events, report = tmp_path / "events.jsonl", tmp_path / "report.json"
    assert command("--trace", trace, "--events", str(events), "--json", str(report)) == 0
    out = capsys.readouterr().out
    for words in ("llama-3.1-8b", "TTFT", "TPOT", "goodput", "20 arrived = 20 finished", "prefix hit rate"):
        assert words in " ".join(out.split())
    content = json.loads(report.read_text())
    for key in (
        *("requests", "ttft_s", "tpot_s", "e2e_s", "queueing_s", "slo_attainment", "goodput_rps", "wall_s"),
        *("goodput_rps_per_gpu", "output_tokens_per_s", "prefix_hit_rate", "num_preemptions", "num_steps"),
        "simulated_s",
    ):
        assert key in content
    assert content["requests"] == {"arrived": 20, "finished": 20, "rejected": 0, "unservable": 0, "aborted": 0}
    assert set(content["ttft_s"]) == {"mean", "p50", "p90", "p99"}
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    assert {line["event"] for line in lines} == {"queued", "routed", "admitted", "first_token", "finished"}


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_every_preset_simulates(name, trace, capsys):
    report = report_of(capsys, "--trace", trace, "--preset", name, "--max-model-len", "4096")
    setup, preset = report["configuration"], load_preset(name)
    assert report["requests"]["finished"] == 20
    assert setup["policy"] == asdict(preset.policy)
    is_whole = name in ("static", "orca", "vllm")
    budget = 4096 + preset.scheduler.max_num_seqs if is_whole else preset.scheduler.max_num_batched_tokens
    assert setup["max_num_batched_tokens"] == budget


def test_a_whole_prompt_needs_a_budget_that_holds_it(trace):
    words = ("--trace", trace, "--batching", "iteration_level", "--max-model-len", "4096")
    with pytest.raises(ConfigurationError, match=r"must be at least max_model_len \(4096\): the batching 'iteration"):
        command(*words, "--max-num-batched-tokens", "2048")
    assert command(*words, "--json", "-") == 0


def test_parts_of_the_policy_have_flags(trace, capsys):
    parts = {
        "ordering": "lifo",
        "batching": "prompts_first",
        "memory": "predicted_peak",
        "budget": "slack",
        "victims": "last_in",
        "preemption_mode": "swap",
    }
    flags = {name: f"--{name.replace('_', '-')}" for name in parts}
    words = [word for name, part in parts.items() for word in (flags[name], part)]
    assert report_of(capsys, "--trace", trace, *words)["configuration"]["policy"].items() >= parts.items()
    for name in parts:
        with pytest.raises(ConfigurationError, match=r"no .* 'nothing'; there are: "):
            command("--trace", trace, flags[name], "nothing")


def test_flags_win_over_the_preset(trace, capsys):
    words = ("--max-num-seqs", "7", "--max-num-batched-tokens", "99", "--max-model-len", "64", "--block-size", "8")
    more = ("--num-gpu-blocks-override", "50", "--scheduling-policy", "priority", "--routing", "round_robin")
    setup = report_of(capsys, "--trace", trace, *words, *more, "--replicas", "2", "--tp", "2")["configuration"]
    expected = {"max_num_seqs": 7, "max_num_batched_tokens": 99, "max_model_len": 64, "block_size": 8}
    expected |= {"num_blocks": 50, "routing": "round_robin"}
    expected |= {"replicas": 2, "tensor_parallel": 2}
    assert {key: setup[key] for key in expected} == expected
    assert setup["policy"]["ordering"] == "priority"


def test_limit_rate_and_slo(trace, capsys):
    slow = report_of(capsys, "--trace", trace, "--limit", "10", "--slo", "ttft=5")
    fast = report_of(capsys, "--trace", trace, "--limit", "10", "--rate-scale", "4")
    assert slow["requests"]["arrived"] == fast["requests"]["arrived"] == 10
    assert slow["slo"] == {"ttft_s": 5.0, "tpot_s": None, "e2e_s": None}
    assert fast["trace"]["span_s"] == slow["trace"]["span_s"] / 4
    assert fast["simulated_s"] < slow["simulated_s"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--preset", "nope"], "sarathi"),
        (["--model", "nope"], "llama"),
        (["--gpu", "nope"], "a100-80g"),
        (["--routing", "nope"], "least_load"),
        (["--scheduling-policy", "nope"], "fcfs"),
        (["--model", "llama-3.1-405b"], "takes at least"),
        (["--slo", "speed=1"], "ttft=SECONDS"),
        (["--slo", "ttft=fast"], "number of seconds"),
        (["--slo", "ttft=nan"], "finite"),
        (["--slo", "ttft=1,ttft=2"], "ttft=SECONDS"),
        (["--limit", "0"], "limit"),
        (["--rate-scale", "-1"], "rate scale"),
        (["--replicas", "0"], "replicas"),
        (["--max-num-seqs", "0"], "max_num_seqs"),
        (["--events", "/no/such/folder/file"], "cannot write"),
    ],
)
def test_errors_name_what_is_wrong_or_what_exists(trace, words, message):
    with pytest.raises(ConfigurationError, match=message):
        command("--trace", trace, *words)


def test_a_trace_that_is_not_there(tmp_path, trace):
    with pytest.raises(ConfigurationError, match=r"Mooncake jsonl.*trace\.jsonl"):
        command("--trace", str(tmp_path / "none"))


def test_the_trace_that_comes_along(capsys):
    assert report_of(capsys, "--trace", "demo", "--limit", "20")["requests"]["finished"] == 20
    with pytest.raises(ConfigurationError, match="come with Expediter: demo"):
        command("--trace", "demon")


def test_progress_on_a_terminal(trace, monkeypatch):
    shown = []
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("rich.progress.Progress.update", lambda bar, task, completed, **others: shown.append(completed))
    assert command("--trace", trace) == 0
    assert shown == [20]


def test_building_the_parser_imports_nothing_heavy():
    program = (
        "import argparse, sys; from expediter.cli import simulate; "
        "simulate.add_parser(argparse.ArgumentParser().add_subparsers()); "
        "sys.exit(', '.join({'numpy', 'pyarrow', 'rich'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, capture_output=True).stderr == b"\n"


def test_classes_tenants_and_explanations(tmp_path, capsys):
    rows = [
        {"arrival_s": i / 50, "input_tokens": 900, "output_tokens": 9, "slo_class": "ab"[i % 2], "tenant": f"t{i % 3}"}
        for i in range(30)
    ]
    trace, config = str(write_jsonl(tmp_path / "trace.jsonl", rows)), tmp_path / "c.toml"
    config.write_text("[slo_classes.a]\nttft_s = 0.5\n[slo_classes.b]\ne2e_s = 60\n")
    words = ("--trace", trace, "--config", str(config), "--max-num-seqs", "4", "--explain", "r0000020")
    assert command(*words, "--explain", "r0000000") == 0
    out = capsys.readouterr().out
    for expected in (
        "attained",
        "tenant",
        "t2",
        "token budget",
        "r0000020 arrived at 0.400 s",
        "held",
        "ended: length",
    ):
        assert expected in out
    assert command(*words, "--json", "-", "--seed", "3", "--rate-scale", "2") == 0
    printed = capsys.readouterr()
    assert "r0000020 arrived" in printed.err
    report = json.loads(printed.out)
    assert set(report["classes"]) == {"a", "b"}
    assert report["classes"]["b"]["slo_attainment"] == 1
    assert set(report["tenants"]["t0"]) >= {"arrived", "slo_attainment", "goodput_rps", "ttft_s", "prefix_hit_rate"}
    assert (report["trace"]["seed"], report["trace"]["rate_scale"], report["trace"]["limit"]) == (3, 2.0, None)
    assert sum(report["decisions"]["held_s"].values()) > 0
    with pytest.raises(ConfigurationError, match="no request 'r9'"):
        command("--trace", trace, "--config", str(config), "--explain", "r9")
    with pytest.raises(ConfigurationError, match="no SLO class 'a'"):
        command("--trace", trace)


@pytest.mark.parametrize(("favoured", "other"), ["ab", "ba"])
def test_weights_of_tenants_come_from_the_servers_file(tmp_path, capsys, favoured, other):
    """What a server's file gives a tenant, a simulation with that file gives it, too."""
    rows = [{"arrival_s": 0, "input_tokens": 900, "output_tokens": 9, "tenant": "ab"[i % 2]} for i in range(60)]
    trace, config = str(write_jsonl(tmp_path / "trace.jsonl", rows)), tmp_path / "c.toml"
    config.write_text(f"[tenants.{favoured}]\nweight = 9.0\n")
    words = ("--trace", trace, "--config", str(config), "--max-num-seqs", "2", "--ordering", "fair_share")
    assert command(*words, "--json", "-") == 0
    tenants = json.loads(capsys.readouterr().out)["tenants"]
    assert 1.5 * tenants[favoured]["ttft_s"]["mean"] < tenants[other]["ttft_s"]["mean"]


def test_what_the_gpus_cost(trace, capsys):
    split = ("--gpu", "h100", "--tp", "2", "--pp", "2", "--replicas", "3", "--price", "h100=2.5")
    report = report_of(capsys, "--trace", trace, *split)
    assert report["num_gpus"] == 12
    assert report["cost_per_hour"] == 30.0
    per_token = 30.0 / 3600 / report["output_tokens_per_s"]
    assert report["cost_per_million_output_tokens"] == pytest.approx(per_token * 1e6)
    assert command("--trace", trace, *split) == 0
    assert "$30 per hour for 12 GPUs" in " ".join(capsys.readouterr().out.split())


def test_types_and_splits_change_the_step_time_and_the_room(trace, capsys):
    def figures(*words):
        report = report_of(capsys, "--trace", trace, "--model", "mixtral-8x7b", "--gpu", "h100", "--tp", "2", *words)
        return report["tpot_s"]["mean"], report["configuration"]["num_blocks"]

    whole = figures()
    fp8, small_kv = figures("--weight-dtype", "fp8"), figures("--kv-dtype", "fp8")
    staged, grouped = figures("--pp", "2"), figures("--ep", "2")
    assert fp8[0] < whole[0]
    assert fp8[1] > whole[1]
    assert small_kv[1] == pytest.approx(2 * whole[1], abs=2)
    assert staged[1] > 2 * whole[1]
    assert grouped[1] == whole[1]
    assert grouped[0] != whole[0]
