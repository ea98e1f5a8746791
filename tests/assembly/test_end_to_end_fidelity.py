"""The simulator predicts a real engine's latencies from another run's steps. `benchmarks.end_to_end` has close bounds;
these are loose, and a machine that did something else meanwhile gets another try: no simulator can predict that."""

from dataclasses import replace

import pytest
from benchmarks.end_to_end import CALIBRATION, WORKLOADS, errors, replay, trace_of

NUM_REQUESTS = 10
MAX_TRIES = 3
BOUNDS = {"TTFT p50": 0.7, "TPOT p50": 0.6, "E2E p50": 0.6, "throughput": 0.25}


@pytest.mark.timeout(900)
def test_a_prediction_from_a_separate_run_is_close(tmp_path):
    rows = []
    for _ in range(MAX_TRIES):
        calibration = trace_of(replace(CALIBRATION, input_mean=60, output_mean=20), NUM_REQUESTS, tmp_path)
        workload = trace_of(replace(WORKLOADS["shared texts"], input_mean=24, output_mean=16), NUM_REQUESTS, tmp_path)
        model = replay(calibration, 0.7, None).model
        rows.append(errors("shared texts", replay(workload, 0.7, model)))
        assert rows[-1]["failed"] == 0
        if all(abs(rows[-1][figure]) < bound for figure, bound in BOUNDS.items()):
            return
    pytest.fail(f"predicted / measured - 1 in {MAX_TRIES} tries: {rows}")
