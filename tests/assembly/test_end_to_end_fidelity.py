"""The simulator predicts a real engine's latencies from another run's steps. `benchmarks.end_to_end` has close bounds;
these are loose, because a machine that runs tests also does other things."""

import pytest
from benchmarks.end_to_end import CALIBRATION, WORKLOADS, errors, replay, trace_of

NUM_REQUESTS = 12
BOUNDS = {"TTFT p50": 0.6, "TPOT p50": 0.4, "E2E p50": 0.4, "throughput": 0.2}


@pytest.mark.timeout(600)
def test_a_prediction_from_a_separate_run_is_close(tmp_path):
    model = replay(trace_of(CALIBRATION, NUM_REQUESTS, tmp_path), 0.7, None).model
    assert model is not None
    row = errors("shared texts", replay(trace_of(WORKLOADS["shared texts"], NUM_REQUESTS, tmp_path), 0.7, model))
    assert row["failed"] == 0
    for figure, bound in BOUNDS.items():
        assert abs(row[figure]) < bound, (figure, row)
