"""Requests with published length distributions, arriving as a Poisson process."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import islice

import numpy as np
import numpy.typing as npt

from expediter.sim.trace import Trace
from expediter.sim.trace_arrivals import arrival_times, constant, gamma_gaps

Ints = npt.NDArray[np.int32]
Lengths = Callable[[np.random.Generator, int], tuple[Ints, Ints]]
"""(generator, number) -> input and output tokens of so many requests."""

_DATA = "expediter.studies.claims"
_PREFIX_BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthsByQuantiles:
    """Two independent lognormal lengths with given quantiles, without the requests that are longer than a limit.

    Args:
        input_log_mean, input_log_sigma, output_log_mean, output_log_sigma: of the logarithms, before the limit applies.
        max_tokens: limit of input and output together.
    """

    input_log_mean: float
    input_log_sigma: float
    output_log_mean: float
    output_log_sigma: float
    max_tokens: int

    def __call__(self, rng: np.random.Generator, num_requests: int) -> tuple[Ints, Ints]:
        """Return input and output tokens, int32, shape [num_requests] each."""
        inputs, outputs = np.empty(0, np.int32), np.empty(0, np.int32)
        while len(inputs) < num_requests:
            own = _lognormal(rng, self.input_log_mean, self.input_log_sigma, num_requests)
            other = _lognormal(rng, self.output_log_mean, self.output_log_sigma, num_requests)
            short = own + other <= self.max_tokens
            inputs, outputs = np.append(inputs, own[short]), np.append(outputs, other[short])
        return inputs[:num_requests], outputs[:num_requests]


def _lognormal(rng: np.random.Generator, mean: float, sigma: float, size: int) -> Ints:
    values = np.rint(np.minimum(rng.lognormal(mean, sigma, size), 2.0**30))
    return np.maximum(values, 1).astype(np.int32)


SHAREGPT4 = LengthsByQuantiles(
    input_log_mean=7.8373,
    input_log_sigma=1.4445,
    output_log_mean=6.0283,
    output_log_sigma=0.5446,
    max_tokens=8192,
)
"""openchat_sharegpt4: input median 1730 and P90 5696, output median 415 and P90 834. Source: Sarathi-Serve, "
"Table 2."""

ARXIV = LengthsByQuantiles(
    input_log_mean=8.9523,
    input_log_sigma=0.6256,
    output_log_mean=5.3375,
    output_log_sigma=0.4515,
    max_tokens=16384,
)
"""arxiv_summarization: input median 7059 and P90 12985, output median 208 and P90 371. Source: Sarathi-Serve, "
"Table 2."""


@dataclass(frozen=True, slots=True)
class SampledLengths:
    """Pairs drawn with replacement from a file that comes with Expediter.

    Args:
        file: csv with a head line and two columns, input and output tokens.
    """

    file: str

    def __call__(self, rng: np.random.Generator, num_requests: int) -> tuple[Ints, Ints]:
        """Return input and output tokens, int32, shape [num_requests] each."""
        pairs = _pairs(self.file)[rng.integers(0, len(_pairs(self.file)), num_requests)]
        return pairs[:, 0], pairs[:, 1]

    def first(self, rng: np.random.Generator, num_requests: int) -> tuple[Ints, Ints]:  # noqa: ARG002 - draws nothing
        """Return the file's first pairs as they stand there."""
        pairs = _pairs(self.file)[:num_requests]
        return pairs[:, 0], pairs[:, 1]


@cache
def _pairs(file: str) -> Ints:
    rows = csv.reader(resources.files(_DATA).joinpath(file).read_text().splitlines())
    return np.array([[int(cell) for cell in row] for row in islice(rows, 1, None)], np.int32)


DISTSERVE_SHAREGPT = SampledLengths("distserve_sharegpt.csv")
"""438 requests of DistServe's ShareGPT sample: input 762 and output 176 tokens on average.

The paper gives 755.5 and 200.3 for the whole data set. Source: LLMServe/DistServe (Apache-2.0, Copyright 2024 DistServe
Authors), simdistserve/benchmarks/alignment/data-ground-truth/opt-13b-sharegpt-workload/distserve-c21d11-1050-10.5.exp,
the first 438 requests, lengths alone.
"""


AZURE_CODE = SampledLengths("azure_code.csv")
AZURE_CONVERSATION = SampledLengths("azure_conv.csv")
"""Lengths of Azure's code and conversation traces of 2023: requests sorted by input, then output; every 8th and every
19th.

Input and output tokens are on average 2046 and 25 (all requests: 2048 and 28), and 1153 and 213 (all: 1155 and 211).
Source: Azure/AzurePublicDataset (CC-BY-4.0, Microsoft), of Splitwise (ISCA 2024).
"""


def poisson_trace(name: str, lengths: Lengths, num_requests: int, *, seed: int = 0) -> Trace:
    """Return requests that arrive once per second on average; `Trace.at_rate` gives any other rate.

    Lengths and arrivals have streams of their own, and a shorter trace is the beginning of a longer one's arrivals.
    """
    of_lengths, of_gaps = (np.random.default_rng(each) for each in np.random.SeedSequence(seed).spawn(2))
    inputs, outputs = lengths(of_lengths, num_requests)
    times = islice(arrival_times(gamma_gaps(of_gaps, 1.0), constant(1.0)), num_requests)
    return Trace(
        name=name,
        arrival_s=np.fromiter(times, np.float64, num_requests),
        input_tokens=inputs,
        output_tokens=outputs,
        prefix_ids=np.empty(0, np.int64),
        prefix_offsets=np.zeros(num_requests + 1, np.int64),
        prefix_block_tokens=_PREFIX_BLOCK_TOKENS,
    )


def at_rps(trace: Trace, rate_rps: float) -> Trace:
    """Return the trace at that many arrivals per second from its first to its last request."""
    span_s = float(trace.arrival_s[-1] - trace.arrival_s[0])
    return trace.at_rate(rate_rps * span_s / (len(trace) - 1))
