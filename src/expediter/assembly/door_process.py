"""One of several gateway processes: `python -m expediter.assembly.door_process`, started by `door_processes`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys

import uvloop

from expediter.assembly.door import FrontDoor, run_door
from expediter.assembly.door_processes import READY, Assignment, decode_assignment
from expediter.assembly.observing import PROCESS
from expediter.gateway.door.drain import Drain
from expediter.gateway.server import StopSignals
from expediter.gateway.tenants import Tenants
from expediter.telemetry.logging_setup import setup_logging


def main() -> int:
    """Serve until SIGTERM, or until the parent is gone."""
    assignment = decode_assignment(sys.stdin.buffer.readline())
    setup_logging(f"{PROCESS} {assignment.place.slot}", log_format=assignment.config.observing.log_format)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(assignment))
    return 0


async def _serve(assignment: Assignment) -> None:
    config = assignment.config
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), _parent_is_gone)
    with contextlib.ExitStack() as stack, StopSignals() as signals:
        sock = stack.enter_context(socket.socket(fileno=assignment.listen_fd))
        admin = None
        if assignment.admin_fd is not None:
            admin = stack.enter_context(socket.socket(fileno=assignment.admin_fd))

        def tell(front: FrontDoor) -> None:
            sys.stdout.buffer.write(READY + front.summary().encode() + b"\n")
            sys.stdout.buffer.flush()

        await run_door(
            config,
            Tenants(config.tenant_book()),
            Drain(),
            None,
            sock,
            signals,
            tell,
            admin=admin,
            place=assignment.place,
        )


def _parent_is_gone() -> None:
    """Drain like at a signal. Nothing more is ever written to the standard input: it is readable when it ends."""
    asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
