"""Numbers of configurations: what is in range, and how what is not is told."""

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expediter.core.errors import ConfigurationError
from expediter.core.ranges import require_above_zero, require_at_least, require_not_negative, require_share

CHECKS = {
    "at least 3": (lambda config: require_at_least(3, config, "fine", "it"), lambda value: value >= 3),
    "above 0": (lambda config: require_above_zero(config, "fine", "it"), lambda value: value > 0),
    "not be negative": (lambda config: require_not_negative(config, "fine", "it"), lambda value: value >= 0),
    "between 0 and 1": (lambda config: require_share(config, "fine", "it"), lambda value: 0 <= value <= 1),
}


@pytest.mark.parametrize("words", CHECKS)
@given(value=st.none() | st.integers(-5, 5) | st.floats(-5, 5) | st.sampled_from([math.inf, -math.inf, math.nan]))
def test_what_is_out_of_range_is_named(words: str, value: float | None) -> None:
    check, is_in_range = CHECKS[words]
    config = SimpleNamespace(fine=None, it=value)
    if value is None or (math.isfinite(value) and is_in_range(value)):
        check(config)
    else:
        with pytest.raises(ConfigurationError, match=f"^it must .*{words}.*{value}"):
            check(config)
