"""Traces made up from a description: arrivals, lengths, and what requests share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from expediter.assembly.traces import load_trace
from expediter.core.errors import ConfigurationError
from expediter.sim.trace import Trace, TraceError
from expediter.sim.trace_arrivals import Segments, arrival_times, check_positive, constant, curve, gamma_gaps, on_off
from expediter.sim.trace_generators import Independent, Shape, lognormal_lengths, sampled_lengths
from expediter.sim.trace_readers import trace_from_rows
from expediter.sim.trace_rows import TraceRow


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """What to generate. Arrivals are of requests, or of sessions if the shape has any.

    Args:
        shape: what requests share.
        num_requests, duration_s: where to stop, at whichever comes first; at least one is given.
        rate_rps: mean arrivals per second; None for the curve's own, or 1 without a curve.
        cv: coefficient of variation of the gaps at constant rate; 1 is a Poisson process.
        on_s, off_s: mean lengths of bursts and of the silences between them; both or neither.
        rate_curve: parquet file with `window_start_s` and `rate_rps` (ServeGen's rates), repeated when it ends.
        curve_model: rows of the curve to take, by its column `model`.
        input_mean, input_cv, output_mean, output_cv: of the lognormal lengths; for shapes with shared texts, the input
            is what a request adds to them.
        lengths_from: take lengths from this trace instead, in pairs of input and output.
        seed: arrivals, lengths and shape each have a stream of their own, so that a change to one leaves the others.
    """

    shape: Shape = field(default_factory=Independent)
    num_requests: int | None = None
    duration_s: float | None = None
    rate_rps: float | None = None
    cv: float = 1.0
    on_s: float | None = None
    off_s: float | None = None
    rate_curve: str | Path | None = None
    curve_model: str | None = None
    input_mean: float = 1024.0
    input_cv: float = 1.0
    output_mean: float = 256.0
    output_cv: float = 1.0
    lengths_from: str | Path | None = None
    seed: int = 0


def generate(config: GenerationConfig) -> Iterator[TraceRow]:
    """Return requests in order of arrival, the same for the same config; they are made as they are taken.

    Raises:
        ConfigurationError: a number is out of range, or two settings exclude each other.
        TraceError: a file cannot be used.
    """
    if config.num_requests is None and config.duration_s is None:
        raise ConfigurationError("say where to stop: a number of requests or a duration")
    if config.seed < 0:
        raise ConfigurationError(f"seed must be 0 or more, not {config.seed}")
    streams = np.random.SeedSequence(config.seed).spawn(4)
    gaps, rates, lengths, shape = (np.random.default_rng(stream) for stream in streams)
    times = arrival_times(gamma_gaps(gaps, config.cv), _segments(config, rates))
    if config.lengths_from is None:
        pairs = lognormal_lengths(
            lengths,
            input_mean=config.input_mean,
            input_cv=config.input_cv,
            output_mean=config.output_mean,
            output_cv=config.output_cv,
        )
    else:
        trace = load_trace(config.lengths_from)
        pairs = sampled_lengths(lengths, trace.input_tokens, trace.output_tokens)
    rows = config.shape.rows(times, pairs, shape)
    if config.duration_s is not None:
        end_s = config.duration_s
        check_positive(duration=end_s)
        rows = takewhile(lambda row: row.arrival_s < end_s, rows)
    if config.num_requests is not None:
        check_positive(requests=config.num_requests)
        rows = islice(rows, config.num_requests)
    return rows


def generated_trace(config: GenerationConfig, name: str = "generated") -> Trace:
    """Return generated requests as a trace in memory.

    Raises:
        ConfigurationError, TraceError: as `generate`, and if no request arrives within the duration.
    """
    return replace(trace_from_rows(generate(config), name), seed=config.seed)


def _segments(config: GenerationConfig, rng: np.random.Generator) -> Segments:
    bursts = (config.on_s, config.off_s)
    if config.rate_curve is not None:
        if bursts != (None, None):
            raise ConfigurationError("a rate curve and on-off arrivals exclude each other")
        rates_rps, window_s = read_rate_curve(config.rate_curve, config.curve_model)
        return curve(rates_rps, window_s, config.rate_rps)
    if config.curve_model is not None:
        raise ConfigurationError("a curve's model needs a rate curve")
    rate_rps = 1.0 if config.rate_rps is None else config.rate_rps
    if config.on_s is not None and config.off_s is not None:
        return on_off(rng, rate_rps, config.on_s, config.off_s)
    if bursts != (None, None):
        raise ConfigurationError("on-off arrivals need the lengths of both bursts and silences")
    return constant(rate_rps)


def read_rate_curve(path: str | Path, model: str | None = None) -> tuple[list[float], float]:
    """Read ServeGen's rates: parquet with `window_start_s`, `rate_rps` and perhaps `model`, in windows of equal length.

    Returns:
        Requests per second of each window, NaN where there is none, and the windows' length in seconds.
    Raises:
        TraceError: the file cannot be read, lacks a column, or needs a model (the message lists them).
    """
    try:
        table = pq.read_table(path)
        columns = {name: table.column(name).to_pylist() for name in table.column_names}
        starts, rates = columns["window_start_s"], columns["rate_rps"]
    except KeyError as error:
        raise TraceError(f"{path}: no column {error}; a rate curve has window_start_s and rate_rps") from error
    except (OSError, pa.ArrowException) as error:
        raise TraceError(f"{path}: cannot be read as a rate curve in parquet: {error}") from error
    models = columns.get("model", [""] * len(starts))
    names = sorted(set(models))
    if (model is None and len(names) > 1) or (model is not None and model not in names):
        raise TraceError(f"{path}: name one of the curve's models: {', '.join(names)}")
    own = sorted(
        (float(start), float("nan") if rate is None else float(rate))
        for start, rate, name in zip(starts, rates, models, strict=True)
        if model in (None, name)
    )
    gaps = np.diff([start for start, _ in own])
    if not own or (len(gaps) and not (gaps > 0).all()):
        raise TraceError(f"{path}: a rate curve has windows, each with a start of its own")
    window_s = float(gaps.min()) if len(gaps) else 3600.0
    places = np.rint((np.array([start for start, _ in own]) - own[0][0]) / window_s).astype(np.int64)
    curve_rps = np.full(int(places[-1]) + 1, np.nan)
    curve_rps[places] = [rate for _, rate in own]
    return curve_rps.tolist(), window_s
