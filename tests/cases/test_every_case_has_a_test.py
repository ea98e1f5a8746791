"""The cases of the gateway are all tested somewhere: each number is named where that is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
NAMED = re.compile(r"\bcases? ((?:\d+(?:, | and | to )?)+)", re.IGNORECASE)
NUMBER = re.compile(r"(\d+)(?: to (\d+))?")


def named_cases(text: str) -> set[int]:
    """Return the numbers in words such as "Case 24", "CASES 36, 37 and 38" or "Cases 45 to 47"."""
    found: set[int] = set()
    for words in NAMED.findall(text):
        for first, last in NUMBER.findall(words):
            found |= set(range(int(first), int(last or first) + 1))
    return found


@pytest.fixture(scope="module")
def everywhere() -> set[int]:
    others = (path for path in TESTS.rglob("test_*.py") if path != Path(__file__))
    return set().union(*(named_cases(path.read_text()) for path in others))


@pytest.mark.parametrize("number", [24, *range(35, 54)])
def test_a_case_of_the_gateway_is_named(everywhere: set[int], number: int) -> None:
    assert number in everywhere


def test_numbers_are_read() -> None:
    assert named_cases("(CASES 36, 37 and 40) Case 24. cases 45 to 47; in case 3 of 4, briefcase 9") == {
        *(36, 37, 40, 24, 45, 46, 47, 3),
    }
