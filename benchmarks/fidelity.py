"""Step times against published measurements that the fit has not seen.

Each row fits one engine's constants to a part of its measurements and predicts the rest. Kernels stay as fitted on
single-kernel tables (`expediter.perfmodel.constants`), which hold none of these measurements. `python -m
benchmarks.fidelity --json FILE`; `benchmarks.measurements` says what is compared, what is left out and why.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from benchmarks.measurements import DATASETS, Labelled
from benchmarks.report import Row, add_json_option, publish
from expediter.perfmodel.calibration import Vector, fit_engine, predicted_s

Fold = tuple[list[Labelled], list[Labelled]]

_TARGETS: Final = {"decode": 0.05, "prefill": 0.10}
_TARGET_EXTRAPOLATED: Final = 0.12


def _in_sample(rows: Sequence[Labelled]) -> Iterator[Fold]:
    yield list(rows), list(rows)


def _leave_one_out(rows: Sequence[Labelled]) -> Iterator[Fold]:
    """Hold out each (prompt, batch) in turn, on all GPU counts and models, prefill and decode."""
    for held in sorted({(row.prompt, row.batch) for row in rows}):
        yield (
            [row for row in rows if (row.prompt, row.batch) != held],
            [row for row in rows if (row.prompt, row.batch) == held],
        )


def _split(train: Callable[[Labelled], bool], test: Callable[[Labelled], bool]) -> Callable[..., Iterator[Fold]]:
    def folds(rows: Sequence[Labelled]) -> Iterator[Fold]:
        yield [row for row in rows if train(row)], [row for row in rows if test(row)]

    return folds


def _on(others: Callable[[], list[Labelled]]) -> Callable[..., Iterator[Fold]]:
    def folds(rows: Sequence[Labelled]) -> Iterator[Fold]:
        yield list(rows), others()

    return folds


def _is_short(row: Labelled) -> bool:
    return row.prompt <= 1024


def _splits(name: str) -> dict[str, Callable[..., Iterator[Fold]]]:
    splits = {
        "in sample": _in_sample,
        "leave one (prompt, batch) out": _leave_one_out,
        "TP2, TP8 -> TP4": _split(lambda row: row.tensor_parallel in {2, 8}, lambda row: row.tensor_parallel == 4),
    }
    if name.startswith("eager"):
        splits |= {
            "<= 1k -> 8k inputs": _split(_is_short, lambda row: row.prompt == 8192),
            "llama2-70b -> bloom-176b": _split(lambda row: "llama" in row.model, lambda row: "bloom" in row.model),
        }
    elif name == "vllm-0.18":
        splits |= {
            "gpt-oss-120b -> minimax-m2.5": _split(lambda row: "oss" in row.model, lambda row: "MiniMax" in row.model),
            "minimax-m2.5 -> gpt-oss-120b": _split(lambda row: "MiniMax" in row.model, lambda row: "oss" in row.model),
            "<= 1k -> 8k inputs": _split(_is_short, lambda row: row.prompt == 8192),
        }
    else:
        splits["<= 1k -> 4k inputs"] = _split(_is_short, lambda row: row.prompt == 4096)
    return splits


def measure(name: str) -> list[Row]:
    """Return a row per split and kind of step of one engine's measurements."""
    dataset = DATASETS[name]
    everything, table = dataset.rows(), []
    splits = _splits(name) | {split: _on(others) for split, others in dataset.other.items()}
    for split, folds in splits.items():
        tested: list[Labelled] = []
        errors: list[Vector] = []
        for train, test in folds(everything):
            engine = fit_engine([row.measurement for row in train], dataset.free)
            rows = [row.measurement for row in test]
            tested += test
            errors.append(predicted_s(rows, engine) / np.array([row.time_s for row in rows]) - 1)
        error = np.concatenate(errors)
        target = _TARGET_EXTRAPOLATED if "->" in split else None
        kinds = sorted({row.kind for row in tested})
        table += [_row(name, split, kind, tested, error, target or _TARGETS[kind]) for kind in kinds]
    return table


def _row(engine: str, split: str, kind: str, tested: Sequence[Labelled], error: Vector, target: float) -> Row:
    indices = [i for i, row in enumerate(tested) if row.kind == kind]
    signed = error[indices]
    worst = tested[indices[int(np.abs(signed).argmax())]]
    mean = float(np.abs(signed).mean())
    return {
        "engine": engine,
        "split": split,
        "kind": kind,
        "rows": len(indices),
        "mean_abs": f"{mean:.1%}",
        "bias": f"{signed.mean():+.1%}",
        "max_abs": f"{np.abs(signed).max():.1%}",
        "worst": f"TP{worst.tensor_parallel} {worst.prompt} x {worst.batch}",
        "target": f"{target:.0%}",
        "met": "yes" if mean <= target else "no",
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_json_option(parser)
    args = parser.parse_args()
    table = [row for name in DATASETS for row in measure(name)]
    publish("Step times against held-out measurements", table, args.json)


if __name__ == "__main__":
    main()
