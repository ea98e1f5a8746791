"""The configuration file that `serve` and `simulate` share.

[slo_classes.interactive]
ttft_s = 0.5
tpot_s = 0.05
value = 2.0          # weight in goodput, 1 by default
refuse_late = true   # rather refused than late, false by default

[api_keys]           # of a server: the tenant's name, and its key
alice = "..."

[failures]           # of a simulation: the fields of `sim.failures.FailureConfig`
crash_every_s = 600.0
crashes = [{replica = 0, at_s = 10.0, down_s = 30.0}]
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
from expediter.sim.failures import NO_FAILURES, Crash, FailureConfig, Slowdown

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileConfig:
    """What a configuration file says.

    Args:
        slo_classes: by name.
        api_keys: a server's keys by tenant; a simulation has no use for them.
        failures: what goes wrong in a simulation; a server has no use for them.
    Raises:
        ConfigurationError: a name cannot stand in a header or a label, or a key is empty or given twice.
    """

    slo_classes: Mapping[str, SloClass] = field(default_factory=dict)
    api_keys: Mapping[str, str] = field(default_factory=dict)
    failures: FailureConfig = NO_FAILURES

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


class _Crash(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    replica: int
    at_s: float
    down_s: float | None = None


class _Slowdown(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    replica: int
    at_s: float
    for_s: float
    factor: float = 3.0


class _Failures(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    crashes: list[_Crash] = []
    slowdowns: list[_Slowdown] = []
    crash_every_s: float | None = None
    slow_every_s: float | None = None
    down_s: float | None = None
    slow_for_s: float = 10.0
    slow_factor: float = 3.0
    lose_transfers: float = 0.0
    seed: int = 0

    def config(self) -> FailureConfig:
        fields = msgspec.structs.asdict(self)
        fields["crashes"] = tuple(Crash(**msgspec.structs.asdict(crash)) for crash in self.crashes)
        fields["slowdowns"] = tuple(Slowdown(**msgspec.structs.asdict(slowdown)) for slowdown in self.slowdowns)
        return FailureConfig(**fields)


class _File(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    slo_classes: dict[str, _Class] = {}
    api_keys: dict[str, str] = {}
    failures: _Failures = msgspec.field(default_factory=_Failures)


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
        return FileConfig(slo_classes=classes, api_keys=content.api_keys, failures=content.failures.config())
    except OSError as error:
        raise ConfigurationError(f"cannot read {str(path)!r}: {error.strerror}") from error
    except (ValueError, ConfigurationError) as error:  # TOML, its encoding, and msgspec's errors are ValueErrors
        raise ConfigurationError(f"{path}: {error}") from error
