"""The SLO policy against first come, first served on a real engine, past the knee, and what the simulator expects.

SmolLM2 on one replica, the demo trace over HTTP at `--load` times what the machine can take, two classes of targets in
turn. Targets follow the machine: the tight class wants its first token within 8 times what an average prompt takes
alone and output tokens within 3 times a decode step's duration, the loose one within 40 and 8 times. Presets alternate,
and every run starts a fresh server.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics

from benchmarks.report import Row, add_json_option, publish
from expediter.assembly.replay import Replay, ReplayConfig, ReplayReport
from expediter.assembly.server_process import running_server
from expediter.assembly.traces import load_trace
from expediter.core.plan import StepFeatures
from expediter.core.slo import Slo
from expediter.perfmodel.fitted import FittedModel
from expediter.runtime.load_client import LoadClient

PRESETS = ("sarathi", "expediter")
PROMPT_SCALE, OUTPUT_SCALE = 1 / 32, 1 / 16


def targets_for(model: FittedModel, mean_prompt: float) -> tuple[Slo, Slo]:
    """Return the tight and the loose targets for a machine."""
    prompt_s = model.step_time_s(StepFeatures(round(mean_prompt), 1, 0, 0, mean_prompt**2 / 2))
    token_s = model.step_time_s(StepFeatures(8, 8, 8, round(8 * mean_prompt), 0.0))
    return Slo(ttft_s=8 * prompt_s, tpot_s=3 * token_s), Slo(ttft_s=40 * prompt_s, tpot_s=8 * token_s)


def configuration(slos: tuple[Slo, ...], *, load: float, rate_scale: float | None = None) -> ReplayConfig:
    return ReplayConfig(
        trace=load_trace("demo"),
        slos=slos,
        rate_scale=rate_scale,
        load=load,
        prompt_scale=PROMPT_SCALE,
        output_scale=OUTPUT_SCALE,
    )


def run(preset: str, config: ReplayConfig) -> ReplayReport:
    """Replay on a fresh server."""
    with running_server(["--preset", preset]) as url:
        return asyncio.run(Replay(config, LoadClient(url)).run())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--load", type=float, default=1.5)
    add_json_option(parser)
    args = parser.parse_args()
    with running_server(["--preset", PRESETS[0]]) as url:
        probe = Replay(configuration((Slo(),), load=args.load), LoadClient(url))
        rate_scale, model = asyncio.run(probe.calibrate())
    mean_prompt = float(load_trace("demo").input_tokens.mean()) * PROMPT_SCALE
    config = configuration(targets_for(model, mean_prompt), load=args.load, rate_scale=rate_scale)
    rows: list[Row] = []
    for repetition in range(args.repetitions):
        for preset in PRESETS:
            report = run(preset, config)
            assert report.simulated is not None
            rows.append(
                {
                    "repetition": repetition,
                    "preset": preset,
                    "live goodput, req/s": round(report.live.goodput_rps, 3),
                    "live attainment": round(report.live.slo_attainment, 3),
                    "simulated attainment": round(report.simulated.slo_attainment or 0.0, 3),
                    "failed": report.live.num_failed,
                }
            )
            print(rows[-1], flush=True)
    rows += [ratio(rows, key) for key in ("live attainment", "simulated attainment")]
    targets = ", ".join(f"{slo.ttft_s:.2f} s / {1e3 * (slo.tpot_s or 0):.0f} ms" for slo in config.slos)
    publish(f"SmolLM2 at {args.load} x capacity, targets {targets}", rows, args.json)


def ratio(rows: list[Row], key: str) -> Row:
    """Return the ratio of the presets' attainments, pair by pair: median and range; all runs had the same arrivals."""
    pairs = zip(rows[0::2], rows[1::2], strict=True)
    ratios = [second[key] / max(first[key], 1e-9) for first, second in pairs]
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    row = dict.fromkeys(rows[0], "")
    return row | {"repetition": "ratio", "preset": " / ".join(reversed(PRESETS)), key: spread}


if __name__ == "__main__":
    main()
