"""Schedulers that are asked what held a request."""

import numpy as np

from expediter.core.ports import ExecutorLimits
from expediter.core.request import Request
from expediter.scheduling.build import CacheConfig, PolicyConfig, build_scheduler
from expediter.scheduling.config import SchedulerConfig
from expediter.testing.scheduler_driver import SchedulerDriver


def build(num_seqs=4, budget=16, num_blocks=64, *, ordering="fcfs", policy=None, **limits):
    config = SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=budget, max_model_len=64, **limits)
    return SchedulerDriver.build(config, num_blocks=num_blocks, block_size=4, ordering=ordering, policy=policy)


LIMITS = ExecutorLimits(num_blocks=64, block_size=4, max_model_len=64, vocab_size=50, max_num_seqs=4)


def make_scheduler(**policy):
    """Return a scheduler without a driver, for parts whose plans the driver does not allow."""
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)
    return build_scheduler(config=config, cache=CacheConfig(num_blocks=64, block_size=4), policy=PolicyConfig(**policy))


def request(name, length=3, **fields):
    return Request(request_id=name, prompt=np.full(length, 7, np.int32), max_tokens=4, **fields)


def spans_of(driver, request_id):
    return driver.scheduler.explain(request_id, driver.now_s)


def reasons(driver, request_id):
    return [span.reason for span in spans_of(driver, request_id)]


def last(driver, request_id):
    return spans_of(driver, request_id)[-1]
