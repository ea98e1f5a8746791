"""VTC's experiment at a small size: the gap grows under fcfs and stays within the bound under the fair orderings."""

import pytest
from benchmarks.fairness import Workload, gaps

SMALL = Workload(
    rates_rpm={"modest": 720, "greedy": 1440},
    num_prompt_tokens=64,
    num_output_tokens=64,
    num_kv_tokens=1600,
    duration_s=60.0,
)


def gap_at(history, time_s):
    return [gap for at_s, gap in history if at_s <= time_s][-1]


def test_under_fcfs_the_gap_grows_with_time():
    history = gaps(SMALL, "fcfs")
    early, middle, late = (gap_at(history, time_s) for time_s in (20, 40, 60))
    assert late > 2 * SMALL.fair_bound
    assert middle - early == pytest.approx(late - middle, rel=0.2)


@pytest.mark.parametrize("weights", [None, {"modest": 1.0, "greedy": 2.0}])
def test_fair_share_keeps_the_gap_within_its_bound(weights):
    workload = Workload(**{name: getattr(SMALL, name) for name in SMALL.__slots__} | {"weights": weights})
    history = gaps(workload, "fair_share")
    assert history[-1][0] >= 59  # both wait all the time
    assert max(gap for _, gap in history) <= workload.fair_bound


def test_deficits_keep_the_gap_within_theirs():
    history = gaps(SMALL, "deficit_prefix")
    assert max(gap for _, gap in history) <= SMALL.deficit_bound
