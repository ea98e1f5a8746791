"""The configuration file that `serve` and `simulate` share.

[slo_classes.interactive]
ttft_s = 0.5
tpot_s = 0.05
value = 2.0          # weight in goodput, 1 by default
refuse_late = true   # rather refused than late, false by default

[api_keys]           # of a server: the tenant's name, and its key
alice = "..."
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from expediter.core.errors import ConfigurationError
from expediter.core.slo import SloClass

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileConfig:
    """What a configuration file says.

    Args:
        slo_classes: by name.
        api_keys: a server's keys by tenant; a simulation has no use for them.
    Raises:
        ConfigurationError: a name cannot stand in a header or a label, or a key is empty or given twice.
    """

    slo_classes: Mapping[str, SloClass] = field(default_factory=dict)
    api_keys: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (*self.slo_classes, *self.api_keys):
            if not _NAME.fullmatch(name):
                raise ConfigurationError(f"{name!r} is no name: up to 64 of the characters A-Z a-z 0-9 _ . -")
        if not all(self.api_keys.values()):
            raise ConfigurationError("an API key must not be empty")
        if len(set(self.api_keys.values())) < len(self.api_keys):
            raise ConfigurationError("two tenants have the same API key")


class _Class(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    value: float = 1.0
    refuse_late: bool = False


class _File(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    slo_classes: dict[str, _Class] = {}
    api_keys: dict[str, str] = {}


def load_file_config(path: str | Path | None) -> FileConfig:
    """Read a configuration file; without one everything is as if it were empty.

    Raises:
        ConfigurationError: the file cannot be read, or something in it is unknown or out of range.
    """
    if path is None:
        return FileConfig()
    try:
        content = msgspec.convert(tomllib.loads(Path(path).read_text("utf-8")), _File)
        classes = {name: SloClass(**msgspec.structs.asdict(row)) for name, row in content.slo_classes.items()}
        return FileConfig(slo_classes=classes, api_keys=content.api_keys)
    except OSError as error:
        raise ConfigurationError(f"cannot read {str(path)!r}: {error.strerror}") from error
    except (ValueError, ConfigurationError) as error:  # TOML, its encoding, and msgspec's errors are ValueErrors
        raise ConfigurationError(f"{path}: {error}") from error
