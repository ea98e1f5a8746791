"""Sessions of traces: as they are named, or as prefixes show them."""

from sim_builders import make_trace, write_jsonl

from expediter.sim.trace_readers import read_trace


def sessions(rows):
    return make_trace([(float(number), *row) for number, row in enumerate(rows)]).with_sessions().sessions


def test_turns_of_a_conversation_are_one_session_and_a_shared_beginning_is_none():
    """Blocks of 4 tokens; 1 is the system prompt of all."""
    rows = [
        (8, 4, [1, 2]),
        (8, 4, [1, 3]),
        (17, 4, [1, 2, 4, 5, 6]),  # the answer is in 4; of 6 one token is there
        (12, 4, [1, 3, 7]),
        (20, 4, [1, 2, 4, 5, 8]),  # goes on with what 6 was part of
        (8, 4, [1, 9]),
    ]
    assert sessions(rows) == ("s0000000", "s0000001", "s0000000", "s0000001", "s0000000", "s0000005")


def test_a_session_goes_on_once_from_each_turn():
    rows = [(4, 1, [1]), (8, 1, [1, 2]), (8, 1, [1, 3]), (12, 1, [1, 2, 4]), (3, 1, [])]
    assert sessions(rows) == ("s0000000", "s0000000", "s0000002", "s0000000", "s0000004")


def test_named_sessions_are_kept(tmp_path):
    rows = [
        {"arrival_s": 1.0, "input_tokens": 4, "output_tokens": 1, "prefix_ids": [1], "prefix_block_tokens": 4},
        {"arrival_s": 0.0, "input_tokens": 4, "output_tokens": 1, "session": "a"},
    ]
    trace = read_trace(write_jsonl(tmp_path / "t.jsonl", rows))
    assert trace.with_sessions() is trace
    assert [request.session for request in trace.requests()] == ["a", ""]
    assert trace.take(1).sessions == ("a",)


def test_without_prefixes_there_are_no_sessions():
    trace = make_trace([(0.0, 4, 1), (1.0, 4, 1)])
    assert trace.with_sessions() is trace
