"""What breaks is named from the run: each cause is provoked on purpose."""

from __future__ import annotations

import pytest

from expediter.assembly.pools import PoolConfig
from expediter.assembly.simulation import SimulationConfig
from expediter.assembly.trace_generation import GenerationConfig
from expediter.core.slo import Slo
from expediter.studies.planning.limits import limit_of
from expediter.studies.planning.trial import Trial, measure

TRAFFIC = {"num_requests": 80, "rate_rps": 10.0, "input_mean": 600, "output_mean": 60}
SPLIT = (PoolConfig(role="prefill"), PoolConfig(role="decode"))


@pytest.mark.parametrize(
    ("target", "cause", "traffic", "config"),
    [
        ("ttft", "queue", {"rate_rps": 40.0, "output_mean": 4}, {"slo": Slo(ttft_s=0.5)}),
        ("ttft", "prefill", {"rate_rps": 0.2, "input_mean": 8000}, {"slo": Slo(ttft_s=0.3)}),
        ("ttft", "memory", {}, {"slo": Slo(ttft_s=0.5), "num_blocks": 400}),
        ("ttft", "slots", {}, {"slo": Slo(ttft_s=0.5), "max_num_seqs": 2}),
        ("ttft", "batch", {"output_mean": 200}, {"slo": Slo(ttft_s=0.5), "preset": "static"}),
        ("tpot", "prefill blocking", {"input_mean": 3000, "rate_rps": 5.0}, {"slo": Slo(tpot_s=0.03)}),
        ("tpot", "decode bandwidth", {"input_mean": 16}, {"slo": Slo(tpot_s=0.012)}),
        ("tpot", "transfer", {}, {"slo": Slo(tpot_s=0.02), "pools": SPLIT, "network_bandwidth": 1e9}),
        ("unservable", "memory", {}, {"slo": Slo(ttft_s=60), "num_blocks": 16}),
        ("", "none found", {}, {"slo": Slo(ttft_s=60)}),
    ],
)
def test_the_cause_is_named(target, cause, traffic, config):
    trial = Trial(config=SimulationConfig(**config), traffic=GenerationConfig(**(TRAFFIC | traffic)), attainment=0.99)
    measured = measure(trial)
    limit = limit_of(measured)
    assert (limit.target, limit.cause) == (target, cause), (limit.words, measured)
