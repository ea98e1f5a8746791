"""What our own API tells the door of a request, in this process: how many tokens it had, exactly."""

from __future__ import annotations

from typing import Final, Protocol

TOLD: Final = "expediter.told"
"""Key of the scope under which the application finds where to tell it."""


class Counted(Protocol):
    """Tokens of a request so far."""

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_cached_tokens(self) -> int: ...

    @property
    def num_output_tokens(self) -> int: ...


class Told:
    """Told by the application when it begins, read by the door when the request has ended.

    Attributes:
        counted: None for what generates nothing.
    """

    def __init__(self) -> None:
        self.counted: Counted | None = None
