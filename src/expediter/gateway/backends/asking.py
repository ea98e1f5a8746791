"""What a backend is asked over HTTP: what it serves, how it is doing, and whether it is there."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final, NamedTuple

import aiohttp

from expediter.control.health import Failure
from expediter.core.errors import ReplicaError
from expediter.gateway.backends.backend import Backend, Kind
from expediter.gateway.backends.metrics_text import Load, read_load

_ANSWER_S: Final = 5.0
_PROBE_S: Final = 2.0
_MAX_ANSWER_BYTES: Final = 16 << 20
_KINDS: Final = {
    "vllm": Kind.VLLM,
    "sglang": Kind.SGLANG,
    "llamacpp": Kind.LLAMA_CPP,
    "expediter": Kind.EXPEDITER,
}
_WITH_HEALTH: Final = frozenset(_KINDS.values())


class Discovered(NamedTuple):
    """What a backend says of itself; None for what it does not say.

    Attributes:
        max_model_len: longest sequence in tokens, of the model with the shortest.
        max_requests: that it works on at once.
        max_kv_tokens: that its KV cache holds.
    """

    kind: Kind
    models: tuple[str, ...]
    max_model_len: int | None
    max_requests: int | None
    max_kv_tokens: int | None


class Asker:
    """HTTP to one backend, apart from the path of requests. Follows no redirect and uses no proxy."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def discover(self) -> Discovered:
        """Ask what the backend is and serves.

        Raises:
            ReplicaError: it does not say which models it serves.
        """
        status, answer = await self._json("/v1/models")
        rows = answer.get("data") if isinstance(answer, dict) else None
        if status != 200 or not isinstance(rows, list):
            raise ReplicaError(f"GET /v1/models: status {status}, or no list of models")
        rows = [row for row in rows if isinstance(row, dict) and isinstance(row.get("id"), str)]
        owner = next((row["owned_by"] for row in rows if isinstance(row.get("owned_by"), str)), "")
        kind = _KINDS.get(owner.lower(), Kind.OTHER)
        lengths = [length for length in (_count(row.get("max_model_len")) for row in rows) if length is not None]
        found = Discovered(kind, tuple(row["id"] for row in rows), min(lengths, default=None), None, None)
        if kind is Kind.SGLANG:
            return await self._ask_sglang(found)
        if kind is Kind.LLAMA_CPP:
            return await self._ask_llama_cpp(found)
        return found

    async def load(self) -> Load | None:
        """Read its metrics; None if it has none that we know."""
        status, page = await self._get("/metrics", _ANSWER_S)
        return read_load(page.decode("utf-8", "replace")) if status == 200 else None

    async def json(self, path: str) -> object | None:
        """Return what a path answers, decoded; None if its status is not 200, or it is no JSON."""
        status, answer = await self._json(path)
        return answer if status == 200 else None

    async def probe(self) -> Failure | None:
        """Ask whether it is there; None if so. Any answer below 500 will do."""
        path = "/health" if self._backend.kind in _WITH_HEALTH else "/v1/models"
        try:
            status, _ = await self._get(path, _PROBE_S)
        except aiohttp.ClientConnectorError:
            return Failure.CONNECT
        except TimeoutError:
            return Failure.TIMEOUT
        except (aiohttp.ClientError, OSError, ReplicaError):
            return Failure.BROKEN
        return Failure.STATUS_5XX if status >= 500 else None

    async def _ask_sglang(self, found: Discovered) -> Discovered:
        """Ask for SGLang's limits: those of each data-parallel engine, and how many there are.

        Its `max_running_requests` is what its command line said, mostly null; what it works with is in the states.
        Source: sglang/srt/entrypoints/http_server.py, managers/scheduler_components/internal_state.py (0.5.23).
        """
        for path in ("/server_info", "/get_server_info"):  # the newer name first
            status, answer = await self._json(path)
            if status == 200 and isinstance(answer, dict):
                states = answer.get("internal_states")
                engines = [each for each in states if isinstance(each, dict)] if isinstance(states, list) else []
                limits = [_count(each.get("effective_max_running_requests_per_dp")) or 0 for each in engines]
                tokens = _count(answer.get("max_total_num_tokens"))
                return found._replace(
                    max_requests=sum(limits) or _count(answer.get("max_running_requests")),
                    max_kv_tokens=tokens and tokens * max(1, len(engines)),
                    max_model_len=found.max_model_len or _count(answer.get("context_length")),
                )
        return found

    async def _ask_llama_cpp(self, found: Discovered) -> Discovered:
        """Ask for llama.cpp's limits.

        Source: tools/server/server-context.cpp (build 11434).
        """
        status, answer = await self._json("/props")
        if status != 200 or not isinstance(answer, dict):
            return found
        settings = answer.get("default_generation_settings")
        context = _count(settings.get("n_ctx")) if isinstance(settings, dict) else None
        slots = _count(answer.get("total_slots"))
        return found._replace(
            max_requests=slots,
            max_model_len=found.max_model_len or context,
            # A guess, for it does not say. Slots have a context each, or share one (`--kv-unified`, the default without
            # `--parallel`), and prompts that leave a slot are kept in host memory (`--cache-ram`, 8 GiB by default).
            max_kv_tokens=slots * context if slots and context else None,
        )

    async def _json(self, path: str) -> tuple[int, Any]:
        status, body = await self._get(path, _ANSWER_S)
        try:
            return status, json.loads(body)
        except (ValueError, RecursionError):
            return status, None

    async def _get(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        """Return status and body.

        Raises:
            ReplicaError: the body is too long.
            aiohttp.ClientError, TimeoutError: no answer.
        """
        backend = self._backend
        if self._session is None:
            uds = backend.address.uds
            # A connection each: one that was kept could have been closed meanwhile, which would look like a failure.
            connector = (
                aiohttp.TCPConnector(force_close=True) if uds is None else aiohttp.UnixConnector(uds, force_close=True)
            )
            self._session = aiohttp.ClientSession(connector=connector, trust_env=False)
        headers = {} if backend.authorization is None else {"Authorization": backend.authorization.decode()}
        url = backend.address.url + path
        async with (
            asyncio.timeout(timeout_s),
            self._session.get(url, headers=headers, allow_redirects=False) as response,
        ):
            body = await response.content.read(_MAX_ANSWER_BYTES)
            while not response.content.at_eof():
                body += await response.content.read(_MAX_ANSWER_BYTES - len(body) + 1)
                if len(body) > _MAX_ANSWER_BYTES:
                    raise ReplicaError(f"the answer to {path} is longer than {_MAX_ANSWER_BYTES} bytes")
            return response.status, body


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
