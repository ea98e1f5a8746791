"""Logging of the server processes: one line per record on standard error, never a prompt or a key."""

from __future__ import annotations

import logging
import sys

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def setup_logging(process: str, level: int = logging.INFO) -> None:
    """Send the records of this process to standard error.

    Requests are logged by their internal id only; uvicorn's access log stays off, since a URL may carry anything.

    Args:
        process: name of the process, put into each line.
    """
    logging.basicConfig(stream=sys.stderr, level=level, format=_FORMAT.replace("%(name)s", f"{process} %(name)s"))
    for chatty in ("uvicorn.error", "uvicorn.access", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
