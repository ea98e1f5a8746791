"""Flags of `expediter serve`: what is wrong is said in one line, with what would be right, before anything starts."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from expediter.assembly.presets import PRESET_NAMES, load_preset
from expediter.assembly.replica import assemble_replica
from expediter.assembly.serving import ServeConfig, replica_specs
from expediter.cli.main import build_parser, main
from expediter.cli.serve import _preset
from expediter.core.errors import ConfigurationError
from expediter.core.ports import ExecutorLimits
from expediter.testing.fake_executor import FakeExecutor


@pytest.fixture
def folder(model_folder: Path) -> Path:
    (model_folder / "model.safetensors").touch()
    return model_folder


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--preset", "nope"], "no preset 'nope'; there are: "),
        (["--port", "70000"], "port must lie in"),
        (["--replicas", "0"], "replicas must be at least 1"),
        (["--max-num-seqs", "0"], "max_num_seqs must be at least 1"),
        (["--max-num-seqs", "64", "--max-num-batched-tokens", "32"], "must be at least max_num_seqs"),
        (["--max-num-batched-tokens", "0"], "max_num_batched_tokens must be at least 1"),
        (["--scheduling-policy", "random"], "no ordering 'random'; there are: fcfs, "),
        (
            ["--preset", "vllm", "--max-model-len", "4096", "--max-num-batched-tokens", "2048"],
            "must be at least max_model_len (4096): the batching 'prompts_first' computes a prompt in one step",
        ),
        (["--max-model-len", "0"], "max_model_len must be at least 1"),
        (["--block-size", "0"], "block_size must be at least 1"),
        (["--num-gpu-blocks-override", "-1"], "num_blocks must be at least 1"),
        (["--kv-cache-memory-bytes", "0"], "kv_cache_memory_bytes must be at least 1"),
        (["--shutdown-timeout", "-1"], "shutdown_timeout_s must not be negative"),
        (["--shutdown-timeout", "nan"], "shutdown_timeout_s must not be negative"),
        (["--api-key", ""], "an API key must not be empty"),
        (["--host", "not an address"], "cannot listen on"),
    ],
)
def test_wrong_flags(folder: Path, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(folder), *flags]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("expediter: ")
    assert said in last


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "/no/such/folder"]) == 2
    assert "smollm2-135m-instruct" in capsys.readouterr().err


def test_a_port_that_is_taken(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", str(folder), "--port", str(taken.getsockname()[1])]) == 2
    assert "cannot listen on 127.0.0.1:" in capsys.readouterr().err


def test_overrides_reach_the_preset() -> None:
    flags = ["--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--block-size", "32"]
    preset = _preset(build_parser().parse_args(["serve", *flags, "--scheduling-policy", "priority"]))
    assert (preset.scheduler.max_num_seqs, preset.block_size, preset.policy.ordering) == (8, 32, "priority")
    small = _preset(build_parser().parse_args(["serve", "--max-num-batched-tokens", "64"]))
    assert small.scheduler.max_num_seqs == 64
    assert _preset(build_parser().parse_args(["serve"])).name == "sarathi"


SPLIT = ("distserve", "mooncake", "splitwise")


@pytest.mark.parametrize("name", SPLIT)
def test_a_preset_that_splits_prompts_and_tokens_is_refused(name: str, folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="computes prompts and tokens on different replicas"):
        ServeConfig(model=folder, model_names=("m",), preset=load_preset(name))


def test_routing_is_the_presets_or_the_flags() -> None:
    assert _preset(build_parser().parse_args(["serve", "--preset", "sglang"])).cluster.routing.name == "cache_aware"
    preset = _preset(build_parser().parse_args(["serve", "--routing", "session"]))
    assert preset.cluster.routing.name == "session"
    with pytest.raises(ConfigurationError, match="no routing policy 'psychic'; there are: round_robin, "):
        _preset(build_parser().parse_args(["serve", "--routing", "psychic"]))


@pytest.mark.parametrize("name", [name for name in PRESET_NAMES if name not in SPLIT])
def test_every_preset_is_served_with_a_budget_that_suits_its_batching(name: str, folder: Path) -> None:
    preset = load_preset(name)
    config = ServeConfig(model=folder, model_names=("m",), preset=preset, max_model_len=100)
    (spec,) = replica_specs(config)
    executor = FakeExecutor(
        ExecutorLimits(num_blocks=64, block_size=16, max_model_len=500, vocab_size=9, max_num_seqs=300)
    )
    limits = assemble_replica(spec, executor).scheduler.config
    assert limits.max_model_len == 100
    assert limits.max_num_batched_tokens == preset.scheduler.max_num_batched_tokens  # 2048 holds every prompt
    small = msgspec.structs.replace(
        spec, max_model_len=None, scheduler=replace(spec.scheduler, max_num_seqs=8, max_num_batched_tokens=64)
    )
    limits = assemble_replica(small, executor).scheduler.config
    assert limits.max_model_len == 500
    assert limits.max_num_batched_tokens == (508 if name in ("static", "orca", "vllm") else 64)


@pytest.mark.parametrize("name", ["static", "orca", "vllm"])
def test_a_budget_that_holds_no_prompt_is_refused_before_anything_starts(name: str, folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"must be at least max_model_len \(4096\)"):
        ServeConfig(
            model=folder,
            model_names=("m",),
            preset=load_preset(name),
            max_model_len=4096,
            max_num_batched_tokens=2048,
        )
