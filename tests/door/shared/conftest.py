"""Tests that share a door and its backends: whatever a door has been through, it goes on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.door.front_door import FrontDoor, front_door, recover
from tests.door.mock_backends import MockBackend, mock_backends


@pytest.fixture(scope="module")
def mocks() -> Iterator[list[MockBackend]]:
    """The same four for all tests of a module."""
    with mock_backends(4) as backends:
        yield backends


@pytest.fixture(scope="module")
def door(mocks: list[MockBackend]) -> Iterator[FrontDoor]:
    """One door for all tests of a module."""
    with front_door(mocks) as running:
        yield running


@pytest.fixture(autouse=True)
def recovered(door: FrontDoor, mocks: list[MockBackend]) -> None:
    """Each test finds everybody well."""
    recover(door, mocks)
