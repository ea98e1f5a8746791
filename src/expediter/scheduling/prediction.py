"""How long outputs get, from what came before.

Nobody knows a request's output length when it arrives. Similar requests are the best guess: those of the same tenant
whose prompts had about the same length. A guess is a distribution, conditioned on the tokens that exist already: a
request that has outlived the median is expected to be one of the long ones.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate

from expediter.core.request import Request

_RATIO = 1.25
_NUM_BUCKETS = 64
_HALF_LIFE = 2000
_ENOUGH = 20
_MANY_BANDS = 4096


class _Histogram:
    """Counts of output lengths in buckets that grow by a quarter each; old counts fade."""

    __slots__ = ("_sums", "counts", "total", "weight")

    def __init__(self) -> None:
        self.counts = [0.0] * _NUM_BUCKETS
        self.total = 0.0
        self.weight = 1.0
        self._sums: list[float] | None = None  # of `counts` up to each bucket, until the next observation

    def add(self, length: int) -> None:
        self.weight *= 2 ** (1 / _HALF_LIFE)
        self.counts[_bucket(length)] += self.weight
        self.total += self.weight
        self._sums = None
        if self.weight > 1e9:
            self.counts = [count / self.weight for count in self.counts]
            self.total /= self.weight
            self.weight = 1.0

    @property
    def num_recent(self) -> float:
        """How many observations there are, faded ones counted in part."""
        return self.total / self.weight

    def quantile(self, q: float, longer_than: int) -> int | None:
        """Return a length that the share `q` of those longer than `longer_than` does not exceed, if there are any."""
        if self._sums is None:
            self._sums = list(accumulate(self.counts, initial=0.0))
        first, sums = _bucket(longer_than + 1), self._sums
        longer = sums[-1] - sums[first]
        if longer <= 1e-9 * sums[-1]:  # nothing but rounding
            return None
        bucket = bisect_left(sums, sums[first] + q * longer, first + 1) - 1
        return max(longer_than + 1, _middle(min(bucket, _NUM_BUCKETS - 1)))


def _bucket(length: int) -> int:
    return min(_NUM_BUCKETS - 1, int(math.log(max(length, 1), _RATIO)))


def _middle(bucket: int) -> int:
    return max(1, round(math.pow(_RATIO, bucket + 0.5)))


class OutputLengths:
    """Predicts output lengths per tenant and band of prompt lengths (powers of two)."""

    def __init__(self) -> None:
        self._by_band: dict[tuple[str, int], _Histogram] = {}
        self._overall = _Histogram()

    def observe(self, request: Request, num_output_tokens: int) -> None:
        """Learn from a request that has come to its own end."""
        # The band that was seen last stands last, so that the first can go when there are too many (tenants are free
        # to be many).
        histogram = self._by_band.pop(_band(request), None) or _Histogram()
        histogram.add(num_output_tokens)
        self._by_band[_band(request)] = histogram
        if len(self._by_band) > _MANY_BANDS:
            del self._by_band[next(iter(self._by_band))]
        self._overall.add(num_output_tokens)

    def predict(self, request: Request, num_output_tokens: int = 0, q: float = 0.5) -> int:
        """Return the predicted total number of output tokens, between `num_output_tokens` + 1 and `max_tokens`.

        Args:
            num_output_tokens: tokens that exist already.
            q: quantile; 0.5 for what to expect, 0.9 for what to be prepared for.
        """
        longest = request.max_tokens
        for histogram in (self._by_band.get(_band(request)), self._overall):
            if histogram is not None and histogram.num_recent >= _ENOUGH:
                length = histogram.quantile(q, num_output_tokens)
                if length is not None:
                    return min(length, longest)
        return longest


def _band(request: Request) -> tuple[str, int]:
    return request.tenant, request.num_prompt_tokens.bit_length()
