"""Where a backend is and how it is to be used."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from expediter.core.errors import ConfigurationError
from expediter.core.ranges import require_at_least

_NAME: Final = re.compile(r"[A-Za-z0-9_.:\[\]/-]{1,128}")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PORTS: Final = {"http": 80, "https": 443}


class Address(NamedTuple):
    """What to connect to.

    Attributes:
        uds: path of a Unix socket; host and port stand in the Host header only.
        base_path: what comes before "/v1/...", "" for nothing.
    """

    host: str
    port: int
    is_tls: bool = False
    uds: str | None = None
    base_path: str = ""

    @property
    def host_header(self) -> str:
        """Value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS["https" if self.is_tls else "http"] else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """The address as a base of URLs, for clients that know nothing of Unix sockets."""
        return f"{'https' if self.is_tls else 'http'}://{self.host_header}{self.base_path}"

    @classmethod
    def of(cls, url: str) -> Address:
        """Read `http://host:port[/path]`, https likewise, or `unix:/path/of/socket`; "/v1" at the end is left out.

        Raises:
            ConfigurationError: it is none of these, or carries a user, a query or a fragment.
        """
        if url.startswith("unix:"):
            path = url.removeprefix("unix:")
            if not path.startswith("/"):
                raise ConfigurationError(f"backend {url!r}: the path of a Unix socket begins with /")
            return cls("localhost", 80, uds="/" + path.lstrip("/"))
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigurationError(f"backend {url!r} is no URL") from error
        if parts.scheme not in _PORTS or not parts.hostname:
            raise ConfigurationError(f"backend {url!r} must begin with http://, https:// or unix:/ and name a host")
        if parts.username is not None or parts.query or parts.fragment:
            raise ConfigurationError("a backend's URL has no user, query or fragment; its key comes from api_key_env")
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or _PORTS[parts.scheme], parts.scheme == "https", base_path=path)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendConfig:
    """One backend, as `--backend` or a table `[[backends]]` says.

    Args:
        url: see `Address.of`.
        name: in metrics, explanations and the admin API; "" for host and port, or the socket's path.
        models: that it serves; empty to ask it.
        api_key_env: environment variable with the key that it wants; "" if it wants none.
        max_requests: most requests at once; None to ask it, and for no limit if it does not say.
        kv_events: ZMQ endpoint of its KV events, such as `tcp://host:5557`; "" for none.
        kv_replay: ZMQ endpoint where missed events can be had again; "" for none.
        send_cache_salt: tell it in each request's body which prefix cache is the tenant's, as vLLM takes it.
        tokenizer: folder of its model's tokenizer, so that its KV events tell which prompts it holds; "" for none.
    Raises:
        ConfigurationError: a field cannot be used.
    """

    url: str
    name: str = ""
    models: tuple[str, ...] = ()
    api_key_env: str = ""
    max_requests: int | None = None
    kv_events: str = ""
    kv_replay: str = ""
    tokenizer: str = ""
    send_cache_salt: bool = False

    def __post_init__(self) -> None:
        Address.of(self.url)
        if self.name and not _NAME.fullmatch(self.name):
            raise ConfigurationError(f"{self.name!r} is no name of a backend")
        require_at_least(1, self, "max_requests")
        if self.api_key_env and not _VARIABLE.fullmatch(self.api_key_env):
            # The value is not repeated: it may be the key itself, given by mistake.
            raise ConfigurationError("api_key_env is the name of an environment variable")
        for field in ("kv_events", "kv_replay"):
            if getattr(self, field) and not getattr(self, field).startswith(("tcp://", "ipc://")):
                raise ConfigurationError(f"{field} begins with tcp:// or ipc://")
        if not self.kv_events and (self.kv_replay or self.tokenizer):
            raise ConfigurationError("kv_replay and tokenizer need kv_events")
        if self.send_cache_salt and self.tokenizer:
            raise ConfigurationError(
                "send_cache_salt and tokenizer do not go together: KV events do not say under which salt a block is"
            )

    @property
    def address(self) -> Address:
        return Address.of(self.url)

    @property
    def shown_name(self) -> str:
        """The name, or what stands for it."""
        address = self.address
        return self.name or address.uds or f"{address.host}:{address.port}{address.base_path}"
