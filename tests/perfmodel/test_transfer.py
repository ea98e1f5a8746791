"""KV between replicas and the start of one: published sizes over published bandwidths."""

import pytest

from expediter.perfmodel.hardware import gpu_named
from expediter.perfmodel.shapes import shape_named
from expediter.perfmodel.transfer import (
    INITIALISATION_S,
    STORAGE_BANDWIDTH,
    cold_start_s,
    layerwise_exposed_s,
)


def test_a_layerwise_transfer_hides_behind_the_prefill_but_for_its_last_layer():
    assert layerwise_exposed_s(0.1, 1.0, 64) == pytest.approx(0.1 / 64)
    assert layerwise_exposed_s(3.0, 1.0, 60) == pytest.approx(2.05)
    assert layerwise_exposed_s(3.0, 0.0, 1) == pytest.approx(6.0)


def test_a_cold_start_reads_the_weights_and_initialises():
    shape, gpu = shape_named("llama-3.1-70b"), gpu_named("h100")
    assert cold_start_s(shape, gpu, 8) == pytest.approx(shape.weight_bytes / STORAGE_BANDWIDTH + INITIALISATION_S)
    assert cold_start_s(shape, gpu, 8, 2) < cold_start_s(shape, gpu, 8)  # two nodes read at once
    fast = cold_start_s(shape, gpu, 1, storage_bandwidth=1e15, initialisation_s=0.0)
    assert fast == pytest.approx(shape.weight_bytes / (gpu.host_bandwidth * gpu.host_efficiency), rel=0.001)
