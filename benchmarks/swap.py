"""How long preemption takes: moving a sequence's KV to the host and back, against computing it again.

    python -m benchmarks.swap [--model FOLDER] [--tokens 512 2048] [--device cpu]

The chunk size of the recomputation is the default token budget of a step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from expediter.core.plan import BlockMoves
from expediter.engine.default_model import resolve_model
from expediter.engine.executor import TorchExecutor
from expediter.engine.host_pool import HostPool
from expediter.engine.kv_pool import KVPool, KVShape
from expediter.engine.model import load_model
from expediter.testing.plan_driver import PlanDriver

_BLOCK_SIZE = 16
_CHUNK = 2048


def main() -> None:
    """Measure and print the median of several runs, in milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="Hugging Face folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    model = load_model(resolve_model(args.model), device=args.device)
    shape = KVShape.of_config(model.config, model.dtype)
    for num_tokens in args.tokens:
        num_blocks = -(-num_tokens // _BLOCK_SIZE)
        pool = KVPool(shape, num_blocks=2 * num_blocks, block_size=_BLOCK_SIZE, device=model.device)
        host = HostPool(pool, num_blocks)
        ids = np.random.default_rng(0).permutation(2 * num_blocks)[:num_blocks].astype(np.int32)
        here, there = ids, np.arange(num_blocks, dtype=np.int32)
        out_ms = _median_ms(lambda: host.swap_out(BlockMoves(here, there)), args.runs)  # noqa: B023 - called at once
        in_ms = _median_ms(lambda: host.swap_in(BlockMoves(there, here)), args.runs)  # noqa: B023 - called at once
        executor = TorchExecutor(model, num_blocks=num_blocks + 1, block_size=_BLOCK_SIZE, max_num_seqs=1)
        prompt = np.random.default_rng(1).integers(0, 1000, num_tokens).tolist()

        def recompute() -> None:
            driver = PlanDriver(executor)  # noqa: B023 - called at once
            driver.generate(driver.admit(prompt), 1, chunk=_CHUNK)  # noqa: B023 - called at once

        recompute_ms = _median_ms(recompute, args.runs)
        size = num_blocks * shape.bytes_per_block(_BLOCK_SIZE)
        print(
            f"{num_tokens} tokens, {size / 1e6:.1f} MB: out {out_ms:.2f} ms, in {in_ms:.2f} ms "
            f"({2 * size / (out_ms + in_ms) / 1e6:.1f} GB/s), recompute {recompute_ms:.1f} ms: "
            f"{recompute_ms / (out_ms + in_ms):.1f} x as long"
        )


def _median_ms(run: Callable[[], None], runs: int) -> float:
    times = []
    for _ in range(runs + 1):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        started_s = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - started_s))
    return statistics.median(times[1:])  # the first touches the memory


if __name__ == "__main__":
    main()
