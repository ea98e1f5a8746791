"""What the tests of orderings are made from."""

import numpy as np

from expediter.core.events import Admitted
from expediter.core.request import Request, RequestState
from expediter.scheduling.config import SchedulerConfig
from expediter.testing.scheduler_driver import SchedulerDriver

STEM = list(range(20))


def build(ordering, *, num_blocks=400, block_size=4, checks_blocks=False, **limits):
    limits = {"max_num_seqs": 1, "max_num_batched_tokens": 64, "max_model_len": 1000, **limits}
    return SchedulerDriver.build(
        SchedulerConfig(**limits),
        num_blocks=num_blocks,
        block_size=block_size,
        ordering=ordering,
        checks_blocks=checks_blocks,
    )


def order_of(driver):
    return "".join(e.request_id for e in driver.events if isinstance(e, Admitted) and not e.resumed)


def made(sequence, prompt=(1, 2, 3), *, tenant="", arrival_s=0.0, salt=""):
    request = Request(
        request_id=f"r{sequence}",
        prompt=np.array(prompt, np.int32),
        max_tokens=100,
        tenant=tenant,
        cache_salt=salt,
        arrival_s=arrival_s,
    )
    return RequestState(request, sequence, request.prompt.tobytes())
