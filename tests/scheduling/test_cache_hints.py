"""A client's hint takes effect when its request ends, however it ends, and never before."""

import numpy as np
import pytest

from expediter.core.errors import ConfigurationError
from expediter.core.request import CacheHint, Request
from expediter.scheduling.build import EVICTIONS, CacheConfig, PolicyConfig, build_scheduler
from expediter.scheduling.config import SchedulerConfig
from expediter.testing.scheduler_driver import SchedulerDriver

DROP = CacheHint(drop=True)


def make(num_blocks=8, ordering="fcfs", **cache) -> SchedulerDriver:
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=16)
    scheduler = build_scheduler(
        config=config,
        cache=CacheConfig(num_blocks=num_blocks, block_size=2, **cache),
        policy=PolicyConfig(ordering=ordering),
    )
    return SchedulerDriver(scheduler)


def add(driver, request_id, prompt, max_tokens, hint=None, priority=0):
    request = Request(
        request_id=request_id,
        prompt=np.array(prompt, np.int32),
        max_tokens=max_tokens,
        priority=priority,
        cache_hint=hint,
        arrival_s=driver.now_s,
    )
    assert driver.add(request)


def cached(driver, prompt) -> int:
    return driver.scheduler.kv.match(np.array([*prompt, 0, 0], np.int32).tobytes(), "").num_blocks


@pytest.mark.parametrize("max_tokens", [1, 4])
def test_a_dropped_request_leaves_nothing(max_tokens):
    driver = make()
    add(driver, "a", [1, 2, 3, 4], max_tokens, DROP)
    driver.run_to_end()
    assert driver.scheduler.kv.num_free_blocks == 8


def test_an_aborted_request_is_dropped_too():
    driver = make()
    add(driver, "a", [1, 2, 3, 4], 9, DROP)
    driver.step()
    driver.step()
    driver.abort("a")
    assert driver.scheduler.kv.num_free_blocks == 8


def test_a_preempted_request_keeps_what_it_computed():
    driver = make(num_blocks=6, ordering="priority")
    add(driver, "low", [1, 2, 3, 4], 8, DROP, priority=1)
    driver.step()
    add(driver, "high", [9, 8, 7, 6, 5, 4, 3, 2, 1], 1)
    driver.step()
    assert driver.requests["low"].num_preemptions == 1
    assert cached(driver, [1, 2]) == 1
    driver.run_to_end()
    assert cached(driver, [1, 2]) == 0


def test_a_pinned_prompt_outlives_a_flood_until_its_time_is_over():
    driver = make(max_pinned_share=0.25)
    add(driver, "a", [1, 2, 3, 4], 1, CacheHint(pin_s=60.0))
    driver.run_to_end()

    def flood(first):
        for number in range(first, first + 6):
            add(driver, f"flood{number}", [number] * 5, 4)
            driver.run_to_end()

    flood(10)
    assert cached(driver, [1, 2, 3, 4]) == 2
    driver.now_s = 100.0
    flood(20)
    assert cached(driver, [1, 2, 3, 4]) == 0


def test_a_request_that_needs_the_whole_pool_gets_it_from_a_pin():
    driver = make(max_pinned_share=1.0)
    add(driver, "a", [1, 2, 3, 4], 1, CacheHint(pin_s=3000.0))
    driver.run_to_end()
    add(driver, "b", [5] * 12, 4)
    driver.run_to_end()
    assert driver.requests["b"].finished is not None


def test_policies_by_name():
    kinds = {type(build_with(name).kv.tree.policy).__name__ for name in EVICTIONS}
    assert kinds == {"Lru", "Lfu", "SegmentedLru", "HintedLru"}
    with pytest.raises(ConfigurationError, match="no eviction policy 'fifo'; there are: lru, lfu"):
        PolicyConfig(eviction="fifo")


def build_with(name):
    return build_scheduler(
        config=SchedulerConfig(), cache=CacheConfig(num_blocks=8), policy=PolicyConfig(eviction=name)
    )
