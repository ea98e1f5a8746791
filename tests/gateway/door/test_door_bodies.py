"""What the door reads of a body, and what it writes into one."""

from __future__ import annotations

import json

import numpy as np
import pytest

from expediter.gateway.door.bodies import decode_door_body, with_field
from expediter.gateway.errors import ApiError


@pytest.mark.parametrize("raw", [b"{}", b" { } ", b'{"a": 1e400}', b'{"model": null, "n": 1}\n'])
def test_a_model_is_added_and_nothing_else_changed(raw: bytes) -> None:
    told = with_field(raw, "model", 'm"x')
    assert json.loads(told) == {**json.loads(raw), "model": 'm"x'}


def test_prompts_with_a_common_beginning_have_arrays_with_one() -> None:
    def tokens(*texts: str) -> np.ndarray:
        messages = [{"role": "user", "content": text} for text in texts]
        return decode_door_body(json.dumps({"model": "m", "messages": messages}).encode()).prompt_tokens()

    one, two = tokens("x" * 1000, "first"), tokens("x" * 1000, "second question")
    length = min(len(one), len(two))
    assert np.flatnonzero(one[:length] != two[:length])[0] > 240
    assert len(one) == pytest.approx(1100 / 4, rel=0.1)


def test_every_body_has_a_prompt_of_at_least_one_token() -> None:
    for raw in (b"{}", b'{"prompt": ""}', b'{"input": [1]}', b'{"messages": []}'):
        assert len(decode_door_body(raw).prompt_tokens()) == 1


@pytest.mark.parametrize(
    ("raw", "param"),
    [(b"", None), (b"[]", None), (b'{"stream": 1}', "stream"), (b'{"max_tokens": NaN}', "max_tokens"), (b"\xff", None)],
)
def test_what_the_door_cannot_read_is_refused_by_name(raw: bytes, param: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        decode_door_body(raw)
    assert (caught.value.status, caught.value.param) == (400, param)
