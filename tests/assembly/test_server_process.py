"""A server of one's own ends with whoever started it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

import pytest
from tests.door.mock_backends import mock_backends

from expediter.assembly.server_process import free_port

_STARTER = """
import sys, time
from expediter.assembly.server_process import running_server
with running_server(["--backend", sys.argv[1]], int(sys.argv[2])):
    print("running", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_too(number: signal.Signals) -> None:
    port = free_port()
    with mock_backends(1) as [mock]:
        command = [sys.executable, "-c", _STARTER, mock.url, str(port)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as starter:
            assert starter.stdout is not None
            assert "running\n" in iter(starter.stdout.readline, "")
            socket.create_connection(("127.0.0.1", port), 5).close()
            starter.send_signal(number)
            starter.wait(20)
    assert starter.returncode != 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5).close()
