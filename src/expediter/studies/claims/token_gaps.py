"""Gaps between tokens, all requests together, from the steps of one replica."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from expediter.core.plan import StepFeatures


class GapRecorder:
    """Turns a replica's steps into the gaps between tokens; `Simulation.watch_steps` takes its `stepped`.

    Which sequences decode is known by number alone: those that began latest are taken to be among them. A preempted
    request therefore counts as one that has ended, and the gap that it suffers until it resumes is left out.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, float]] = []
        self._gaps: list[float] = []
        self._counts: list[int] = []

    def stepped(self, features: StepFeatures, durations_s: Sequence[float]) -> None:
        """One step has run, or several that were alike."""
        first_s, *others_s = durations_s
        if not features.num_decodes:
            self._waiting = [(count, elapsed_s + first_s) for count, elapsed_s in self._waiting]
            self._waiting.append((features.num_seqs, 0.0))
            return
        left = features.num_decodes
        for count, elapsed_s in reversed(self._waiting):
            taken = min(count, left)
            if taken:
                self._gaps.append(elapsed_s + first_s)
                self._counts.append(taken)
            left -= taken
        self._gaps.extend(others_s)
        self._counts.extend([features.num_decodes] * len(others_s))
        self._waiting = [(features.num_seqs, 0.0)]

    def quantile_s(self, share: float) -> float:
        """Return the gap that this share of all tokens does not exceed, in seconds; 0 if there was none."""
        if not self._gaps:
            return 0.0
        gaps, counts = np.array(self._gaps), np.array(self._counts)
        order = np.argsort(gaps, kind="stable")
        reached = np.cumsum(counts[order])
        return float(gaps[order][np.searchsorted(reached, share * reached[-1])])
