"""What the backends' caches hold, as far as dispatches and KV events tell."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from expediter.control.kv_contents import News
from expediter.control.prefix_index import PrefixIndex, PrefixKeys
from expediter.control.routing.build import RoutingConfig
from expediter.control.routing.caches import IndexedCaches
from expediter.core.errors import ConfigurationError
from expediter.core.request import Request, TokenArray
from expediter.gateway.backends.backend import Backend
from expediter.gateway.backends.config import BackendConfig
from expediter.gateway.backends.prompts import PromptSource, token_ids

if TYPE_CHECKING:  # an extra: only models with a tokenizer need it
    from expediter.engine.tokenizer import Tokenizer

EXACT_BLOCK_TOKENS: Final = 16
"""Of the index of a model whose token ids are known."""


class Contents:
    """Keeps what was sent where, in one index for all models whose prompts are compared as bytes.

    A model whose prompts are compared by token ids has an index of its own.

    Args:
        tokens_ratio: how many tokens of the door's there are to one of a backend's.
    """

    def __init__(self, routing: RoutingConfig, tokens_ratio: Callable[[Backend], float]) -> None:
        self._routing = routing
        self._tokens_ratio = tokens_ratio
        self._index = routing.index()
        self._exact: dict[str, PrefixIndex] = {}
        self._caches: dict[str, IndexedCaches] = {}
        self._tokenizers: dict[str, Tokenizer] = {}
        self._tokenizer_of: dict[str, Tokenizer] = {}

    # ---- models

    def read_tokenizer(self, config: BackendConfig) -> None:
        """Read the tokenizer of a backend's model, if it has one, once for all backends.

        Raises:
            ConfigurationError: it cannot be read, or what that needs is not installed.
        """
        folder = config.tokenizer
        if folder and folder not in self._tokenizers:
            self._tokenizers[folder] = _tokenizer(config)

    def open(self, model: str, folder: str) -> IndexedCaches:
        """Begin to keep what is known of a model that somebody serves now, and return it.

        Args:
            folder: of its tokenizer, "" to compare its prompts as bytes.
        """
        tokenizer = self._tokenizers.get(folder)
        if tokenizer is None:
            caches = IndexedCaches(self._index, model)
        else:
            # Blocks as small as any engine's, so that events can be told apart; an index of the same size of its own.
            index = replace(self._routing, index_block_tokens=EXACT_BLOCK_TOKENS).index()
            caches = IndexedCaches(index, model, shared_by_tenants=True)
            self._exact[model], self._tokenizer_of[model] = index, tokenizer
        self._caches[model] = caches
        return caches

    def close(self, model: str) -> None:
        """Forget a model that nobody serves any longer."""
        del self._caches[model]
        self._exact.pop(model, None)
        self._tokenizer_of.pop(model, None)

    def prompt_tokens(self, model: str, prompt: PromptSource) -> TokenArray:
        """Return a prompt as it is compared and counted for a model: its token ids where they can be known."""
        tokenizer = self._tokenizer_of.get(model)
        tokens = None if tokenizer is None else token_ids(tokenizer, prompt)
        return prompt.prompt_tokens() if tokens is None else tokens

    def keys(self, model: str, request: Request) -> PrefixKeys:
        """Return the numbers of a prompt's prefixes."""
        caches = self._caches.get(model)
        return [] if caches is None else caches.keys(request)

    # ---- what is heard of a backend's cache

    def limit(self, backend: Backend, max_kv_tokens: int | None) -> None:
        """Say what a backend's KV cache takes, in its own tokens; None if it does not say."""
        if max_kv_tokens is not None and max_kv_tokens != backend.profile.max_kv_tokens:
            backend.profile = replace(backend.profile, max_kv_tokens=max_kv_tokens)
            self._bound(backend, max_kv_tokens)

    def holds(self, backend: Backend, num_tokens: int, *, has_dropped: bool) -> None:
        """Say what a backend's cache holds, in its own tokens; once it drops something, it holds no more than that."""
        backend.num_cache_tokens = num_tokens
        if has_dropped:
            self._bound(backend, num_tokens)

    def root(self, backend: Backend) -> int | None:
        """Return the number of the empty prefix of the model that a backend serves first.

        None if its prompts are not compared by token ids, or the backend serves nothing yet.
        """
        model = backend.models[0] if backend.models else ""
        return self._caches[model].root() if model in self._exact else None

    def news(self, backend: Backend, news: News) -> None:
        """Take in what a backend's KV events say of prompts of the model that it serves first."""
        if news.is_lost:
            self.forget(backend)
        if self.root(backend) is not None:
            index = self._exact[backend.models[0]]
            for keys in news.stored:
                index.record(backend.slot, keys)
            index.drop(backend.slot, news.dropped)

    def placed(self, backend: Backend, model: str, keys: PrefixKeys) -> None:
        """Note that another process has sent a prompt to a backend."""
        self._caches[model].index.record(backend.slot, keys)

    def forget(self, backend: Backend) -> None:
        """Say that a backend holds nothing."""
        if backend.is_gone:
            return
        for index in self._indexes():
            index.remove(backend.slot)
            if backend.profile.max_kv_tokens is not None:
                index.limit(backend.slot, backend.profile.max_kv_tokens)

    def _bound(self, backend: Backend, num_tokens: int) -> None:
        if not backend.is_gone:
            max_tokens = round(num_tokens * self._tokens_ratio(backend))
            for index in self._indexes():
                index.limit(backend.slot, max_tokens)

    # ---- what there is to see

    @property
    def num_bytes(self) -> int:
        """Memory of the indexes."""
        return sum(index.num_bytes for index in self._indexes())

    def num_known_tokens(self, backend: Backend) -> int:
        """Return the prompt tokens, as the door counts them, that a backend is taken to hold."""
        return sum(index.num_held_tokens(backend.slot) for index in self._indexes())

    def _indexes(self) -> Iterable[PrefixIndex]:
        return self._index, *self._exact.values()


def _tokenizer(config: BackendConfig) -> Tokenizer:
    try:
        from expediter.engine.tokenizer import Tokenizer  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigurationError(f"backend {config.url!r}: tokenizer needs pip install 'expediter[engine]'") from error
    return Tokenizer.from_folder(Path(config.tokenizer))
