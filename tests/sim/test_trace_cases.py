"""Odd traces: every kind of defect in every format, and sessions that outgrow the replica."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_builders import ConstantTime

from expediter.assembly.presets import PRESET_NAMES
from expediter.assembly.simulation import SimulationConfig, build_simulation
from expediter.assembly.trace_generation import GenerationConfig, generate
from expediter.sim.trace import TraceError
from expediter.sim.trace_generators import Sessions
from expediter.sim.trace_readers import read_trace, stream_trace
from expediter.sim.trace_rows import Defects
from expediter.sim.trace_writer import write_rows

JSONL = {
    "mooncake": ({"hash_ids": []}, ("timestamp", "input_length", "output_length"), 1000),
    "own": ({}, ("arrival_s", "input_tokens", "output_tokens"), 1),
}
CSV = {
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "vllm": ("arrival_time", "num_prompt_tokens", "num_generation_tokens"),
    "sglang": ("request_received_ts", "prompt_tokens", "completion_tokens"),
}
FORMATS = [*JSONL, *CSV, "parquet"]
ABSENT = object()
FINE = [(5, 40, 3), (2, 41, 3), (2, 42, 3), (9, 43, 3)]
"""Out of order, and two at one time."""


def lines_of(kind, rows):
    """Return a text file's lines; jsonl has no header, which the place of a row in its file accounts for."""
    if kind in JSONL:
        fixed, names, unit = JSONL[kind]
        for row in rows:
            cells = dict(zip(names, row, strict=True))
            if isinstance(row[0], (int, float)):
                cells[names[0]] = row[0] * unit
            yield json.dumps(fixed | {name: cell for name, cell in cells.items() if cell is not ABSENT})
        return
    yield ",".join(CSV[kind])
    for row in rows:
        yield ",".join(str(cell) for cell in row if cell is not ABSENT)


def write(path, kind, rows, *, line_end="\n", packed=False):
    """Write rows in that format; return the file's name with what comes between it and a row's number."""
    if kind == "parquet":
        cells = [[None if cell is ABSENT else cell for cell in column] for column in zip(*rows, strict=True)]
        columns = [pa.array(column, pa.float64(), from_pandas=False) for column in cells]
        pq.write_table(pa.table(dict(zip(("arrival_s", "input_len", "output_len"), columns, strict=True))), path)
        return
    content = line_end.join([*lines_of(kind, rows), ""]).encode()
    path.write_bytes(gzip.compress(content) if packed else content)


def place(kind, row):
    return f": row {row}: " if kind == "parquet" else f":{row + (kind in CSV)}: "


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("line_end", "packed"), [("\n", False), ("\r\n", False), ("\r\n", True)])
def test_rows_are_sorted_and_those_at_one_time_keep_their_order(tmp_path, kind, line_end, packed):
    path = tmp_path / "t"
    write(path, kind, FINE, line_end=line_end, packed=packed)
    trace = read_trace(path, strict=True)
    assert trace.input_tokens.tolist() == [41, 42, 40, 43]
    first_s = 2.0 if kind in ("mooncake", "own", "parquet") else 0.0
    assert (trace.arrival_s - first_s).tolist() == [0, 0, 3, 7]
    assert [row.input_tokens for row in stream_trace(Defects(path))] == [41, 42, 40, 43]


DEFECTS = {
    "not a number": (float("nan"), 40, 3),
    "not finite": (float("inf"), 40, 3),
    "zero prompt": (5, 0, 3),
    "negative prompt": (5, -7, 3),
    "huge prompt": (5, 10**9, 3),
    "half a token": (5, 40.5, 3),
    "no prompt": (5, ABSENT, 3),
    "negative output": (5, 40, -1),
    "huge output": (5, 40, 10**9),
    "no output": (5, 40, ABSENT),
    "no time": (ABSENT, 40, 3),
}
TEXT_DEFECTS = {"time in words": ("soon", 40, 3), "prompt in words": (5, "many", 3)}
NOT_CSV = {"negative time": (-5, 40, 3)}
"""A csv's times have an origin of their own."""
ISO = {"ISO time among numbers": ("2024-05-10 00:00:00", 40, 3)}
CASES = [
    pytest.param(kind, row, id=f"{kind}: {name}")
    for kind in FORMATS
    for name, row in (
        DEFECTS | (TEXT_DEFECTS | ISO if kind != "parquet" else {}) | (NOT_CSV if kind not in CSV else {})
    ).items()
]


@pytest.mark.parametrize(("kind", "bad"), CASES)
def test_a_defect_is_named_left_out_and_stops_a_strict_reader(tmp_path, kind, bad):
    path = tmp_path / "t"
    write(path, kind, [*FINE[:2], bad, *FINE[2:]])
    with pytest.raises(TraceError, match=f"t{place(kind, 3)}"):
        read_trace(path, strict=True)
    trace = read_trace(path)
    assert trace.input_tokens.tolist() == [41, 42, 40, 43]
    assert trace.num_defects == 1
    assert place(kind, 3) in trace.defects[0]


@pytest.mark.parametrize("kind", FORMATS)
def test_an_output_of_none_counts_as_one_token(tmp_path, kind):
    write(tmp_path / "t", kind, [(5, 40, 0)])
    assert read_trace(tmp_path / "t", strict=True).output_tokens.tolist() == [1]


@pytest.mark.parametrize("kind", CSV)
def test_a_missing_column_is_an_unknown_format(tmp_path, kind):
    (tmp_path / "t").write_text(",".join(CSV[kind][:2]) + "\n1,2\n")
    with pytest.raises(TraceError, match="not a known trace format"):
        read_trace(tmp_path / "t")


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(PRESET_NAMES), st.integers(0, 2**20), st.sampled_from([24, 60, 200]), st.sampled_from([96, 400]))
def test_sessions_that_outgrow_the_replica_are_counted_and_the_run_ends(
    tmp_path_factory, preset, seed, num_blocks, max_model_len
):
    """Turns add up to 2,000 tokens; none of the replicas has room for that."""
    path = tmp_path_factory.mktemp("grown") / "t.jsonl"
    shape = Sessions(turns_mean=16, pause_mean_s=1, system_tokens=16, max_context=2000)
    config = GenerationConfig(shape=shape, num_requests=200, rate_rps=2.0, input_mean=60, output_mean=30, seed=seed)
    write_rows(path, generate(config))
    trace = read_trace(path, strict=True)
    simulation = build_simulation(
        SimulationConfig(
            preset=preset,
            step_time=ConstantTime(0.1),
            num_blocks=num_blocks,
            block_size=4,
            max_model_len=max_model_len,
            max_num_seqs=4,
        )
    )
    counts = simulation.run(trace).requests
    assert counts.arrived == 200
    assert counts.arrived == counts.finished + counts.rejected + counts.unservable
    lengths = trace.input_tokens + trace.output_tokens
    # The last token of an output is never read, so it needs no KV.
    outgrown = (lengths > max_model_len) | (lengths - 1 > 4 * num_blocks)
    assert counts.rejected + counts.unservable >= outgrown.sum() > 0
