"""Times that are not steps: KV between replicas, and the start of a replica."""

from __future__ import annotations

from typing import Final

from expediter.perfmodel.dimensions import ModelShape
from expediter.perfmodel.hardware import Gpu
from expediter.perfmodel.parallelism import Parallelism

STORAGE_BANDWIDTH: Final = 6e9
"""byte/s at which a node reads weights: one PCIe 4.0 x4 NVMe drive in sequence, of which data sheets say 6.5 to 7e9."""
INITIALISATION_S: Final = 40.0
"""Start of a replica beside reading weights: process, runtime, memory profiling and graph capture; assumed."""


def layerwise_exposed_s(transfer_s: float, prefill_s: float, num_layers: int) -> float:
    """Return what a layer-by-layer transfer adds after the prefill that it overlaps.

    The last layer's KV can only leave when it is computed; before that, what the prefill does not cover:
    max(0, transfer - prefill) + transfer / layers.
    """
    return max(0.0, transfer_s - prefill_s) + transfer_s / num_layers


def cold_start_s(
    shape: ModelShape,
    gpu: Gpu,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    *,
    storage_bandwidth: float = STORAGE_BANDWIDTH,
    initialisation_s: float = INITIALISATION_S,
) -> float:
    """Return the time until a new replica serves: weights / bandwidth + initialisation.

    Every node reads its share of the weights from its storage, and every GPU copies its own from the host.

    Args:
        storage_bandwidth: of one node, byte/s.
    """
    parallelism = Parallelism(tensor=tensor_parallel, pipeline=pipeline_parallel)
    num_nodes = -(-parallelism.num_gpus // gpu.max_tensor_parallel)
    read_s = shape.weight_bytes / (storage_bandwidth * num_nodes)
    copy_s = parallelism.weight_bytes_on_gpu(shape) / (gpu.host_bandwidth * gpu.host_efficiency)
    return max(read_s, copy_s) + initialisation_s
