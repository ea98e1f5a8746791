from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.door.front_door import FrontDoor, front_door
from tests.door.mock_backends import MockBackend, mock_backends


@pytest.fixture
def mocks() -> Iterator[list[MockBackend]]:
    """Four backends that a test may treat as it likes."""
    with mock_backends(4) as backends:
        yield backends


@pytest.fixture
def door(mocks: list[MockBackend]) -> Iterator[FrontDoor]:
    """A door with default settings before the four."""
    with front_door(mocks) as running:
        yield running
