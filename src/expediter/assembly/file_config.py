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

[routing]            # of a server: how a backend is chosen; the fields of `control.routing.build.RoutingConfig`
name = "predicted_ttft"
index_max_bytes = 268_435_456

[health]             # of a server: when a backend is left out; the fields of `control.health.HealthConfig`
max_failures_in_a_row = 3

[failures]           # of a simulation: the fields of `sim.failures.FailureConfig`
crash_every_s = 600.0
crashes = [{replica = 0, at_s = 10.0, down_s = 30.0}]
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from expediter.control.health import HealthConfig
from expediter.control.limits import Limits
from expediter.control.patience import PatienceConfig
from expediter.control.retry import RetryConfig
from expediter.control.routing.build import RoutingConfig
from expediter.control.waiting import QueueConfig
from expediter.core.errors import ConfigurationError
from expediter.core.slo import SloClass
from expediter.gateway.backends.config import BackendConfig
from expediter.gateway.backends.registry import DEFAULT_ROUTING
from expediter.gateway.http.wire import HttpLimits
from expediter.gateway.tenants import TenantBook, TenantConfig
from expediter.sim.failures import NO_FAILURES, Crash, FailureConfig, Slowdown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_PATIENCE_FIELDS: Final[tuple[str, ...]] = ("min_progress_s", "max_progress_s", "usual_gap_s")
_RETRY_FIELDS: Final[tuple[str, ...]] = ("max_attempts",)

_Table = dict[str, Any]
_Made = TypeVar("_Made", bound="DataclassInstance")


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
        tenants: by name; of them a simulation uses the weights.
        anonymous, queue, door, backends, routing, health: of a server; a simulation has no use for them.
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
    routing: RoutingConfig = DEFAULT_ROUTING
    health: HealthConfig = field(default_factory=HealthConfig)
    failures: FailureConfig = NO_FAILURES
    path: Path | None = None

    def __post_init__(self) -> None:
        for name in (*self.slo_classes, *self.tenants):
            if not _NAME.fullmatch(name):
                raise ConfigurationError(f"{name!r} is no name: up to 64 of the characters A-Z a-z 0-9 _ . -")

    @property
    def weights(self) -> dict[str, float]:
        """Share of each tenant, by name; "" for who comes without a key."""
        tenants = self.tenants if self.anonymous is None else {**self.tenants, "": self.anonymous}
        return {name: tenant.weight for name, tenant in tenants.items()}

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


class _Anonymous(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    weight: float = 1.0
    priority: int | None = None
    models: tuple[str, ...] | None = None
    slo_class: str = ""
    max_requests_per_minute: int | None = None
    max_tokens_per_minute: int | None = None
    max_concurrent_requests: int | None = None

    def config(self) -> TenantConfig:
        given = msgspec.structs.asdict(self)
        limits = Limits(**{name: given.pop(name) for name in tuple(given) if name.startswith("max_")})
        return TenantConfig(limits=limits, **given)


class _Tenant(_Anonymous, forbid_unknown_fields=True, kw_only=True):
    key_hashes: tuple[str, ...] = ()
    key_env: tuple[str, ...] = ()


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
        given = msgspec.structs.asdict(self)
        given["crashes"] = tuple(Crash(**msgspec.structs.asdict(crash)) for crash in self.crashes)
        given["slowdowns"] = tuple(Slowdown(**msgspec.structs.asdict(slowdown)) for slowdown in self.slowdowns)
        return FailureConfig(**given)


class _File(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    slo_classes: dict[str, _Table] = {}
    tenants: dict[str, _Tenant] = {}
    anonymous: _Anonymous | None = None
    queue: _Table = {}
    door: _Table = {}
    backends: list[_Table] = []
    routing: _Table = {}
    health: _Table = {}
    failures: _Failures = msgspec.field(default_factory=_Failures)

    def config(self, path: Path) -> FileConfig:
        classes = {name: _read(row, SloClass, f"slo_classes.{name}") for name, row in self.slo_classes.items()}
        return FileConfig(
            slo_classes=classes,
            tenants={name: row.config() for name, row in self.tenants.items()},
            anonymous=None if self.anonymous is None else self.anonymous.config(),
            queue=_read(self.queue, QueueConfig, "queue"),
            door=_door(self.door),
            backends=tuple(_read(row, BackendConfig, "[backends]") for row in self.backends),
            routing=_read(self.routing, RoutingConfig, "routing", DEFAULT_ROUTING),
            health=_read(self.health, HealthConfig, "health"),
            failures=self.failures.config(),
            path=path,
        )


def _read(table: _Table, made: type[_Made], where: str, base: _Made | None = None) -> _Made:
    """Return a configuration whose fields a table gives, strictly typed; the others are `base`'s or the usual ones.

    Raises:
        ConfigurationError: a field is unknown, of another type or out of range; names the table.
    """
    known = {each.name for each in fields(made)}
    unknown = [name for name in table if name not in known]
    if unknown:
        raise ConfigurationError(f"[{where}] has no {unknown[0]!r}; there are: {', '.join(sorted(known))}")
    try:
        given = msgspec.convert(table, made)
    except (msgspec.ValidationError, ConfigurationError) as error:
        raise ConfigurationError(f"[{where}] {error}") from error
    return given if base is None else replace(base, **{name: getattr(given, name) for name in table})


def _door(table: _Table) -> DoorLimits:
    """Return what `[door]` says: the fields of `HttpLimits`, and some about backends."""
    patience = {name: table[name] for name in _PATIENCE_FIELDS if name in table}
    retry = {name: table[name] for name in _RETRY_FIELDS if name in table}
    http = {name: value for name, value in table.items() if name not in (*_PATIENCE_FIELDS, *_RETRY_FIELDS)}
    return DoorLimits(
        http=_read(http, HttpLimits, "door"),
        patience=_read(patience, PatienceConfig, "door"),
        retry=_read(retry, RetryConfig, "door"),
    )


def load_file_config(path: str | Path | None) -> FileConfig:
    """Read a configuration file; without one everything is as if it were empty.

    Raises:
        ConfigurationError: the file cannot be read, or something in it is unknown or out of range.
    """
    if path is None:
        return FileConfig()
    try:
        return msgspec.convert(tomllib.loads(Path(path).read_text("utf-8")), _File).config(Path(path))
    except OSError as error:
        raise ConfigurationError(f"cannot read {str(path)!r}: {error.strerror}") from error
    except (ValueError, ConfigurationError) as error:  # TOML, its encoding, and msgspec's errors are ValueErrors
        raise ConfigurationError(f"{path}: {error}") from error
