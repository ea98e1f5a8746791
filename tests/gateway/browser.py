"""Chromium over its DevTools protocol: pages at the width of a phone too, which the command line cannot do."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Tab:
    """One tab; made by `browser`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = count(1)
        self.errors: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json(timeout=60)
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    async def open(self, url: str, width: int, height: int, *, is_dark: bool = False) -> None:
        """Show a page; how long it takes until it has drawn itself is for `wait_for`."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}]
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Emulation.setEmulatedMedia", features=scheme)
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        await self.call("Page.navigate", url=url)
        await self.wait_for(f"location.href === {url!r} && document.body !== null")

    async def value(self, script: str) -> Any:
        result = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def wait_for(self, script: str, timeout_s: float = 60) -> None:
        async with asyncio.timeout(timeout_s):
            while not await self.value(script):  # noqa: ASYNC110 - the condition lives in another process
                await asyncio.sleep(0.05)

    async def screenshot(self) -> bytes:
        """Return what is in sight, as PNG."""
        return base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry'].get('url', '')}: {params['entry']['text']}")


@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[Tab]:
    """A tab of a browser of its own."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0")
        process = await asyncio.create_subprocess_exec(
            *(CHROMIUM, *flags, f"--user-data-dir={folder}", "about:blank"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            port = await _port(Path(folder) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as reply:
                    pages = [target for target in await reply.json() if target["type"] == "page"]
                async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    yield Tab(socket)
        finally:
            process.terminate()
            await process.wait()


async def _port(file: Path) -> int:
    async with asyncio.timeout(60):
        while not file.exists() or "\n" not in file.read_text():  # noqa: ASYNC110, ASYNC240 - written by another process
            await asyncio.sleep(0.05)
    return int(file.read_text().split("\n", 1)[0])  # noqa: ASYNC240 - a line
