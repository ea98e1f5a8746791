"""Requests, their lifecycle table, and the virtual clock."""

import itertools

import numpy as np
import pytest

from expediter.core.clock import VirtualClock
from expediter.core.errors import CapacityError, ConfigurationError, ExpediterError, InvariantError, RequestError
from expediter.core.request import Request, RequestState, Status


def request(**changes):
    return Request(**{"request_id": "r", "prompt": np.array([1, 2, 3], np.int32), "max_tokens": 4, **changes})


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": np.array([], np.int32)}, "prompt"),
        ({"prompt": np.array([1], np.int64)}, "prompt"),
        ({"prompt": np.array([[1]], np.int32)}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 5}, "min_tokens"),
    ],
)
def test_a_field_out_of_range_is_named(changes, param):
    with pytest.raises(RequestError) as error:
        request(**changes)
    assert error.value.param == param


def test_lengths():
    made = request(min_tokens=4)
    assert made.num_prompt_tokens == 3
    assert made.max_total_tokens == 7


LEGAL = {
    (Status.WAITING, Status.RUNNING),
    (Status.WAITING, Status.FINISHED),
    (Status.RUNNING, Status.PREEMPTED),
    (Status.RUNNING, Status.FINISHED),
    (Status.PREEMPTED, Status.RUNNING),
    (Status.PREEMPTED, Status.FINISHED),
}


@pytest.mark.parametrize(("before", "after"), list(itertools.product(Status, Status)))
def test_the_lifecycle_is_a_table_and_other_moves_raise(before, after):
    made = request()
    state = RequestState(made, 0, made.prompt.tobytes(), status=before)
    assert state.num_known_tokens == 3
    if (before, after) in LEGAL:
        state.move(after)
        assert state.status is after
    else:
        with pytest.raises(InvariantError, match=f"{before.value} -> {after.value} is not a move"):
            state.move(after)
        assert state.status is before


def test_a_virtual_clock_moves_only_forward():
    clock = VirtualClock(2.0)
    clock.advance_to(2.0)
    clock.advance_to(3.5)
    assert clock.now() == 3.5
    with pytest.raises(InvariantError, match="cannot go back"):
        clock.advance_to(3.0)
    assert clock.now() == 3.5


def test_errors_tell_who_has_to_act():
    kinds = (ConfigurationError, RequestError, CapacityError, InvariantError)
    for kind, other in itertools.permutations(kinds, 2):
        assert issubclass(kind, ExpediterError)
        assert not issubclass(kind, other)
