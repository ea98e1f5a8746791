"""Small traces and files for the simulator's tests."""

import json
from pathlib import Path

import numpy as np

from expediter.core.plan import StepFeatures
from expediter.sim.trace import Trace

DATA = Path(__file__).parents[3] / "shared" / "data" / "traces"
NO_DATA = "needs the public traces, which are not part of this repository"


def make_trace(
    rows,
    *,
    block_tokens=4,
    name="made up",
    priorities=None,
    num_sequences=None,
    tenants=None,
    cache_hints=None,
    slo_classes=None,
):
    """Return a trace of (arrival_s, input, output[, prefix_ids]) rows, given in order of arrival."""
    rows = [(*row, []) if len(row) == 3 else row for row in rows]
    ids = [list(row[3]) for row in rows]
    return Trace(
        name=name,
        arrival_s=np.array([row[0] for row in rows], np.float64),
        input_tokens=np.array([row[1] for row in rows], np.int32),
        output_tokens=np.array([row[2] for row in rows], np.int32),
        prefix_ids=np.array([i for own in ids for i in own], np.int64),
        prefix_offsets=np.cumsum([0, *map(len, ids)]).astype(np.int64),
        prefix_block_tokens=block_tokens,
        priorities=None if priorities is None else np.array(priorities, np.int32),
        cache_hints=None if cache_hints is None else tuple(cache_hints),
        num_sequences=None if num_sequences is None else np.array(num_sequences, np.int32),
        tenants=tenants,
        slo_classes=slo_classes,
    )


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class ConstantTime:
    """`StepTimeModel`: every step takes the same time, so that ends of steps are round numbers."""

    def __init__(self, seconds):
        self.seconds = seconds

    def step_time_s(self, features: StepFeatures):
        return self.seconds

    def decode_run_s(self, features: StepFeatures, num_steps):
        return np.full(num_steps, self.seconds)


class ContextTime(ConstantTime):
    """`StepTimeModel` whose steps grow with batch and context, by amounts that round."""

    def step_time_s(self, features: StepFeatures):
        return self.seconds * (1 + features.num_tokens / 7) + 1e-5 * features.decode_context_tokens

    def decode_run_s(self, features: StepFeatures, num_steps):
        context = features.decode_context_tokens + features.num_decodes * np.arange(num_steps, dtype=np.float64)
        return self.seconds * (1 + features.num_tokens / 7) + 1e-5 * context
