"""`expediter key`: a new API key for a tenant, and the hash of it that goes into the configuration file."""

from __future__ import annotations

import argparse


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("key", help="make an API key for a tenant", description=__doc__)
    parser.set_defaults(run=run)


def run(_: argparse.Namespace) -> int:
    """Print a key, which is kept nowhere, and its hash; return 0."""
    from expediter.gateway.tenants import hash_of, new_key

    key = new_key()
    print(f"key:  {key}\nhash: {hash_of(key)}")
    return 0
