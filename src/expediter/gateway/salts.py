"""Salts of prefix caches that are told to servers of others: they keep tenants apart and say nothing of them."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from functools import lru_cache
from typing import Final

from expediter.core.errors import ConfigurationError

SALT_VARIABLE: Final = "EXPEDITER_SALT_SECRET"
"""Environment variable with the secret that salts are made with."""
MIN_SECRET_CHARS: Final = 32
_MAX_KNOWN: Final = 4096


def salt_secret(given: str) -> bytes:
    """Return the secret that an operator gives, or a random one if it is "".

    Raises:
        ConfigurationError: it is too short to be one.
    """
    if not given:
        return secrets.token_bytes(32)
    if len(given) < MIN_SECRET_CHARS:
        raise ConfigurationError(f"{SALT_VARIABLE} must have at least {MIN_SECRET_CHARS} characters")
    return given.encode()


class CacheSalts:
    """Makes a salt of each of ours. Whoever sees one cannot tell whose it is, nor make that of somebody else.

    Args:
        secret: the same secret makes the same salts.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self.of = lru_cache(_MAX_KNOWN)(self._of)
        """Return what a server is told instead of `Terms.cache_salt`."""

    def _of(self, salt: str) -> str:
        digest = hmac.digest(self._secret, salt.encode(), hashlib.sha256)
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode("ascii")
