"""Backends are found out about, read and probed over real HTTP; and nothing of it is needed for requests to go on."""

import asyncio
from contextlib import asynccontextmanager, suppress

import pytest
from aiohttp import web
from test_backends import prompt

from expediter.control.routing.base import Placement
from expediter.gateway.backends.backend import Kind
from expediter.gateway.backends.config import BackendConfig
from expediter.gateway.backends.dispatcher import Chosen, NobodyUp
from expediter.gateway.backends.metrics_text import read_load
from expediter.gateway.backends.registry import Backends
from expediter.gateway.backends.watcher import WatchConfig, Watcher
from expediter.runtime.clock import MonotonicClock
from expediter.telemetry.exchanges import Outcome

FAST = WatchConfig(tick_s=0.02, scrape_s=0.05, stale_s=0.4, discover_s=0.1, retry_s=0.1, silent_s=0.3)
VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 4.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:prompt_tokens_total{engine="0",model_name="m"} 100.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 100.0
vllm:generation_tokens_total{engine="0",model_name="m"} 20.0
vllm:generation_tokens_total{engine="1",model_name="m"} 3.0
vllm:cache_config_info{block_size="32",kv_cache_size_tokens="16384",num_gpu_blocks="512",weird="a } b"} 1.0
"""


# As sglang/srt/observability/metrics_collector.py (0.5.23) writes them: two engines, the second in a pipeline of two
# stages, with the metrics of all ranks, and with priorities.
SGLANG_ENGINE = """sglang:num_running_reqs{dp_rank="%(dp)d",model_name="m",priority="",%(rank)s} 3.0
sglang:num_running_reqs{dp_rank="%(dp)d",model_name="m",priority="0",%(rank)s} 1.0
sglang:num_running_reqs{dp_rank="%(dp)d",model_name="m",priority="5",%(rank)s} 2.0
sglang:num_queue_reqs{dp_rank="%(dp)d",model_name="m",priority="",%(rank)s} 4.0
sglang:num_queue_reqs{dp_rank="%(dp)d",model_name="m",priority="5",%(rank)s} 4.0
sglang:token_usage{dp_rank="%(dp)d",model_name="m",priority="",%(rank)s} 0.25
sglang:max_total_num_tokens{dp_rank="%(dp)d",model_name="m",priority="",%(rank)s} 1000.0
"""
SGLANG = "".join(
    SGLANG_ENGINE % {"dp": dp, "rank": rank}
    for dp, rank in (
        (0, 'moe_ep_rank="0",pp_rank="0",tp_rank="0"'),
        (0, 'moe_ep_rank="0",pp_rank="0",tp_rank="1"'),
        (1, 'moe_ep_rank="0",pp_rank="0",tp_rank="2"'),
        (1, 'moe_ep_rank="0",pp_rank="1",tp_rank="2"'),
    )
)


@pytest.mark.parametrize(
    ("page", "load"),
    [
        (SGLANG, (6, 8, 0.25, 2000, None)),
        (VLLM, (5, 4, 0.75, 16384, 123)),
        (
            'sglang:num_running_reqs{x="1"} 7\nsglang:num_queue_reqs 1\nsglang:token_usage 0.5\n',
            (7, 1, 0.5, None, None),
        ),
        (
            "llamacpp:requests_processing 1\nllamacpp:requests_deferred 2\nllamacpp:n_decode_total 9\n",
            (1, 2, None, None, 9),
        ),
        (
            "tgi_batch_current_size 3\ntgi_queue_size 0 1700000000\n"
            'tgi_batch_inference_count{method="prefill"} 2\ntgi_batch_inference_count{method="decode"} 5\n',
            (3, 0, None, None, 7),
        ),
        (
            'vllm:num_requests_running{} 1\nvllm:cache_config_info{block_size="16",num_gpu_blocks="10"} 1',
            (1, 0, None, 160, None),
        ),
    ],
)
def test_metrics_of_each_engine_are_read(page, load):
    assert read_load(page) == load


@pytest.mark.parametrize(
    "page",
    ["", "\0\xff", "vllm:num_requests_running", "vllm:num_requests_running{ x", "vllm:num_requests_running NaN", "x 1"],
)
def test_pages_that_say_nothing_are_no_load(page):
    assert read_load(page) is None


class Engine:
    """A backend's side that is not the path of requests; what it answers can be changed."""

    def __init__(self, models=("m",), owner="vllm", metrics=VLLM, extra=None):
        self.models, self.owner, self.metrics, self.extra = models, owner, metrics, extra or {}
        self.status, self.port, self.asked = 200, 0, []
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def answer(self, request):
        self.asked.append(request.path)
        self.headers = dict(request.headers)
        await self.goes_on.wait()
        if request.path == "/v1/models":
            rows = [{"id": each, "owned_by": self.owner, "max_model_len": 4096} for each in self.models]
            return web.json_response({"object": "list", "data": rows}, status=self.status)
        if request.path == "/metrics" and self.metrics is not None:
            return web.Response(text=self.metrics, status=self.status)
        if request.path in self.extra:
            return web.json_response(self.extra[request.path], status=self.status)
        return web.Response(status=self.status if request.path == "/health" else 404)

    async def start(self):
        app = web.Application()
        app.router.add_get("/{path:.*}", self.answer)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self.runner.addresses[0][1]

    async def stop(self):
        self.goes_on.set()
        await self.runner.cleanup()


@asynccontextmanager
async def watched(*engines, config=FAST, **fields):
    clock = MonotonicClock()
    backends = Backends(clock=clock, environment={"KEY": "secret"})
    for number, engine in enumerate(engines):
        await engine.start()
        backends.add(BackendConfig(url=f"http://127.0.0.1:{engine.port}", name=f"b{number}", **fields))
    watcher = Watcher(backends, clock, config)
    try:
        await watcher.start()
        yield backends
    finally:
        await watcher.stop()
        for engine in engines:
            with suppress(Exception):
                await engine.stop()


def placement(backend):
    return Placement(replica_id=backend.replica_id, because="a test")


async def until(condition, timeout_s=20.0):
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for belongs to the code under test, which has no event
            await asyncio.sleep(0.01)


def test_a_vllm_server_is_found_out_about():
    async def run():
        async with watched(Engine(("m", "lora")), api_key_env="KEY") as backends:
            assert backends.models == ["m", "lora"]
            (backend,) = backends
            assert (backend.kind, backend.max_model_len) == (Kind.VLLM, 4096)
            await until(lambda: backend.reported is not None and backend.reported.num_others == 9)
            status = backends.status()[0]
            assert (status.num_running, status.num_waiting, status.kv_use) == (5, 4, 0.75)
            assert backend.profile.max_kv_tokens == 16384
            assert backend.snapshot().num_requests == 9

    asyncio.run(run())


def test_keys_are_sent_to_backends():
    async def run():
        engine = Engine()
        async with watched(engine, api_key_env="KEY"):
            assert engine.headers["Authorization"] == "Bearer secret"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("owner", "extra", "kind", "limits"),
    [
        (
            "sglang",
            {
                "/server_info": {
                    "max_running_requests": None,
                    "max_total_num_tokens": 9000,
                    "internal_states": [{"effective_max_running_requests_per_dp": 32}] * 2,
                }
            },
            Kind.SGLANG,
            (64, 18000),
        ),
        ("sglang", {"/get_server_info": {"max_running_requests": 8}}, Kind.SGLANG, (8, None)),
        (
            "llamacpp",
            {"/props": {"total_slots": 4, "default_generation_settings": {"n_ctx": 1024}}},
            Kind.LLAMA_CPP,
            (4, 4096),
        ),
        ("somebody", {}, Kind.OTHER, (None, None)),
    ],
)
def test_limits_are_asked_for(owner, extra, kind, limits):
    async def run():
        async with watched(Engine(owner=owner, extra=extra, metrics=None)) as backends:
            (backend,) = backends
            assert (backend.kind, backend.max_requests, backend.profile.max_kv_tokens) == (kind, *limits)

    asyncio.run(run())


def test_metrics_that_are_stale_are_ignored_and_requests_go_on():
    async def run():
        engine = Engine()
        async with watched(engine) as backends:
            (backend,) = backends
            await until(lambda: backend.reported is not None)
            engine.metrics = None
            await until(lambda: backend.reported is None)
            assert isinstance(backends.dispatcher.choose(prompt(), "m", 0.0), Chosen)
            assert backend.snapshot().num_requests == 0

    asyncio.run(run())


def test_metrics_that_count_work_are_a_sign_of_life():
    async def run():
        engine = Engine()
        async with watched(engine) as backends:
            (backend,) = backends
            await until(lambda: backend.reported is not None)
            before_s = backend.heard_s()
            engine.metrics = VLLM.replace(" 20.0", " 21.0")
            await until(lambda: backend.heard_s() > before_s)
            worked_s, reported = backend.heard_s(), backend.reported
            await until(lambda: backend.reported is not reported)
            assert backend.heard_s() == worked_s, "another page with the same count is none"

    asyncio.run(run())


def test_models_come_and_go():
    async def run():
        engine = Engine(("m",))
        async with watched(engine) as backends:
            engine.models = ("m", "n")
            await until(lambda: backends.knows("n"))
            engine.models = ("n",)
            await until(lambda: not backends.knows("m"))

    asyncio.run(run())


def test_one_that_is_not_there_at_first_is_used_when_it_comes(caplog):
    async def run():
        engine = Engine()
        await engine.start()
        await engine.stop()
        backends = Backends(clock=MonotonicClock())
        backends.add(BackendConfig(url=f"http://127.0.0.1:{engine.port}"))
        watcher = Watcher(backends, MonotonicClock(), FAST)
        await watcher.start()
        try:
            assert isinstance(backends.dispatcher.choose(prompt(), "m", 0.0), NobodyUp)
            assert caplog.messages[-1].endswith("nobody listens there yet")
            await engine.start()
            await until(lambda: backends.knows("m"))
        finally:
            await watcher.stop()
            await engine.stop()

    asyncio.run(run())


def test_one_that_dies_is_ejected_by_a_probe_and_is_back_when_it_is():
    async def run():
        engine = Engine()
        async with watched(engine, Engine(), models=("m",)) as backends:
            backend, other = backends
            await engine.stop()
            dispatch = backends.dispatcher.dispatched(
                Chosen(backend, placement(backend), "m", None), prompt(), 0.0, is_stream=True
            )
            await until(lambda: backends.status()[0].state == "ejected")
            assert backends.dispatcher.choose(prompt(), "m", 0.0).backend is other
            dispatch.ended(Outcome.CLIENT_GONE, 1.0)
            await engine.start()
            await until(lambda: backends.status()[0].state == "up", timeout_s=6.0)

    asyncio.run(run())


def test_one_that_hangs_is_found_out_by_its_silence():
    async def run():
        engine, ejected = Engine(), []
        async with watched(engine, Engine(), models=("m",)) as backends:
            backend, _ = backends
            backends.hooks.on_ejected = ejected.append
            engine.goes_on.clear()
            now_s = MonotonicClock().now()
            dispatch = backends.dispatcher.dispatched(
                Chosen(backend, placement(backend), "m", None), prompt(), now_s, is_stream=True
            )
            await until(lambda: ejected == [backend])
            dispatch.ended(Outcome.CLIENT_GONE, 1.0)

    asyncio.run(run())


def test_one_that_is_slow_but_answers_probes_stays_in_use():
    async def run():
        engine = Engine()
        async with watched(engine, models=("m",)) as backends:
            (backend,) = backends
            now_s = MonotonicClock().now()
            chosen = backends.dispatcher.choose(prompt(), "m", now_s)
            dispatch = backends.dispatcher.dispatched(chosen, prompt(), now_s, is_stream=True)
            engine.asked.clear()
            await until(lambda: engine.asked.count("/health") >= 2)
            await until(lambda: backends.status()[0].state == "up")
            assert backend.outcomes == {}
            dispatch.ended(Outcome.OK, 1.0)

    asyncio.run(run())
