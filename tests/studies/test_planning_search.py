"""The search over set-ups, on made-up answers."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from expediter.studies.planning.search import Budget, Search, Size, rungs_of, search
from expediter.studies.planning.setups import Setup

MAX_GPUS = 64


def setup(number: int, gpus: int, price: float) -> Setup:
    return Setup(gpu=f"kind{number}", price_per_hour=price, tensor_parallel=gpus, preset="sarathi")


@st.composite
def grids(draw):
    """Set-ups, the size from which each passes (64 for never), and a bound below it."""
    grid = {}
    for number in range(draw(st.integers(1, 20))):
        one = setup(number, draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1.0, 1.5, 2.7, 6.1])))
        passes_from = draw(st.integers(1, 40))
        grid[one] = (passes_from, draw(st.integers(1, passes_from)))
    return grid


def run(grid, *, rungs: Sequence[int | None] = (None,), top: int = 1, most: int = 10_000) -> tuple[Search, list[Size]]:
    asked: list[Size] = []

    def attempt(sizes: Sequence[Size], limit: int | None) -> list[bool]:
        assert len(set(sizes)) == len(sizes)
        if limit is None:
            asked.extend(sizes)
        return [size.replicas >= grid[size.setup][0] for size in sizes]

    found = search(
        {one: bound for one, (_, bound) in grid.items()},
        rungs,
        attempt,
        max_gpus=MAX_GPUS,
        top=top,
        budget=Budget(most),
    )
    return found, asked


@settings(max_examples=100, deadline=None)
@given(grid=grids(), top=st.integers(1, 4))
def test_the_cheapest_are_what_trying_everything_finds(grid, top):
    found, asked = run(grid, top=top)
    costs = sorted(one.cost_per_hour(size) for one, (size, _) in grid.items() if one.num_gpus(size) <= MAX_GPUS)
    assert [b.found_cost for b in found.brackets if b.passed is not None][:top] == costs[:top]
    assert all(b.passed == grid[b.setup][0] for b in found.brackets[: min(top, len(costs))])
    assert found.is_complete
    assert len(set(asked)) == len(asked)
    assert all(size.setup.num_gpus(size.replicas) <= MAX_GPUS for size in asked)


@given(grid=grids())
def test_short_traces_that_tell_the_truth_drop_no_winner(grid):
    found, _ = run(grid, rungs=(250, 1000, None))
    alone, _ = run(grid)
    assert [b.found_cost for b in found.brackets[:1]] == [b.found_cost for b in alone.brackets[:1]]
    assert len(found.brackets) + found.num_dropped == len(grid)


def test_short_traces_save_simulations_of_the_whole():
    grid = {setup(number, 1, 1.0): (number + 2, 1) for number in range(30)}
    _, with_rungs = run(grid, rungs=(250, None))
    _, without = run(grid)
    assert len(with_rungs) < len(without) / 2


def test_a_budget_ends_the_search_and_says_so():
    grid = {setup(number, 1, 1.0): (20, 1) for number in range(30)}
    found, asked = run(grid, most=13)
    assert len(asked) == 13
    assert not found.is_complete


def test_rungs_end_with_the_whole_trace():
    assert list(rungs_of(100)) == [None]
    assert list(rungs_of(1000)) == [250, None]
    assert list(rungs_of(100_000)) == [6250, 25_000, None]
