"""Rows as they are read: order, defects, memory; and that streaming gives what reading into memory gives."""

import json
import tracemalloc
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_builders import DATA, NO_DATA, write_jsonl

from expediter.sim.trace import SeenPrefixes, TraceError, trace_summary
from expediter.sim.trace_description import describe
from expediter.sim.trace_readers import read_trace, stream_trace
from expediter.sim.trace_rows import Defects, TraceRow, in_order
from expediter.sim.trace_slices import TraceSlice
from expediter.sim.trace_writer import write_rows

OWN = {"arrival_s": 0.5, "input_tokens": 20, "output_tokens": 3}
MOONCAKE = {"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}


def stream(path, **settings):
    return list(stream_trace(Defects(path), **settings))


def same(trace, rows):
    assert trace.arrival_s.tolist() == [row.arrival_s for row in rows]
    assert trace.input_tokens.tolist() == [row.input_tokens for row in rows]
    assert trace.output_tokens.tolist() == [row.output_tokens for row in rows]
    assert np.diff(trace.prefix_offsets).tolist() == [len(row.prefix_ids) for row in rows]


@pytest.mark.skipif(not DATA.exists(), reason=NO_DATA)
@pytest.mark.parametrize(
    "name", ["azure2023_conv.parquet", "mooncake_fast25_synthetic_trace.jsonl.gz", "sharegpt300.jsonl.gz"]
)
def test_streaming_gives_what_reading_gives(name):
    same(read_trace(DATA / name, seed=3), stream(DATA / name, seed=3))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=40), st.integers(0, 3))
def test_coarse_ticks_are_spread_the_same_way(tmp_path_factory, rows, seed):
    path = tmp_path_factory.mktemp("ticks") / "m.jsonl"
    write_jsonl(path, [MOONCAKE | {"timestamp": tick * 3000, "output_length": n} for tick, n in rows])
    same(read_trace(path, seed=seed), stream(path, seed=seed))


def test_csv_times_count_from_the_earliest_row_that_is_used(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:03,5,5\n2024-05-10 00:00:00,0,5\n"
        "2024-05-10 00:00:01,6,6\n"
    )
    assert read_trace(path).arrival_s.tolist() == [0.0, 2.0]
    same(read_trace(path), stream(path))


numbered = st.lists(st.floats(0, 10), max_size=30).map(
    lambda times: [TraceRow(t, i + 1, 1) for i, t in enumerate(times)]
)


@given(numbered, st.integers(1, 40))
def test_rows_come_in_order_or_the_line_that_is_too_late_is_named(tmp_path_factory, rows, window):
    expected = sorted(rows, key=lambda row: row.arrival_s)
    got = []
    defects = Defects(tmp_path_factory.getbasetemp() / "t")
    try:
        got.extend(in_order(iter(list(enumerate(rows, 1))), defects, window))
    except TraceError as error:
        line = int(str(error).split(":")[1])
        late = rows[line - 1]
        before = [row.arrival_s for row in rows[: line - 1]]
        assert sum(time > late.arrival_s for time in before) > window
        assert got == expected[: len(got)] or late.arrival_s < got[-1].arrival_s
        return
    assert [row.input_tokens for row in got] == [row.input_tokens for row in expected]


def test_defects_are_left_out_counted_and_named(tmp_path):
    bad = [OWN | {"input_tokens": 0}, OWN | {"arrival_s": -1}, *[OWN | {"tennant": "a"}] * 20]
    path = write_jsonl(tmp_path / "t.jsonl", [OWN, *bad, OWN | {"arrival_s": 9}])
    trace = read_trace(path)
    assert (len(trace), trace.num_defects) == (2, 22)
    assert trace_summary(trace).num_defects == 22
    assert trace.defects[0].startswith(f"{path}:2: ")
    assert "input_tokens" in trace.defects[0]
    assert len(trace.defects) == 11
    assert "22 rows were left out" in trace.defects[-1]
    defects = Defects(path)
    same(trace, list(stream_trace(defects)))
    assert defects.report() == trace.defects
    with pytest.raises(TraceError, match=r"t\.jsonl:2: "):
        list(stream_trace(Defects(path, strict=True)))


def test_a_file_without_a_usable_row_is_an_error_that_says_why(tmp_path):
    path = write_jsonl(tmp_path / "t.jsonl", [OWN | {"input_tokens": 0}])
    with pytest.raises(TraceError, match=r"no requests.*t\.jsonl:1: .*input_tokens"):
        read_trace(path)
    with pytest.raises(TraceError, match="no requests"):
        stream(path)


def test_memory_does_not_grow_with_the_file(tmp_path):
    peaks = []
    for num_rows in (68_000, 110_000):  # both more than the window
        path = tmp_path / f"{num_rows}.jsonl"
        with path.open("w") as file:
            file.writelines(
                f'{{"arrival_s": {i / 10}, "input_tokens": {i % 999 + 1}, "output_tokens": 5}}\n'
                for i in range(num_rows)
            )
        tracemalloc.start()
        assert describe("t", stream_trace(Defects(path))).num_requests == num_rows
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.05 * peaks[0]


requests = st.builds(
    TraceRow,
    arrival_s=st.floats(0, 1000),
    input_tokens=st.integers(33, 500),
    output_tokens=st.integers(1, 99),
    prefix_ids=st.lists(st.integers(0, 9), max_size=2),
    prefix_block_tokens=st.just(16),
    tenant=st.sampled_from(["", "a"]),
    n=st.integers(1, 3),
    ttft_s=st.none() | st.floats(0.1, 9),
)


@given(st.lists(requests, min_size=1, max_size=40), st.sampled_from(["t.jsonl", "t.jsonl.gz"]))
def test_what_is_written_is_read_back(tmp_path_factory, rows, name):
    path = tmp_path_factory.mktemp("written") / name
    rows.sort(key=lambda row: row.arrival_s)
    assert write_rows(path, rows) == len(rows)
    assert stream(path) == rows


@given(st.lists(requests, min_size=1, max_size=60))
def test_a_description_agrees_with_the_trace_in_memory(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("described") / "t.jsonl"
    rows.sort(key=lambda row: row.arrival_s)
    write_rows(path, rows)
    trace, got = trace_summary(read_trace(path)), describe("t", rows)
    assert (got.num_requests, got.span_s, got.prefix_reuse) == (trace.num_requests, trace.span_s, trace.prefix_reuse)
    for kind in ("input_tokens", "output_tokens"):
        lengths = getattr(got, kind)
        for field in fields(lengths):
            if field.name != "p90":
                assert getattr(lengths, field.name) == pytest.approx(getattr(trace, f"{kind}_{field.name}"))
    gaps = np.diff([row.arrival_s for row in rows])
    if len(gaps) > 1 and gaps.sum() > 0:
        assert got.gap_cv == pytest.approx(gaps.std() / gaps.mean(), rel=1e-6, abs=1e-6)
    assert sum(got.tenants.values()) in (0, len(rows))


@pytest.mark.skipif(not DATA.exists(), reason=NO_DATA)
@pytest.mark.parametrize(
    ("name", "peak", "cv"),
    [
        ("azure2023_code.parquet", 10.53, 13.15),
        ("azure2023_conv.parquet", 8.45, 1.09),
        ("mooncake_fast25_synthetic_trace.jsonl.gz", 4.55, 1.01),
        ("sharegpt300.jsonl.gz", None, 0.94),
    ],
)
def test_public_traces(name, peak, cv):
    got = describe(name, stream_trace(Defects(DATA / name)))
    assert got.peak_minute_rps == (None if peak is None else pytest.approx(peak, abs=0.005))
    assert got.gap_cv == pytest.approx(cv, abs=0.005)


def rows_at(*times):
    return [TraceRow(time, 40, 1) for time in times]


def arrivals(rows):
    return [row.arrival_s for row in rows]


def test_slices():
    assert arrivals(TraceSlice(start_s=2, end_s=5).of(rows_at(1, 2, 4, 5, 9))) == [0, 2]
    assert arrivals(TraceSlice(every=2).of(rows_at(1, 2, 4, 5, 9))) == [1, 4, 9]
    assert arrivals(TraceSlice(every=2, first=2).of(rows_at(1, 2, 4, 5, 9))) == [1, 4]
    taken = iter(rows_at(1, 2, 3))
    assert arrivals(TraceSlice(first=1).of(taken)) == [1]
    assert arrivals(taken) == [2, 3]


def test_conversations_are_kept_whole():
    rows = [TraceRow(float(i), 64, 1, [0, 1 + i % 200, 1000 + i], 16) for i in range(1000)]
    kept = list(TraceSlice(conversations=4).of(rows))
    turns = {}
    for row in kept:
        turns[row.prefix_ids[1]] = turns.get(row.prefix_ids[1], 0) + 1
    assert set(turns.values()) == {5}
    assert len(turns) == pytest.approx(50, abs=20)
    without_ids = list(TraceSlice(conversations=4).of(rows_at(*range(400))))
    assert len(without_ids) == pytest.approx(100, abs=35)


def test_a_file_that_could_not_be_finished_is_removed(tmp_path):
    path = write_jsonl(tmp_path / "t.jsonl", [OWN] * 3 + [OWN | {"n": 0}])
    with pytest.raises(TraceError, match=":4:"):
        write_rows(tmp_path / "out.jsonl", stream_trace(Defects(path, strict=True)))
    assert not (tmp_path / "out.jsonl").exists()
    with pytest.raises(TraceError, match="no request is left"):
        write_rows(tmp_path / "out.jsonl", [])
    with pytest.raises(TraceError, match="cannot write"):
        write_rows(tmp_path / "no" / "out.jsonl", [TraceRow(0.0, 1, 1)])


CSV_ROWS = {
    "vllm": (
        "request_id,Arrival_Time,num_prompt_tokens,num_generation_tokens,e2e_latency",
        ["a,1700000010.5,30,4,1.0", 'b,1700000010.0,"20",0,1.0'],
    ),
    "sglang": (
        "id,prompt_tokens,completion_tokens,cached_tokens,request_received_ts",
        ["a,30,4,0,2026-01-01T00:00:00.5", "b,20,0,16,2026-01-01T00:00:00"],
    ),
}


@pytest.mark.parametrize("name", CSV_ROWS)
def test_request_logs_of_other_servers(tmp_path, name):
    head, rows = CSV_ROWS[name]
    path = tmp_path / "log.csv"
    path.write_text("\n".join([head, *rows, "x", *(row.replace("30", "-30") for row in rows[:1])]))
    trace = read_trace(path)
    assert trace.arrival_s.tolist() == [0.0, 0.5]
    assert trace.input_tokens.tolist() == [20, 30]
    assert trace.output_tokens.tolist() == [1, 4]
    assert [line.split(":")[1] for line in trace.defects[:-1]] == ["4", "5"]
    same(trace, stream(path))


@pytest.mark.parametrize("cell", ["nan", "inf", "soon", "2026-01-01", ""])
def test_csv_times_are_of_one_kind(tmp_path, cell):
    path = tmp_path / "log.csv"
    path.write_text(f"arrival_time,num_prompt_tokens,num_generation_tokens\n7,3,4\n{cell},3,4\n")
    with pytest.raises(TraceError, match=r"log\.csv:3: arrival_time"):
        read_trace(path, strict=True)


def test_block_size_is_known_before_a_row_is_handed_on(tmp_path):
    """A prompt of 16 to 31 tokens has one id in either size."""
    rows = [{"timestamp": i, "input_length": n, "output_length": 1} for i, n in enumerate((20, 40))]
    rows[0]["hash_ids"], rows[1]["hash_ids"] = [1], [1, 2]
    path = write_jsonl(tmp_path / "m.jsonl", rows)
    assert [row.prefix_block_tokens for row in stream(path)] == [16, 16]
    assert json.loads(path.read_text().splitlines()[0])["hash_ids"] == [1]


@given(st.lists(st.lists(st.integers(0, 20) | st.integers(2**29, 2**29 + 4), max_size=5), max_size=30))
def test_what_an_unlimited_cache_holds(prompts):
    cache, seen = SeenPrefixes(), set()
    for ids in prompts:
        leading = next((place for place, number in enumerate(ids) if number not in seen), len(ids))
        assert cache.reused_tokens(ids, 16, 70) == min(16 * leading, 70)
        seen.update(ids)
