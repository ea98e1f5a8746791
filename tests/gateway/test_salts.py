"""Salts of prefix caches that backends are told."""

import pytest

from expediter.core.errors import ConfigurationError
from expediter.gateway.backends.config import BackendConfig
from expediter.gateway.salts import CacheSalts, salt_secret


def test_a_secret_makes_the_same_salts_and_none_is_made_anew() -> None:
    given = salt_secret("x" * 32)
    assert CacheSalts(given).of("a/") == CacheSalts(given).of("a/") != CacheSalts(given).of("b/")
    assert CacheSalts(salt_secret("")).of("a/") != CacheSalts(salt_secret("")).of("a/")
    assert CacheSalts(given).of("a/").isascii()


def test_a_secret_that_could_be_guessed_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="EXPEDITER_SALT_SECRET must have at least 32"):
        salt_secret("short")


def test_events_by_token_do_not_go_with_salts() -> None:
    with pytest.raises(ConfigurationError, match="do not go together"):
        BackendConfig(url="http://x", kv_events="tcp://x:1", tokenizer="/t", send_cache_salt=True)
