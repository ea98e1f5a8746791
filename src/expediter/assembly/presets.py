"""Published systems as files: a preset names the parts and their limits."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from functools import cache
from importlib import resources

import msgspec

from expediter.control.handoff import transfer_style
from expediter.control.routing.build import RoutingConfig
from expediter.core.errors import ConfigurationError
from expediter.scheduling.build import PolicyConfig
from expediter.scheduling.config import SchedulerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """What several replicas do together.

    Args:
        routing: who gets a request.
        prefill_share: of the replicas that only compute prompts, the others then only decode; 0 where all do both.
        transfer: when KV moves between the two (`control.handoff.TransferStyle`).
    Raises:
        ConfigurationError: the share is not in [0, 1), or there is no such style.
    """

    routing: RoutingConfig = field(default_factory=RoutingConfig)
    prefill_share: float = 0.0
    transfer: str = "pull"

    def __post_init__(self) -> None:
        transfer_style(self.transfer)
        if not 0 <= self.prefill_share < 1:
            raise ConfigurationError(f"prefill_share must lie in [0, 1), not {self.prefill_share}")

    def num_prefill(self, num_replicas: int) -> int:
        """Return how many of the replicas only compute prompts; 0 if there are too few to split, or none shall."""
        if not self.prefill_share or num_replicas < 2:
            return 0
        return min(max(1, round(self.prefill_share * num_replicas)), num_replicas - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A composition of parts; `docs/presets` says where each comes from and when to use it."""

    name: str
    summary: str
    scheduler: SchedulerConfig
    policy: PolicyConfig
    prefix_caching: bool
    block_size: int
    cluster: ClusterConfig = field(default_factory=ClusterConfig)


def _files() -> dict[str, str]:
    folder = resources.files("expediter.assembly") / "presets"
    return {f.name.removesuffix(".toml"): f.read_text() for f in folder.iterdir() if f.name.endswith(".toml")}


PRESET_NAMES = tuple(sorted(_files()))


@cache
def load_preset(name: str) -> Preset:
    """Read a preset.

    Raises:
        ConfigurationError: there is none of that name (the message lists those that exist), or its file is wrong.
    """
    files = _files()
    if name not in files:
        raise ConfigurationError(f"no preset {name!r}; there are: {', '.join(sorted(files))}")
    try:
        return msgspec.convert({"name": name, **tomllib.loads(files[name])}, Preset)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigurationError(f"preset {name}: {error}") from error
