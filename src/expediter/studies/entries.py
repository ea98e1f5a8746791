"""What is compared: presets, each perhaps with settings of its own, as one word on the command line.

sarathi                                     a preset
sarathi:max_num_batched_tokens=512          with another setting
small=sarathi:max_num_batched_tokens=512    the same under a name
sarathi:gpu=h100,replicas=2                 on other hardware than the rest
sarathi:pool=prefill;tp=2,pool=decode       on pools, as --pool describes them, with ; in place of : and ,
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from expediter.assembly.pools import PoolConfig, parse_pool
from expediter.assembly.presets import load_preset
from expediter.assembly.simulation import SimulationConfig, build_simulation
from expediter.core.errors import ConfigurationError

_GIB: Final = 1 << 30


def _count(text: str) -> int:
    return int(text)


def _gibibytes(text: str) -> int:
    size = float(text)
    if not (math.isfinite(size) and size >= 0):
        raise ValueError(text)
    return int(size * _GIB)


def _pool(text: str) -> PoolConfig:
    role, _, rest = text.partition(";")
    return parse_pool(f"{role}:{rest.replace(';', ',')}")


def _switch(text: str) -> bool:
    return {"on": True, "off": False}[text]


_SETTINGS: Final[Mapping[str, tuple[str, Callable[[str], Any], str]]] = {
    "batching": ("batching", str, "a name"),
    "block_size": ("block_size", _count, "a number"),
    "budget": ("budget", str, "a name"),
    "engine": ("engine", str, "a name"),
    "gpu": ("gpu", str, "a name"),
    "knows_step_time": ("knows_step_time", _switch, "on or off"),
    "max_model_len": ("max_model_len", _count, "a number"),
    "max_num_batched_tokens": ("max_num_batched_tokens", _count, "a number"),
    "max_num_seqs": ("max_num_seqs", _count, "a number"),
    "memory": ("memory", str, "a name"),
    "model": ("model", str, "a name"),
    "num_gpu_blocks_override": ("num_blocks", _count, "a number"),
    "ordering": ("ordering", str, "a name"),
    "preemption_mode": ("preemption_mode", str, "a name"),
    "pool": ("pools", _pool, "a pool"),
    "pp": ("pipeline_parallel", _count, "a number"),
    "prefix_caching": ("prefix_caching", _switch, "on or off"),
    "replicas": ("replicas", _count, "a number"),
    "routing": ("routing", str, "a name"),
    "swap_space": ("swap_space_bytes", _gibibytes, "a number of GiB"),
    "tp": ("tensor_parallel", _count, "a number"),
    "transfer": ("transfer", str, "a style"),
    "victims": ("victims", str, "a name"),
}
"""By the names of `simulate`'s flags: field of `SimulationConfig`, how it is read, and what it should be."""
SETTING_NAMES: Final = tuple(_SETTINGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One of the things compared.

    Args:
        name: what tables and plots call it.
        settings: what it has of its own beside the preset, as written.
        config: what is simulated.
    """

    name: str
    settings: Mapping[str, str]
    config: SimulationConfig


def parse_entry(text: str, base: SimulationConfig) -> Entry:
    """Return the entry that `[NAME=]PRESET[:SETTING=VALUE,...]` describes, on top of what all entries share.

    Settings are `simulate`'s flags without the dashes; `-` and `_` are the same. `pool` may be repeated.

    Raises:
        ConfigurationError: the text is not of that form, or names something that does not exist; the message lists
            what does.
    """
    head, colon, tail = text.partition(":")
    name, equals, preset = (part.strip() for part in head.rpartition("="))
    if not preset or (equals and not name) or (colon and not tail.strip()):
        raise ConfigurationError(f"{text!r} is not of the form [NAME=]PRESET[:SETTING=VALUE,...]")
    load_preset(preset)
    settings: dict[str, str] = {}
    changes: dict[str, Any] = {}
    for part in tail.split(",") if tail else ():
        key, equals, value = (word.strip() for word in part.partition("="))
        key = key.replace("-", "_")
        if key not in _SETTINGS:
            raise ConfigurationError(f"{text!r}: no setting {key!r}; there are: {', '.join(SETTING_NAMES)}")
        field, read, what = _SETTINGS[key]
        if key in settings and key != "pool":
            raise ConfigurationError(f"{text!r}: {key} is set twice")
        try:
            setting = read(value)
        except (ValueError, KeyError) as error:
            raise ConfigurationError(f"{text!r}: {key} must be {what}, not {value!r}") from error
        except ConfigurationError as error:
            raise ConfigurationError(f"{text!r}: {error}") from error
        if not value:
            raise ConfigurationError(f"{text!r}: {key} has no value")
        if key == "pool":
            setting = (*changes.get(field, ()), setting)
            value = f"{settings[key]} {value}" if key in settings else value
        changes[field], settings[key] = setting, value
    try:
        config = replace(base, preset=preset, **changes)
        build_simulation(replace(config, replicas=1))  # so that a wrong name is said before anything has run
    except ConfigurationError as error:
        raise ConfigurationError(f"{text!r}: {error}") from error
    return Entry(name=name or text.strip(), settings=settings, config=config)


def parse_entries(texts: Sequence[str], base: SimulationConfig) -> tuple[Entry, ...]:
    """Return the entries, which must have different names.

    Raises:
        ConfigurationError: as `parse_entry`, or two have the same name.
    """
    entries = tuple(parse_entry(text, base) for text in texts)
    for place, entry in enumerate(entries):
        if entry.name in {other.name for other in entries[:place]}:
            raise ConfigurationError(f"two entries are called {entry.name!r}; NAME={entry.name} gives one a name")
    return entries
