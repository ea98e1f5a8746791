"""What is said of a comparison is so."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expediter.core.explanation import Reason
from expediter.studies.findings import HELD, Outcome, findings, verdict
from expediter.studies.words import listed, number, percent, seconds


def outcome(entry: str, *attainment: float, load: float = 1.0, **more) -> Outcome:
    rates = tuple(10 * load * share for share in attainment)
    late = 1 - sum(attainment) / len(attainment)
    return Outcome(
        entry=entry,
        load=load,
        offered_rps=10 * load,
        **{
            "num_requests": 1000,
            "goodput_rps": rates,
            "goodput_rps_per_gpu": rates,
            "attainment": attainment,
            "missed": {"ttft": late} if late else {},
            "held_s": {"no_blocks": 3.0, "step": 1.0},
            "kv_used_share": 0.9,
            "drain_share": 0.1,
            **more,
        },
    )


def test_equal_is_a_tie():
    found = findings([outcome("a", 1.0), outcome("b", 1.0), outcome("c", 1.0)])
    assert found.verdicts[0].leaders == ("a", "b", "c")
    assert found.verdicts[0].runner_up is None
    assert found.headline == "At load 1 all entries tie: each serves all requests within their targets."
    assert found.limits[0] == "a serves all in time."


def test_less_than_a_hundredth_is_a_tie_and_more_is_not():
    near = verdict([outcome("a", 0.900), outcome("b", 0.892)])
    assert near.leaders == ("a", "b")
    far = verdict([outcome("a", 0.900), outcome("b", 0.950)])
    assert far.leaders == ("b",)
    assert far.runner_up == "a"
    assert far.advantage == pytest.approx(0.05 / 0.9)
    assert far.noise is None


def test_a_handful_of_requests_is_a_tie():
    assert verdict([outcome("a", 0.9, num_requests=50), outcome("b", 0.8, num_requests=50)]).runner_up is None
    assert verdict([outcome("a", 0.9, num_requests=60), outcome("b", 0.8, num_requests=60)]).runner_up == "b"
    several = [outcome("a", 0.90, 0.90, num_requests=50), outcome("b", 0.86, 0.86, num_requests=50)]
    assert verdict(several).runner_up is None


def test_a_difference_within_the_noise_is_a_tie():
    noisy = verdict([outcome("a", 0.9, 0.7, 0.8), outcome("b", 0.7, 0.8, 0.7)])
    assert noisy.leaders == ("a", "b")
    steady = verdict([outcome("a", 0.80, 0.91, 0.81), outcome("b", 0.70, 0.80, 0.72)])
    assert steady.leaders == ("a",)
    # Differences 0.10, 0.11, 0.09: mean 0.10, standard deviation 0.01; t of two degrees of freedom is 4.303.
    assert steady.advantage == pytest.approx(0.10 / 0.74)
    assert steady.noise == pytest.approx(4.303 * 0.01 / 3**0.5 / 0.74)


def test_loads_of_one_kind_are_told_together():
    rows = [
        *(outcome("a", 1.0, load=0.5), outcome("b", 0.995, load=0.5)),
        *(outcome("a", 0.99, load=0.75), outcome("b", 0.985, load=0.75)),
        *(outcome("a", 0.6, load=1.0), outcome("b", 0.9, load=1.0)),
        *(outcome("a", 0.5, load=1.5), outcome("b", 0.6, load=1.5)),
        *(outcome("a", 0.0, load=2.0), outcome("b", 0.3, load=2.0)),
        *(outcome("a", 0.0, load=4.0), outcome("b", 0.0, load=4.0)),
    ]
    assert findings(rows).headline == (
        "From load 0.5 to 0.75 both entries tie: each serves at least 98 % of the requests within their targets. "
        "From load 1 to 2 b serves the most requests within their targets, 50 % more than a at load 1 and "
        "a, the next, serves none in time at load 2. "
        "At load 4 no entry serves any request within its targets."
    )


def test_two_leaders_are_both_named():
    found = findings([outcome("a", 0.9), outcome("b", 0.5), outcome("c", 0.895)])
    assert found.headline == "At load 1 a and c tie for the lead, 80 % more than b."
    far = findings(
        [
            outcome("a", 0.9, load=1.0),
            outcome("b", 0.3, load=1.0),
            outcome("a", 0.9, load=2.0),
            outcome("b", 0.2, load=2.0),
        ]
    )
    assert far.headline == (
        "From load 1 to 2 a serves the most requests within their targets, 3 times as many as b at load 1 and 4.5 "
        "times as many at load 2."
    )


def test_different_hardware_is_judged_per_gpu():
    big = outcome("big", 0.9)
    half = replace(big, goodput_rps_per_gpu=tuple(rate / 2 for rate in big.goodput_rps))
    found = findings([half, outcome("small", 0.6)], per_gpu=True)
    assert found.verdicts[0].leaders == ("small",)
    assert "per GPU" in found.headline


def test_one_entry_is_no_comparison():
    assert "nothing to compare" in findings([outcome("a", 0.5)]).headline


def test_how_far_each_goes():
    rows = [
        *(outcome("a", 1.0, load=1.0), outcome("b", 0.5, load=1.0), outcome("c", 1.0, load=1.0)),
        *(outcome("a", 0.8, load=2.0), outcome("b", 0.4, load=2.0), outcome("c", 1.0, load=2.0)),
    ]
    found = findings(rows)
    rates = {(one.entry, one.attainment): one for one in found.sustained}
    assert rates["a", 0.9].offered_rps == pytest.approx(15)
    assert rates["b", 0.9].offered_rps == 0
    assert rates["c", 0.99].offered_rps == 20
    assert rates["c", 0.99].is_bound
    assert (
        findings([outcome("a", 0.5)]).reach[0]
        == "99 % of the requests meet their targets at none of these loads with a."
    )
    assert (
        findings([outcome("a", 1.0)]).reach[0]
        == "99 % of the requests meet their targets at all of these loads with a."
    )
    assert found.reach[1] == (
        "90 % of the requests meet their targets at all of these loads with c; up to 15 requests/s with a; "
        "at none of these loads with b."
    )


def test_limits_say_what_was_missed_and_what_held():
    (told,) = findings([outcome("a", 0.6, missed={"ttft": 0.3, "tpot": 0.09, "e2e": 0.01})]).limits
    assert told == (
        "a serves 60 % in time; of the others, 75 % had their first token too late and 22 % got their tokens too "
        "slowly. A request waited 4 s on average, 75 % of it because too few KV blocks were free; running requests "
        "held 90 % of the KV memory."
    )


def test_certainty_and_caveats():
    single = findings([outcome("a", 0.9), outcome("b", 0.5)])
    assert "not known" in single.certainty[0]
    assert single.caveats == ()
    several = findings([outcome("a", 0.9, 0.91, 0.9, drain_share=0.6), outcome("b", 0.5, 0.5, 0.5)])
    assert several.certainty[0].startswith("3 draws")
    # The advantage is 0.40333 of 0.5, the noise 4.303 x 0.0057735 / sqrt(3) of it.
    assert several.certainty[1] == "The leads exceed the noise (half that interval) 28 times at load 1."
    assert "requests came for 100 s, and a went on for 60 s" in several.caveats[0]


def test_every_reason_to_wait_has_words():
    others = {Reason.ROUTED, Reason.PREFILLING, Reason.DECODING, Reason.REJECTED, Reason.ENDED}
    others |= {Reason.FORWARDED, Reason.INTERRUPTED}  # of a server: no simulation has them
    assert set(HELD) == {reason.value for reason in Reason if reason not in others}


SHARES = st.floats(0, 1)


@given(st.lists(st.tuples(SHARES, SHARES, SHARES), min_size=1, max_size=5))
def test_verdicts_hold_together(rows):
    outcomes = [outcome(f"e{place}", *row) for place, row in enumerate(rows)]
    found = findings(outcomes)
    (one,) = found.verdicts
    means = {o.entry: sum(o.goodput_rps_per_gpu) / 3 for o in outcomes}
    assert means[one.leaders[0]] == pytest.approx(max(means.values()))
    assert (one.runner_up is None) == (len(one.leaders) == len(outcomes))
    assert one.runner_up not in one.leaders
    if one.advantage is not None:
        assert one.advantage > 0
        assert one.noise < one.advantage
    assert found.headline


def test_words():
    assert [percent(x) for x in (0, 0.0004, 0.034, 0.5, 0.994, 0.9996, 1, 12.3)] == [
        "0 %", "under 0.1 %", "3.4 %", "50 %", "99.4 %", "over 99.9 %", "100 %", "1230 %",
    ]  # fmt: skip
    assert [number(x) for x in (0, 7, 0.0123, 8.024, 12.03, 999.7, 12345)] == [
        "0", "7", "0.0123", "8.02", "12.0", "1,000", "12,345",
    ]  # fmt: skip
    assert [seconds(x) for x in (None, 0, 0.0123, 0.9996, 2)] == ["-", "0 s", "12.3 ms", "1.00 s", "2 s"]
    assert [listed(x) for x in (["a"], ["a", "b"], ["a", "b", "c"])] == ["a", "a and b", "a, b and c"]
