"""One short run of every preset, every routing and every part of a policy, against what it gave before.

`golden_runs.json` holds the figures; a change of behaviour shows as a difference to be looked at. After a change that
is meant, and for a new preset, routing or part, `PYTHONPATH=src python tests/sim/test_golden_runs.py` writes them anew.
Step times are constants times the step's work, so that measurements of hardware play no part.
"""

import hashlib
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sim_builders import ConstantTime

from expediter.assembly.presets import PRESET_NAMES, load_preset
from expediter.assembly.simulation import SimulationConfig, build_simulation, prepare_trace
from expediter.control.routing.build import ROUTINGS
from expediter.core.slo import Slo
from expediter.scheduling.build import (
    BATCHINGS,
    BUDGET_RULES,
    EVICTIONS,
    MEMORY_RULES,
    ORDERINGS,
    PREEMPTION_MODES,
    VICTIM_RULES,
)

GOLDEN = Path(__file__).with_name("golden_runs.json")
REMEDY = "if this is meant: PYTHONPATH=src python tests/sim/test_golden_runs.py, and look at the difference"
PARTS = {
    "ordering": ORDERINGS,
    "batching": BATCHINGS,
    "memory": MEMORY_RULES,
    "budget": BUDGET_RULES,
    "victims": VICTIM_RULES,
    "preemption_mode": PREEMPTION_MODES,
    "eviction": EVICTIONS,
}
CHOICES = [
    *({"preset": preset} for preset in PRESET_NAMES),
    *({"routing": routing} for routing in ROUTINGS),
    *({part: name} for part, names in PARTS.items() for name in names),
]


class WorkTime(ConstantTime):
    """`StepTimeModel`: a constant per step, per token and per token of context."""

    def step_time_s(self, features):
        return self.seconds * (8 + features.num_tokens / 32) + 2.0**-22 * features.decode_context_tokens

    def decode_run_s(self, features, num_steps):
        context = features.decode_context_tokens + features.num_decodes * np.arange(num_steps, dtype=np.float64)
        return self.seconds * (8 + features.num_tokens / 32) + 2.0**-22 * context


def name_of(choice):
    return " ".join(f"{key}={value}" for key, value in choice.items())


def run(choice):
    """Return the figures of a run on two small replicas that run out of blocks."""
    trace = prepare_trace("demo", rate_scale=40.0)
    rows = range(len(trace))
    trace = replace(
        trace,
        priorities=np.array([row % 3 for row in rows], np.int32),
        tenants=tuple("abb"[row % 3] for row in rows),
        slos=tuple(Slo(ttft_s=1.0 + row % 5, tpot_s=0.1) for row in rows),
    )
    choice = dict(choice)
    if "eviction" in choice:
        choice["policy"] = replace(load_preset("sarathi").policy, eviction=choice.pop("eviction"))
    config = SimulationConfig(
        step_time=WorkTime(2.0**-9),
        num_blocks=2400,
        num_host_blocks=600,
        block_swap_s=2.0**-12,
        block_size=16,
        max_model_len=32_768,
        replicas=2,
        **choice,
    )
    log = io.BytesIO()
    report = build_simulation(config).run(trace, events=log)
    return {
        "finished": report.requests.finished,
        "steps": report.num_steps,
        "preemptions": sum(report.decisions.preemptions.values()),
        "prefix_hits": round(report.prefix_hit_rate or 0.0, 4),
        "ttft_p50_s": round(report.ttft_s.p50 or 0.0, 3),
        "events_sha256": hashlib.sha256(log.getvalue()).hexdigest()[:16],
    }


def test_there_is_a_golden_run_of_everything():
    assert set(json.loads(GOLDEN.read_text())) == {name_of(choice) for choice in CHOICES}, REMEDY


@pytest.mark.parametrize("choice", CHOICES, ids=name_of)
def test_run_is_as_before(choice):
    got = run(choice)
    assert got["finished"] > 0
    assert got == json.loads(GOLDEN.read_text()).get(name_of(choice)), REMEDY


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({name_of(choice): run(choice) for choice in CHOICES}, indent=1) + "\n")
