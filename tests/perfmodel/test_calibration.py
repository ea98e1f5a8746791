"""Calibration: a fit finds the engine behind made-up measurements, names wrong lines, and meets published figures."""

import json

import numpy as np
import pytest
from benchmarks.measurements import DATA, DATASETS

from expediter.cli.main import main
from expediter.core.errors import ConfigurationError
from expediter.perfmodel.calibration import calibrated_engine, fit_engine, predicted_s
from expediter.perfmodel.constants import Engine, constants, engine_named
from expediter.perfmodel.hardware import gpu_named
from expediter.perfmodel.measurements import Measurement, decode_step, prefill_step, read_measurements
from expediter.perfmodel.parallelism import Parallelism
from expediter.perfmodel.roofline import RooflineModel
from expediter.perfmodel.shapes import shape_named

HEADER = "model,gpu,tensor_parallel,phase,tokens,batch_size,time_ms"
TRUE = Engine(
    step_s=0.003, prefill_step_s=0.004, seq_s=4e-5, compute_factor=1.3, memory_factor=1.2, all_reduce_factor=1.5
)


def lines(engine):
    """CSV lines of what an engine takes for prefills and decodes of 8B on one and two H100."""
    for n in (1, 2):
        model = RooflineModel(shape_named("llama-3.1-8b"), gpu_named("h100"), n, engine=engine)
        for tokens, batch in ((256, 1), (1024, 1), (4096, 2), (8192, 1)):
            time_ms = model.step_time_s(prefill_step(tokens, batch)) * 1e3
            yield f"llama-3.1-8b,h100,{n},prefill,{tokens},{batch},{time_ms}"
        for tokens, batch in ((512, 1), (512, 64), (4096, 16), (4096, 128)):
            time_ms = model.step_time_s(decode_step(tokens, batch)) * 1e3
            yield f"llama-3.1-8b,h100,{n},decode,{tokens},{batch},{time_ms}"


def test_a_fit_finds_the_engine_that_made_the_measurements(tmp_path):
    path = tmp_path / "steps.csv"
    path.write_text("\n".join([HEADER, *lines(TRUE)]) + "\n")
    found = calibrated_engine(path, engine_named("vllm"))
    rows = read_measurements(path)
    assert np.abs(predicted_s(rows, found) / np.array([row.time_s for row in rows]) - 1).max() < 0.02
    assert found.compute_factor == pytest.approx(TRUE.compute_factor, rel=0.05)
    assert found.step_s == pytest.approx(TRUE.step_s, rel=0.2)


def steps_of(model, count=40):
    """What `GET /steps` of a server would say if its steps took as long as the model says."""
    steps = []
    for i in range(count):
        step = decode_step(300 + 40 * i, 1 + 3 * i) if i % 3 else prefill_step(128 * (1 + i), 1)
        steps.append({"sequence": i, "replica": 0, **step._asdict(), "elapsed_s": model.step_time_s(step)})
    return steps


def test_a_fit_finds_the_engine_behind_the_steps_of_a_live_server(tmp_path):
    path = tmp_path / "steps.json"
    model = RooflineModel(shape_named("llama-3.1-8b"), gpu_named("h100"), 2, engine=TRUE)
    path.write_text(
        json.dumps({"steps": steps_of(model), "model": "llama-3.1-8b", "gpu": "h100", "tensor_parallel": 2})
    )
    rows = read_measurements(path)
    found = calibrated_engine(path, engine_named("vllm"))
    assert len(rows) == 40
    assert np.abs(predicted_s(rows, found) / np.array([row.time_s for row in rows]) - 1).max() < 0.03


def test_a_long_log_is_thinned_out_evenly(tmp_path):
    path = tmp_path / "steps.json"
    steps = steps_of(RooflineModel(shape_named("llama-3.1-8b"), gpu_named("h100")), 10) * 1000
    path.write_text(json.dumps({"steps": steps, "model": "llama-3.1-8b", "gpu": "h100"}))
    assert 1000 < len(read_measurements(path)) <= 2000


@pytest.mark.parametrize(
    ("log", "problem"),
    [
        ({"steps": []}, "missing required field `model`"),
        ({"steps": [], "model": "llama-3.1-8b", "gpu": "h100"}, "no measurements"),
        ({"steps": [], "model": "llama-3.1-8b", "gpu": "v100"}, "cannot be used: no GPU 'v100'"),
        ({"steps": [], "model": "llama-3.1-8b", "gpu": "h100", "tensor_parallel": 3}, "3 GPUs cannot share"),
        ({"steps": [{"elapsed_s": 0.0}], "model": "llama-3.1-8b", "gpu": "h100"}, "step 0: elapsed_s must be above"),
        ({"steps": [{"num_decodes": 9}], "model": "llama-3.1-8b", "gpu": "h100"}, "step 0: counts that no step has"),
        ({"steps": [{"num_seqs": "1"}], "model": "llama-3.1-8b", "gpu": "h100"}, r"\$.steps\[0\].num_seqs"),
    ],
)
def test_a_log_that_cannot_be_used(tmp_path, log, problem):
    path = tmp_path / "steps.json"
    step = {**decode_step(100, 1)._asdict(), "elapsed_s": 0.01}
    path.write_text(json.dumps(log | {"steps": [step | wrong for wrong in log["steps"]]}))
    with pytest.raises(ConfigurationError, match=problem):
        read_measurements(path)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("llama-3.1-8b,h100,1,decode,512,1,", "line 3: could not convert"),
        ("llama-3.1-8b,h100,1,decode,512,1,-2", "line 3: .* above 0"),
        ("llama-3.1-8b,h100,1,decode,512,1,nan", "line 3: .* above 0"),
        ("llama-3.1-8b,h100,1,idle,512,1,2", "line 3: phase must be"),
        ("llama-3.1-8b,h100,3,decode,512,1,2", "line 3: .* 3 GPUs cannot share"),
        ("llama-9,h100,1,decode,512,1,2", "line 3: no model shape"),
        ("llama-3.1-8b,h1000,1,decode,512,1,2", "line 3: no GPU"),
        ("llama-3.1-8b,h100", "line 3: "),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, problem):
    path = tmp_path / "steps.csv"
    path.write_text("\n".join([HEADER, next(lines(TRUE)), line]) + "\n")
    with pytest.raises(ConfigurationError, match=problem):
        read_measurements(path)


def test_files_that_cannot_be_used(tmp_path):
    path = tmp_path / "steps.csv"
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_measurements(path)
    path.write_text("model,gpu\n")
    with pytest.raises(ConfigurationError, match="line 1: no column tensor_parallel, phase"):
        read_measurements(path)
    path.write_text(HEADER + "\n")
    with pytest.raises(ConfigurationError, match="no measurements"):
        read_measurements(path)
    path.write_text("\n".join([HEADER, next(lines(TRUE))]) + "\n")
    with pytest.raises(ConfigurationError, match="1 measurements cannot determine"):
        calibrated_engine(path, Engine())


def test_simulate_takes_an_engine_and_a_calibration(tmp_path, capsys):
    path = tmp_path / "steps.csv"
    path.write_text("\n".join([HEADER, *lines(TRUE)]) + "\n")
    run = ["simulate", "--trace", "demo", "--limit", "20", "--gpu", "h100", "--json", "-"]
    outputs = []
    for flags in ([], ["--engine", "trtllm"], ["--calibration", str(path)]):
        assert main([*run, *flags]) == 0
        outputs.append(capsys.readouterr().out)
    assert len(set(outputs)) == 3
    assert main([*run, "--engine", "none"]) != 0
    assert "vllm" in capsys.readouterr().err


def test_one_measurement_of_several_steps_is_their_weighted_sum():
    model = RooflineModel(shape_named("llama-3.1-8b"), gpu_named("h100"), engine=TRUE)
    steps = ((0.75, decode_step(512, 8)), (0.25, prefill_step(1024, 1)))
    row = Measurement(
        shape=shape_named("llama-3.1-8b"), gpu=gpu_named("h100"), parallelism=Parallelism(), parts=steps, time_s=1.0
    )
    assert predicted_s([row], TRUE)[0] == sum(share * model.step_time_s(step) for share, step in steps)


needs_data = pytest.mark.skipif(
    not DATA.exists(), reason="needs the measured latencies, which are not part of this repository"
)


@needs_data
@pytest.mark.parametrize(
    ("engine", "decode", "prefill"),
    [
        ("eager-a100", 0.04, 0.11),
        ("eager-h100", 0.03, 0.06),
        ("vllm", 0.03, 0.03),
        ("vllm-0.18", 0.08, 0.14),
        ("trtllm", 0.07, 0.09),
        ("sglang", 0.03, 0.03),
    ],
)
def test_engines_meet_published_measurements(engine, decode, prefill):
    """Mean absolute error in sample, with some room; held-out errors are in docs/perfmodel.md."""
    rows = DATASETS[engine].rows()
    predicted = predicted_s([row.measurement for row in rows], engine_named(engine))
    error = np.abs(predicted / np.array([row.measurement.time_s for row in rows]) - 1)
    for kind, bound in (("decode", decode), ("prefill", prefill)):
        assert error[[row.kind == kind for row in rows]].mean() < bound


@needs_data
def test_the_constants_are_those_of_the_fit():
    dataset = DATASETS["vllm"]
    found = fit_engine([row.measurement for row in dataset.rows()], dataset.free)
    for name in dataset.free:
        assert getattr(found, name) == pytest.approx(getattr(constants().engines["vllm"], name), rel=0.01)


@needs_data
def test_two_and_eight_gpus_predict_four():
    dataset = DATASETS["vllm"]
    rows = dataset.rows()
    found = fit_engine([row.measurement for row in rows if row.tensor_parallel != 4], dataset.free)
    held = [row.measurement for row in rows if row.tensor_parallel == 4]
    assert np.abs(predicted_s(held, found) / np.array([row.time_s for row in held]) - 1).mean() < 0.05


@needs_data
@pytest.mark.parametrize(
    ("engine", "other", "bound"),
    [
        ("vllm", "qwen3-32b -> llama-3.1-70b in fp8", 0.10),
        ("vllm", "the same -> first tokens", 0.17),
        ("trtllm", "llama-3.1-8b -> qwen3-32b in fp8", 0.09),
        ("trtllm", "llama-3.1-8b -> qwen3-235b-a22b in fp8", 0.13),
    ],
)
def test_an_engine_predicts_what_it_was_not_fitted_to(engine, other, bound):
    rows = [row.measurement for row in DATASETS[engine].other[other]()]
    assert np.abs(predicted_s(rows, engine_named(engine)) / np.array([row.time_s for row in rows]) - 1).mean() < bound
