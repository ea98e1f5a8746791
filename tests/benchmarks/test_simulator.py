"""The simulator's benchmark: its generated requests, and one measured run."""

from __future__ import annotations

from itertools import islice, pairwise

from benchmarks.simulator import growing, measure, requests


def test_requests_are_made_as_they_are_needed() -> None:
    first = list(islice(requests(10**9, 1000), 50))
    assert [request.request_id for request in first[:2]] == ["r00000000", "r00000001"]
    assert all(a.arrival_s < b.arrival_s for a, b in pairwise(first))
    assert len({request.prompt.tobytes() for request in first}) == 50


def test_a_run_accounts_for_every_request() -> None:
    row = measure("small", growing(3), 60, None)
    assert (row["replicas"], row["requests"]) == (3, 60)
    assert row["steps"] > 60
    assert row["ms_per_request"] > 0
    assert row["peak_mib"] > 10
