"""The live page: its feed says what the records say, and a browser draws it without anything from elsewhere."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from browser import CHROMIUM, Tab, browser
from observed import Observed, observed, traffic

from expediter.gateway.dashboard.page import dashboard_page
from expediter.telemetry.exchanges import ExchangeRecord, Outcome

HOSTILE = "<img src=x onerror=\"document.title='owned'\">"


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Observed, list[ExchangeRecord]]]:
    records = list(traffic(300.0))
    with observed() as served:
        for record in records:
            served.record(record)
        served.metrics.queue(3, 4100)
        served.metrics.entered()
        yield served, records


def get(url: str) -> tuple[int, dict[str, str], bytes]:
    try:
        with urllib.request.urlopen(url, timeout=30) as reply:
            return reply.status, {k.lower(): v for k, v in reply.headers.items()}, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, {k.lower(): v for k, v in error.headers.items()}, error.read()


def feed(served: Observed, since: int = 0) -> dict[str, Any]:
    status, _, body = get(f"{served.url}/dashboard/feed?since={since}")
    assert status == 200
    return json.loads(body)


def test_the_feed_adds_up(served: tuple[Observed, list[ExchangeRecord]]) -> None:
    server, records = served
    told = feed(server)
    for tenant in ("search", "assistant", "nightly"):
        own = [record for record in records if record.tenant == tenant]
        counts = [point["tenants"].get(tenant, {}) for point in told["points"]]
        for field, of in (
            ("ended", own),
            ("met", [r for r in own if r.met_slo]),
            ("missed", [r for r in own if r.met_slo is False]),
            ("limited", [r for r in own if r.outcome is Outcome.OVER_LIMIT]),
        ):
            assert sum(count.get(field, 0) for count in counts) == len(of), (tenant, field)
    assert (told["in_flight"], told["queue_requests"], told["queue_tokens"]) == (1, 3, 4100)
    assert (told["num_processes"], told["num_answered"]) == (1, 1)
    assert [backend["name"] for backend in told["backends"]][:2] == ["gpu-a:8000", "gpu-b:8000"]
    assert told["targets"] == [{"name": "interactive", "ttft_s": 0.5, "tpot_s": 0.05}]
    assert all(abs(point["at"] - time.time()) < 400 for point in told["points"])


def test_the_percentiles_are_right(served: tuple[Observed, list[ExchangeRecord]]) -> None:
    server, records = served
    for point in feed(server)["points"][1:-1]:
        ended = [r for r in records if r.ended_s // 5 == point["index"] and r.outcome is Outcome.OK]
        exact = sorted(r.ttft_s for r in ended if r.ttft_s is not None)
        assert point["ttft_s"][0] == pytest.approx(exact[(len(exact) - 1) // 2], rel=0.026)
        assert point["ttft_s"][1] == pytest.approx(exact[-1], rel=0.026), "of less than a hundred, the p99 is the last"
        prompt, cached = sum(r.num_prompt_tokens for r in ended), sum(r.num_cached_tokens or 0 for r in ended)
        assert point["hit_rate"] == pytest.approx(cached / prompt)


def test_only_what_is_new_is_sent(served: tuple[Observed, list[ExchangeRecord]]) -> None:
    server, _ = served
    points = feed(server)["points"]
    newest = points[-1]["index"]
    assert [point["index"] for point in feed(server, newest)["points"]] == [newest]
    for since in ("x", "-1", "1" * 30, "%F0"):
        status, _, body = get(f"{server.url}/dashboard/feed?since={since}")
        assert (status, json.loads(body)["error"]["param"]) == (400, "since")


def test_slow_requests_say_why(served: tuple[Observed, list[ExchangeRecord]]) -> None:
    server, records = served
    slow = [slow for point in feed(server)["points"] for slow in point["slow"]]
    by_id = {record.request_id: record for record in records}
    queued = [s for s in slow if by_id[s["id"]].queued_s is not None and by_id[s["id"]].attempts[0].failure is None]
    assert queued
    for one in queued:
        assert re.search(
            r"in the gateway's queue behind \d+ requests?, no backend being free; .* until the", one["why"]
        )
    lost = [s for s in slow if any(attempt.failure for attempt in by_id[s["id"]].attempts)]
    assert all("lost at gpu-c:8000: timeout" in s["why"] for s in lost)
    assert all("where 120 ms were expected" in s["why"] for s in slow if s["outcome"] == "ok")


def test_tenants_do_not_see_each_other(served: tuple[Observed, list[ExchangeRecord]]) -> None:
    server, _ = served
    server.shows_all = False
    try:
        for path in ("/dashboard", "/dashboard/feed"):
            status, _, body = get(server.url + path)
            assert (status, json.loads(body)["error"]["code"]) == (403, "on_admin_listener")
    finally:
        server.shows_all = True


def test_the_page_loads_nothing_else(served: tuple[Observed, list[ExchangeRecord]]) -> None:
    server, _ = served
    status, headers, body = get(f"{server.url}/dashboard")
    assert status == 200
    assert body == dashboard_page()[0]
    html = body.decode()
    assert not re.search(r"<(link|iframe|img|object|embed|base)\b|\b(src|href)=|@import|url\(", html)
    assert "Leon Sorokin" in html, "uPlot's licence comes along"
    policy = headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy
    assert len(body) < 120_000


def look(url: str, see: Callable[[Tab], Awaitable[None]], width: int, height: int, *, is_dark: bool = False) -> None:
    async def run() -> None:
        async with browser() as tab:
            await tab.open(f"{url}/dashboard", width, height, is_dark=is_dark)
            await tab.wait_for("document.documentElement.dataset.drawn === 'yes'")
            await see(tab)
            assert not tab.errors, "no script failed, and nothing was refused by the content policy"

    asyncio.run(run())


needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="a look with a browser, where there is one")


@needs_browser
@pytest.mark.parametrize(("width", "height", "is_dark"), [(1440, 900, False), (390, 844, True)])
def test_a_browser_draws_it(
    served: tuple[Observed, list[ExchangeRecord]], width: int, height: int, is_dark: bool
) -> None:
    server, _ = served

    async def see(tab: Tab) -> None:
        assert await tab.value("document.querySelectorAll('canvas').length") == 4
        inked = """[...document.querySelectorAll('canvas')].map((canvas) => {
            const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
            return pixels.some((value, i) => i % 4 === 3 && value);
        })"""
        assert await tab.value(inked) == [True] * 4
        assert await tab.value("document.documentElement.scrollWidth") <= width, "nothing sticks out at the side"
        rows = await tab.value("[...document.querySelectorAll('#backends tbody tr')].map((row) => row.innerText)")
        assert len(rows) == 4
        assert "ejected" in rows[2]
        assert "97 %" in rows[1]
        slow = await tab.value("document.getElementById('slow').innerText")
        assert "in the gateway's queue behind" in slow
        back = await tab.value("getComputedStyle(document.body).backgroundColor")
        assert (back == "rgb(255, 255, 255)") is not is_dark
        assert "live" in await tab.value("document.getElementById('state').innerText")

    look(server.url, see, width, height, is_dark=is_dark)


@needs_browser
def test_it_goes_on_and_says_when_nobody_answers() -> None:
    records = list(traffic(60.0))
    with observed() as server:

        async def see(tab: Tab) -> None:
            assert "No request has ended yet" in await tab.value("document.getElementById('tenants').innerText")
            for record in records:
                server.record(record)
            await tab.wait_for("document.getElementById('tenants').innerText.includes('search')")
            ended_s = time.monotonic()
            times = {"arrived_s": ended_s - 12.0, "first_byte_s": ended_s - 11.9, "ended_s": ended_s}
            server.record(_changed(records[-1], outcome=Outcome.FAILED, status=200, **times))
            await tab.wait_for("document.getElementById('slow').innerText.includes('failed after 12 s')")
            server.metrics.queue(7, 12345)
            await tab.wait_for("document.getElementById('figures').innerText.includes('12,345')")
            server.shows_all = False
            await tab.wait_for("document.getElementById('state').innerText.includes('403')")
            tab.errors.clear()  # the browser's own note of the 403
            server.shows_all = True
            await tab.wait_for("document.getElementById('state').className === 'live'")
            tab.errors.clear()

        look(server.url, see, 1440, 900)


@needs_browser
def test_what_has_only_begun_does_not_look_like_a_fall() -> None:
    """Four requests a second, evenly: at no moment may the page say anything else."""
    template = next(traffic(30.0))
    is_over = threading.Event()

    def go_on(server: Observed) -> None:
        next_s = time.monotonic() - 120.0
        while not is_over.wait(0.02):
            while next_s <= time.monotonic():
                times = {"arrived_s": next_s - 0.2, "first_byte_s": next_s - 0.1, "ended_s": next_s}
                server.record(_changed(template, **times, num_output_tokens=5, tenant="even"))
                next_s += 0.25

    async def see(tab: Tab) -> None:
        await tab.wait_for("document.querySelector('#tenants').innerText.includes('even')")
        box = await tab.value("""(({right, top}) => [right - 23, top + 60])(
            document.querySelector("#goodput canvas").getBoundingClientRect())""")
        seen = set()
        while len(seen) < 4:  # the page asks every two seconds, an interval is five
            await asyncio.sleep(0.1)
            await tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
            last = await tab.value("[...document.querySelectorAll('#goodput .u-value')].map((v) => v.innerText)")
            rate = await tab.value("document.querySelector('#figures dd').innerText")
            assert float(last[1]) == pytest.approx(4, rel=0.05), last
            assert float(rate.split()[0]) == pytest.approx(4, rel=0.05), rate
            seen.add(await tab.value("document.getElementById('state').innerText"))

    with observed() as server:
        thread = threading.Thread(target=go_on, args=(server,))
        thread.start()
        try:
            look(server.url, see, 1440, 1400)
        finally:
            is_over.set()
            thread.join()


@needs_browser
def test_names_are_text() -> None:
    with observed() as server:
        for record in traffic(30.0):
            server.record(_changed(record, tenant=HOSTILE, model=HOSTILE))

        async def see(tab: Tab) -> None:
            assert "onerror" in await tab.value("document.getElementById('tenants').innerText")
            assert await tab.value("document.querySelectorAll('img').length") == 0
            assert await tab.value("document.title") == "Expediter"

        look(server.url, see, 1440, 900)


def _changed(record: ExchangeRecord, **fields: object) -> ExchangeRecord:
    return ExchangeRecord(**{**{name: getattr(record, name) for name in record.__struct_fields__}, **fields})
