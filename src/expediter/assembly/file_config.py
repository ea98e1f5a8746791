"""The configuration file that `serve` and `simulate` share.

[slo_classes.interactive]
ttft_s = 0.5
tpot_s = 0.05
value = 2.0          # weight in goodput, 1 by default
refuse_late = true   # rather refused than late, false by default

[tenants.alice]      # of a server: who may come in, see docs/tenants.md
key_hashes = ["..."] # SHA-256 of its keys; `expediter key` makes one
key_env = ["ALICE_KEY"]           # environment variables that hold keys of it as they are
weight = 2.0
priority = -1
models = ["small"]
slo_class = "interactive"
max_requests_per_minute = 600
max_tokens_per_minute = 100_000
max_concurrent_requests = 16

[anonymous]          # who comes without a key: the same, without keys

[queue]              # of a server: where requests wait while all replicas are at their limit
ordering = "fair_share"
max_requests = 1024
max_tokens = 4_194_304

[door]               # of a server: patience and limits of its main listener, see docs/backends.md
min_progress_s = 10.0
max_body_bytes = 16_777_216

[[backends]]         # of a server: whom it stands in front of, see docs/backends.md
url = "http://10.0.0.1:8000"

[failures]           # of a simulation: the fields of `sim.failures.FailureConfig`
crash_every_s = 600.0
crashes = [{replica = 0, at_s = 10.0, down_s = 30.0}]
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from expediter.control.limits import Limits
from expediter.control.retry import RetryConfig
from expediter.control.waiting import QueueConfig
from expediter.core.errors import ConfigurationError
from expediter.core.slo import SloClass
from expediter.gateway.backends.config import BackendConfig
from expediter.gateway.door.patience import PatienceConfig
from expediter.gateway.http.wire import HttpLimits
from expediter.gateway.tenants import TenantBook, TenantConfig
from expediter.sim.failures import NO_FAILURES, Crash, FailureConfig, Slowdown

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorLimits:
    """What a door bears: of clients, of silent backends, and in retries."""

    http: HttpLimits = field(default_factory=HttpLimits)
    patience: PatienceConfig = field(default_factory=PatienceConfig)
    retry: RetryConfig = field(default_factory=RetryConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileConfig:
    """What a configuration file says.

    Args:
        slo_classes: by name.
        tenants, anonymous, queue, door, backends: of a server; a simulation has no use for them.
        failures: what goes wrong in a simulation; a server has no use for them.
        path: of the file; None if there is none.
    Raises:
        ConfigurationError: a name cannot stand in a header or a label.
    """

    slo_classes: Mapping[str, SloClass] = field(default_factory=dict)
    tenants: Mapping[str, TenantConfig] = field(default_factory=dict)
    anonymous: TenantConfig | None = None
    queue: QueueConfig = field(default_factory=QueueConfig)
    door: DoorLimits = field(default_factory=DoorLimits)
    backends: tuple[BackendConfig, ...] = ()
    failures: FailureConfig = NO_FAILURES
    path: Path | None = None

    def __post_init__(self) -> None:
        for name in (*self.slo_classes, *self.tenants):
            if not _NAME.fullmatch(name):
                raise ConfigurationError(f"{name!r} is no name: up to 64 of the characters A-Z a-z 0-9 _ . -")

    def tenant_book(self, api_keys: Iterable[str], environment: Mapping[str, str]) -> TenantBook:
        """Return who may come in.

        Args:
            api_keys: keys that were given without a name.
            environment: where the file's `key_env` looks.
        Raises:
            ConfigurationError: a key, a class or a weight is wrong; names the tenant.
        """
        return TenantBook(
            self.tenants, self.anonymous, slo_classes=self.slo_classes, keys=api_keys, environment=environment
        )


class _Class(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    value: float = 1.0
    refuse_late: bool = False


class _Anonymous(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    weight: float = 1.0
    priority: int | None = None
    models: tuple[str, ...] | None = None
    slo_class: str = ""
    max_requests_per_minute: int | None = None
    max_tokens_per_minute: int | None = None
    max_concurrent_requests: int | None = None

    def config(self) -> TenantConfig:
        fields = msgspec.structs.asdict(self)
        limits = Limits(**{name: fields.pop(name) for name in tuple(fields) if name.startswith("max_")})
        return TenantConfig(limits=limits, **fields)


class _Tenant(_Anonymous, forbid_unknown_fields=True, kw_only=True):
    key_hashes: tuple[str, ...] = ()
    key_env: tuple[str, ...] = ()


class _Queue(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    ordering: str | None = None
    max_requests: int | None = None
    max_tokens: int | None = None

    def config(self) -> QueueConfig:
        given = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        return QueueConfig(**given)


class _Door(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Fields of `HttpLimits`, `PatienceConfig` and `RetryConfig`."""

    max_head_bytes: int | None = None
    max_headers: int | None = None
    max_body_bytes: int | None = None
    max_buffered_bytes: int | None = None
    head_timeout_s: float | None = None
    body_timeout_s: float | None = None
    keep_alive_s: float | None = None
    write_buffer_bytes: int | None = None
    write_timeout_s: float | None = None
    min_progress_s: float | None = None
    max_progress_s: float | None = None
    max_attempts: int | None = None

    def limits(self) -> DoorLimits:
        given = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        patience = {name: given.pop(name) for name in ("min_progress_s", "max_progress_s") if name in given}
        retry = {name: given.pop(name) for name in ("max_attempts",) if name in given}
        return DoorLimits(http=HttpLimits(**given), patience=PatienceConfig(**patience), retry=RetryConfig(**retry))


class _Backend(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Fields of `BackendConfig`."""

    url: str
    name: str = ""
    models: tuple[str, ...] = ()
    api_key_env: str = ""
    max_requests: int | None = None
    kv_events: str = ""
    kv_replay: str = ""
    tokenizer: str = ""


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
    tenants: dict[str, _Tenant] = {}
    anonymous: _Anonymous | None = None
    queue: _Queue = msgspec.field(default_factory=_Queue)
    door: _Door = msgspec.field(default_factory=_Door)
    backends: list[_Backend] = []
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
        return FileConfig(
            slo_classes=classes,
            tenants={name: row.config() for name, row in content.tenants.items()},
            anonymous=None if content.anonymous is None else content.anonymous.config(),
            queue=content.queue.config(),
            door=content.door.limits(),
            backends=tuple(BackendConfig(**msgspec.structs.asdict(row)) for row in content.backends),
            failures=content.failures.config(),
            path=Path(path),
        )
    except OSError as error:
        raise ConfigurationError(f"cannot read {str(path)!r}: {error.strerror}") from error
    except (ValueError, ConfigurationError) as error:  # TOML, its encoding, and msgspec's errors are ValueErrors
        raise ConfigurationError(f"{path}: {error}") from error
