"""Published systems as files: a preset names the parts and their limits."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources

import msgspec

from expediter.core.errors import ConfigurationError
from expediter.scheduling.build import PolicyConfig
from expediter.scheduling.config import SchedulerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A composition of parts; `docs/presets` says where each comes from and when to use it."""

    name: str
    summary: str
    scheduler: SchedulerConfig
    policy: PolicyConfig
    prefix_caching: bool
    routing: str
    block_size: int


def _files() -> dict[str, str]:
    folder = resources.files("expediter.assembly") / "presets"
    return {f.name.removesuffix(".toml"): f.read_text() for f in folder.iterdir() if f.name.endswith(".toml")}


PRESET_NAMES = tuple(sorted(_files()))


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
