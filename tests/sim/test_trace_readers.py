"""Trace files: every known format, every rule, and an error with file and line for the rest."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_builders import DATA, NO_DATA, write_jsonl

from expediter.core.errors import ConfigurationError
from expediter.core.request import CacheHint
from expediter.sim.trace import TraceError, trace_summary
from expediter.sim.trace_readers import read_trace
from expediter.sim.trace_rows import MAX_LENGTH

OWN = {"arrival_s": 0.5, "input_tokens": 20, "output_tokens": 3}
MOONCAKE = {"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}
CSV_HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens"


def test_own_format(tmp_path):
    rows = [
        OWN,
        {"arrival_s": 1, "input_tokens": 9, "output_tokens": 0, "prefix_ids": [7, 8], "prefix_block_tokens": 4}
        | {"priority": -3, "tenant": "a", "cache_hint": {"pin_s": 30}},
    ]
    trace = read_trace(write_jsonl(tmp_path / "t.jsonl", rows))
    first, second = trace.requests()
    assert (first.request_id, first.arrival_s, first.num_prompt_tokens, first.max_tokens) == ("r0000000", 0.5, 20, 3)
    assert (first.priority, first.tenant, first.cache_hint, first.stop_token_ids) == (0, "", None, ())
    assert (second.arrival_s, second.max_tokens, second.priority, second.tenant) == (1.0, 1, -3, "a")
    assert second.cache_hint == CacheHint(pin_s=30.0)
    assert trace.prefix_ids.tolist() == [7, 8]


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_line_ends_gzip_and_byte_order_mark(tmp_path, line_end, packed, mark):
    text = mark + line_end.join([json.dumps(OWN), "", json.dumps(OWN | {"arrival_s": 2}), ""])
    path = tmp_path / "whatever"
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    assert read_trace(path).arrival_s.tolist() == [0.5, 2.0]


def test_mooncake(tmp_path):
    trace = read_trace(write_jsonl(tmp_path / "m.jsonl", [MOONCAKE]))
    assert trace.arrival_s.tolist() == [27.482]
    assert trace.prefix_block_tokens == 512
    blocks_of_16 = [
        {"timestamp": 1.5, "input_length": 40, "output_length": 2, "hash_ids": [0, 1]},
        {"timestamp": 2, "input_length": 10, "output_length": 2, "hash_ids": []},
    ]
    assert read_trace(write_jsonl(tmp_path / "n.jsonl", blocks_of_16)).prefix_block_tokens == 16


def test_azure_csv(tmp_path):
    path = tmp_path / "azure.csv"
    rows = ["2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:50.9951690,396,109", "2023-11-16 18:15:46.5,1,0"]
    path.write_bytes("\r\n".join([CSV_HEAD, *rows, ""]).encode())
    trace = read_trace(path)
    assert trace.arrival_s == pytest.approx([0, 0.18059, 4.495169])
    assert trace.input_tokens.tolist() == [1, 374, 396]
    assert trace.output_tokens.tolist() == [1, 44, 109]


def test_azure_csv_zone_does_not_depend_on_the_reader(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(
        f"{CSV_HEAD}\n2024-05-10T00:00:00.5+00:00,5,5\n2024-05-10 00:00:01,6,6\n2024-05-10T03:00:00+02:00,7,7\n"
    )
    assert read_trace(path).arrival_s.tolist() == [0.0, 0.5, 3599.5]


def write_parquet(path, arrival_s, input_len, output_len):
    pq.write_table(pa.table({"arrival_s": arrival_s, "input_len": input_len, "output_len": output_len}), path)
    return path


def test_azure_parquet(tmp_path):
    trace = read_trace(write_parquet(tmp_path / "a.parquet", [0.0, 2.5, 1.5], [3, 4, 5], [1, 0, 2]))
    assert trace.arrival_s.tolist() == [0.0, 1.5, 2.5]
    assert trace.input_tokens.tolist() == [3, 5, 4]
    assert trace.output_tokens.tolist() == [1, 2, 1]


@pytest.mark.parametrize(
    ("columns", "row"),
    [
        (([0.0, float("nan")], [3, 4], [1, 1]), 2),
        (([-1.0, 0.0], [3, 4], [1, 1]), 1),
        (([0.0, 1.0], [3, 0], [1, 1]), 2),
        (([0.0, 1.0], [3, None], [1, 1]), 2),
        (([0.0, 1.0], [3.5, 4.0], [1, 1]), 1),
        (([0.0, 1.0], [3, 10**9], [1, 1]), 2),
        (([0.0, 1.0], [3, 4], [-1, 1]), 1),
    ],
)
def test_malformed_parquet_rows_are_named(tmp_path, columns, row):
    with pytest.raises(TraceError, match=rf"a\.parquet: row {row}:"):
        read_trace(write_parquet(tmp_path / "a.parquet", *columns), strict=True)


def test_parquet_without_the_columns(tmp_path):
    pq.write_table(pa.table({"arrival_s": [0.0], "tokens": [3]}), tmp_path / "a.parquet")
    with pytest.raises(TraceError, match="input_len, output_len"):
        read_trace(tmp_path / "a.parquet")
    with pytest.raises(TraceError, match="input_len"):
        read_trace(write_parquet(tmp_path / "b.parquet", [0.0], ["many"], [1]))


@pytest.mark.parametrize(
    "bad",
    [
        {"arrival_s": -1},
        {"arrival_s": "0.5"},
        {"arrival_s": None},
        {"arrival_s": True},
        {"input_tokens": 0},
        {"input_tokens": 1.5},
        {"input_tokens": 10**9},
        {"output_tokens": -1},
        {"output_tokens": MAX_LENGTH + 1},
        {"output_tokens": "7"},
        {"prefix_ids": [-1]},
        {"prefix_ids": [2**63]},
        {"prefix_ids": ["a"]},
        {"prefix_ids": [1, 2, 3], "prefix_block_tokens": 10},
        {"prefix_ids": [1], "prefix_block_tokens": 0},
        {"priority": 2**40},
        {"tenant": 3},
        *({"cache_hint": hint} for hint in ("pin", {}, {"pin_s": 0}, {"pin_s": "9"}, {"pin_s": 9, "drop": True})),
        {"tennant": "a"},
    ],
)
def test_malformed_rows_are_named_by_line(tmp_path, bad):
    path = write_jsonl(tmp_path / "t.jsonl", [OWN, OWN, OWN | bad])
    with pytest.raises(TraceError, match=r"t\.jsonl:3: "):
        read_trace(path, strict=True)


@pytest.mark.parametrize(
    "line", ["{", "[]", "NaN", '{"arrival_s": NaN}', '{"arrival_s": 1e400, "input_tokens": 1}', "{}"]
)
def test_lines_that_are_no_rows(tmp_path, line):
    path = tmp_path / "t.jsonl"
    path.write_text(f"{json.dumps(OWN)}\n\n{line}\n")
    with pytest.raises(TraceError, match=r"t\.jsonl:3: "):
        read_trace(path, strict=True)


@pytest.mark.parametrize(
    "bad", [{"hash_ids": [1]}, {"hash_ids": [1, 2, 3]}, {"timestamp": "now"}, {"input_length": 0}, {"hash_ids": None}]
)
def test_malformed_mooncake_rows(tmp_path, bad):
    path = write_jsonl(tmp_path / "m.jsonl", [MOONCAKE, MOONCAKE | bad])
    with pytest.raises(TraceError, match=r"m\.jsonl:2: "):
        read_trace(path, strict=True)


@pytest.mark.parametrize(
    "row", ["2023-11-16,1", "yesterday,1,1", "2023-11-16,x,1", "2023-11-16,0,1", "2023-11-16,1,-1"]
)
def test_malformed_csv_rows(tmp_path, row):
    path = tmp_path / "t.csv"
    path.write_text(f"{CSV_HEAD}\n2023-11-16,1,1\n{row}\n")
    with pytest.raises(TraceError, match=r"t\.csv:3: "):
        read_trace(path, strict=True)


def test_one_block_size_per_file(tmp_path):
    rows = [OWN | {"prefix_ids": [1], "prefix_block_tokens": n} for n in (16, 16, 8)]
    with pytest.raises(TraceError, match=r"t\.jsonl:3: prefix_block_tokens is 8, but 16 before"):
        read_trace(write_jsonl(tmp_path / "t.jsonl", rows), strict=True)


@pytest.mark.parametrize("content", [b"", b"\n \r\n", b"\xef\xbb\xbf"])
def test_empty_files(tmp_path, content):
    (tmp_path / "t.jsonl").write_bytes(content)
    with pytest.raises(TraceError, match="empty"):
        read_trace(tmp_path / "t.jsonl")


def test_header_without_rows(tmp_path):
    (tmp_path / "t.csv").write_text(CSV_HEAD + "\n")
    with pytest.raises(TraceError, match="no requests"):
        read_trace(tmp_path / "t.csv")


@pytest.mark.parametrize("content", [b"hello", b'{"a": 1}', b"a,b,c\n1,2,3", b"\x00\x01\x02", b"PAR1 but not really"])
def test_unknown_formats_are_answered_with_the_known_ones(tmp_path, content):
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(TraceError, match=r"known trace format; there are: Mooncake|cannot be read"):
        read_trace(tmp_path / "t")


def test_cut_gzip(tmp_path):
    (tmp_path / "t.gz").write_bytes(gzip.compress(json.dumps(OWN).encode() * 100)[:30])
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "t.gz")


def test_a_name_that_is_no_file_is_answered_with_formats_and_neighbours(tmp_path):
    write_jsonl(tmp_path / "there.jsonl", [OWN])
    with pytest.raises(ConfigurationError, match=r"Mooncake jsonl.*Azure csv.*Expediter jsonl.*there\.jsonl"):
        read_trace(tmp_path / "missing.jsonl")
    with pytest.raises(TraceError, match="no trace file"):
        read_trace(tmp_path)
    with pytest.raises(TraceError, match="no trace file"):
        read_trace(tmp_path / "no" / "such" / "folder.jsonl")


def test_rows_out_of_order_are_sorted_and_ties_keep_the_files_order(tmp_path):
    rows = [OWN | {"arrival_s": t, "input_tokens": n, "prefix_ids": [n]} for t, n in ((3, 1), (1, 2), (3, 3), (1, 4))]
    trace = read_trace(write_jsonl(tmp_path / "t.jsonl", rows))
    assert trace.input_tokens.tolist() == [2, 4, 1, 3]
    assert trace.prefix_ids.tolist() == [2, 4, 1, 3]


def test_requests_with_several_sequences(tmp_path):
    rows = [OWN | {"arrival_s": 2, "n": 3}, OWN | {"arrival_s": 1}]
    trace = read_trace(write_jsonl(tmp_path / "t.jsonl", rows))
    one, group = trace.groups()
    assert [request.request_id for request in one] == ["r0000000"]
    assert [request.request_id for request in group] == ["r0000001", "r0000001.1", "r0000001.2"]
    assert group[0].prompt is group[2].prompt
    assert len(list(trace.take(1).requests())) == 1
    with pytest.raises(TraceError, match="n"):
        read_trace(write_jsonl(tmp_path / "none.jsonl", [OWN | {"n": 0}]), strict=True)


def test_ids_that_are_hashes_are_renumbered(tmp_path):
    ids = [[2**62, 5], [2**62, 2**61]]
    rows = [OWN | {"prefix_ids": own, "prefix_block_tokens": 10} for own in ids]
    first, second = read_trace(write_jsonl(tmp_path / "t.jsonl", rows)).requests()
    assert first.prompt[:10].tolist() == second.prompt[:10].tolist()
    assert not np.isin(first.prompt[10:], second.prompt[10:]).any()


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(1, 99), st.integers(0, 99)), min_size=1, max_size=20))
def test_what_is_written_is_read(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("own") / "t.jsonl"
    names = ("arrival_s", "input_tokens", "output_tokens")
    trace = read_trace(write_jsonl(path, [dict(zip(names, row, strict=True)) for row in rows]))
    rows.sort(key=lambda row: row[0])
    assert trace.arrival_s.tolist() == [row[0] for row in rows]
    assert trace.input_tokens.tolist() == [row[1] for row in rows]
    assert trace.output_tokens.tolist() == [max(row[2], 1) for row in rows]


@given(
    st.binary(max_size=80), st.sampled_from([b"", json.dumps(OWN).encode() + b"\n", CSV_HEAD.encode() + b"\n", b"PAR1"])
)
def test_garbage_is_a_trace_error_and_never_anything_else(tmp_path_factory, garbage, head):
    path = tmp_path_factory.mktemp("garbage") / "t.jsonl"
    path.write_bytes(head + garbage)
    try:
        trace = read_trace(path)
    except TraceError:
        return
    assert len(trace) >= 1
    assert np.isfinite(trace.arrival_s).all()


def coarse(num_ticks, per_tick, tick_ms=3000):
    return [
        MOONCAKE | {"timestamp": tick * tick_ms + tick % 2, "input_length": 513 + i}
        for tick in range(num_ticks)
        for i in range(per_tick)
    ]


def test_coarse_ticks_are_spread_in_the_files_order(tmp_path):
    path = write_jsonl(tmp_path / "m.jsonl", coarse(20, 5))
    kept = read_trace(path, spread_ticks=False)
    spread = read_trace(path, seed=3)
    assert len(np.unique(kept.arrival_s)) == 20
    assert len(np.unique(spread.arrival_s)) == 100
    assert (np.diff(spread.arrival_s) >= 0).all()
    assert spread.input_tokens.tolist() == kept.input_tokens.tolist()
    offsets = spread.arrival_s - kept.arrival_s
    assert (offsets >= 0).all()
    assert (offsets < 3.002).all()
    assert offsets.mean() == pytest.approx(1.5, abs=0.5)
    assert read_trace(path, seed=3).arrival_s.tolist() == spread.arrival_s.tolist()
    assert read_trace(path, seed=4).arrival_s.tolist() != spread.arrival_s.tolist()


@pytest.mark.parametrize("rows", [coarse(20, 5, tick_ms=100), coarse(20, 1), coarse(1, 5)])
def test_fine_or_rare_times_are_left_alone(tmp_path, rows):
    path = write_jsonl(tmp_path / "m.jsonl", rows)
    assert read_trace(path).arrival_s.tolist() == read_trace(path, spread_ticks=False).arrival_s.tolist()


@pytest.mark.skipif(not DATA.exists(), reason=NO_DATA)
@pytest.mark.parametrize(
    ("name", "num_requests", "mean_input", "mean_output", "reuse"),
    [
        ("azure2023_conv.parquet", 19_366, 1155, 211, None),
        ("azure2023_code.parquet", 8_819, 2048, 28, None),
        ("mooncake_fast25_conversation_trace.jsonl.gz", 12_031, 12035, 343, 0.374),
        ("mooncake_fast25_synthetic_trace.jsonl.gz", 3_993, 15325, 149, 0.651),
        ("sharegpt300.jsonl.gz", 300, 857, 653, 0.076),
    ],
)
def test_public_traces(name, num_requests, mean_input, mean_output, reuse):
    """An unlimited cache, fed in order of arrival, reuses this share of the prompt tokens."""
    summary = trace_summary(read_trace(DATA / name))
    assert summary.num_requests == num_requests
    assert round(summary.input_tokens_mean) == mean_input
    assert round(summary.output_tokens_mean) == mean_output
    assert summary.prefix_reuse == (None if reuse is None else pytest.approx(reuse, abs=0.0005))
