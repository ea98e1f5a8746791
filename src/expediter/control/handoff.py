"""How a request goes from the replica that computes its prompt to the one that yields its tokens."""

from __future__ import annotations

import enum
from dataclasses import replace

from expediter.core.errors import ConfigurationError
from expediter.core.request import Carried, Request


class TransferStyle(enum.Enum):
    """When KV moves."""

    PULL = "pull"
    """The target asks for it when the prompt is done and it has room. Source: DistServe (2401.09670)."""
    PUSH = "push"
    """The target has room reserved since the request was routed; the source sends when the prompt is done."""
    LAYERWISE = "layerwise"
    """As push, but each layer's KV leaves as soon as it is computed. Source: Splitwise (2311.18677), Mooncake."""

    @property
    def reserves_ahead(self) -> bool:
        """Whether the target takes blocks before the prompt is computed."""
        return self is not TransferStyle.PULL


def transfer_style(name: str) -> TransferStyle:
    """Return a style by name.

    Raises:
        ConfigurationError: there is none of that name; the message lists those that exist.
    """
    try:
        return TransferStyle(name)
    except ValueError:
        names = ", ".join(style.value for style in TransferStyle)
        raise ConfigurationError(f"no transfer style {name!r}; there are: {names}") from None


def prompt_leg(request: Request, carried: Carried | None) -> Request:
    """Return the request as the replica sees it that computes its prompt: it ends with the next token.

    A stop token does not count before `min_tokens` of the whole.
    """
    num_output = 1 if carried is None else len(carried.output) + 1
    return replace(
        request,
        max_tokens=num_output,
        min_tokens=min(request.min_tokens, num_output),
        stop_token_ids=request.stop_token_ids if num_output >= request.min_tokens else (),
    )


def has_second_leg(request: Request, carried: Carried | None) -> bool:
    """Return whether anything is left to do when the next token is there."""
    return request.max_tokens > (1 if carried is None else len(carried.output) + 1)
