"""What follows from a comparison: who leads at which load, by how much, what limits each, and how sure that is.

Two entries *tie* at a load where the better one's goodput is less than `TIE_SHARE` above the other's, where it is less
than `LEAST_REQUESTS` requests, or, with several seeds, where the 95 % confidence interval of their difference contains
0. Seeds are paired: each entry serves the same
draws of the traffic, so what the draws have in common does not blur the difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean, stdev
from typing import Final

from expediter.studies.words import listed, number, percent, seconds

TIE_SHARE: Final = 0.01
LEAST_REQUESTS: Final = 6
"""Of all draws together: that fewer requests went better with one than with the other, and none worse, may be chance (a
sign test needs six for 5 %)."""
ATTAINMENT_SHARES: Final = (0.99, 0.9)
"""Up to which rate so many requests meet their targets is told of every entry."""
_WORTH_TELLING_SHARE: Final = 0.1
"""Smaller parts of what was missed are not told of in the summary."""
_SHORT_DRAIN_SHARE: Final = 0.25
_T_95: Final = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Two-sided 95 % quantiles of Student's t, by degrees of freedom from 1 on."""

HELD: Final[Mapping[str, str]] = {
    "queued": "behind others",
    "budget": "because the token budget of the steps was used up",
    "no_slot": "because no slot was free (max_num_seqs)",
    "no_blocks": "because too few KV blocks were free",
    "batch": "for the batch in progress to end",
    "step": "for the step in progress to end",
    "fairness": "because its tenant had had its share",
    "late": "because it was late already and others went first",
    "preempted": "because it had to make room for others",
}
"""Why a request waited, as the end of a sentence, by `core.explanation.Reason`."""
MISSED: Final[Mapping[str, str]] = {
    "served": "were refused or not finished",
    "ttft": "had their first token too late",
    "tpot": "got their tokens too slowly",
    "e2e": "ended too late",
}
"""What requests missed, by `Report.missed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What findings are drawn from: one entry at one load; fields as in `comparison.Cell`."""

    entry: str
    load: float
    offered_rps: float
    num_requests: int
    goodput_rps: tuple[float, ...]
    goodput_rps_per_gpu: tuple[float, ...]
    attainment: tuple[float, ...]
    missed: Mapping[str, float]
    held_s: Mapping[str, float]
    kv_used_share: float
    drain_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Who leads at a load, by goodput per GPU.

    Attributes:
        leaders: the best one, and those that tie with it; best first.
        runner_up: the best of the others; None if all tie.
        advantage: of the best over the runner-up, as a share of the runner-up's; None without one, or if it is 0.
        noise: half the 95 % confidence interval of that advantage; None with one seed.
    """

    load: float
    offered_rps: float
    leaders: tuple[str, ...]
    runner_up: str | None
    advantage: float | None
    noise: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sustained:
    """Up to which rate an entry meets the targets of a share of requests, interpolated between loads.

    Attributes:
        offered_rps: 0 if not even at the lowest load.
        is_bound: whether it still does at the highest load, so that the rate is at least this.
    """

    entry: str
    attainment: float
    offered_rps: float
    is_bound: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What follows.

    Attributes:
        headline: who leads at which loads, in a sentence or two.
        reach: up to which rates the entries meet the targets, in sentences.
        limits: what each entry misses at the highest load and what holds it, in sentences.
        certainty: how much of the differences may be chance, in sentences.
        caveats: what of all this to take with care, in sentences.
        verdicts: by load.
        sustained: by attainment, then by entry.
    """

    headline: str
    reach: tuple[str, ...]
    limits: tuple[str, ...]
    certainty: tuple[str, ...]
    caveats: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    sustained: tuple[Sustained, ...]


def findings(outcomes: Sequence[Outcome], *, per_gpu: bool = False) -> Findings:
    """Return what follows from the outcomes.

    Args:
        outcomes: by ascending load, then by entry; every entry at every load, with equally many seeds.
        per_gpu: whether the entries have different numbers of GPUs, so that it has to be said.
    """
    by_load = [list(group) for _, group in groupby(outcomes, lambda outcome: outcome.load)]
    verdicts = tuple(map(verdict, by_load))
    entries = [outcome.entry for outcome in by_load[0]]
    sustained = tuple(
        _sustained(entry, share, [o for o in outcomes if o.entry == entry])
        for share in ATTAINMENT_SHARES
        for entry in entries
    )
    return Findings(
        headline=_headline(verdicts, by_load, per_gpu),
        reach=tuple(_in_words(sustained)),
        limits=tuple(map(_limit, by_load[-1])),
        certainty=tuple(_noise(verdicts, len(outcomes[0].goodput_rps))),
        caveats=_caveats(outcomes),
        verdicts=verdicts,
        sustained=sustained,
    )


# -- who leads --------------------------------------------------------------------------------------------------------


def verdict(outcomes: Sequence[Outcome]) -> Verdict:
    """Return who leads among the entries at one load."""
    ranked = sorted(outcomes, key=lambda outcome: -fmean(outcome.goodput_rps_per_gpu))
    best = ranked[0]
    behind = [other for other in ranked[1:] if not _tie(best, other)]
    leaders = tuple(outcome.entry for outcome in ranked if outcome not in behind)
    if not behind:
        return Verdict(
            load=best.load, offered_rps=best.offered_rps, leaders=leaders, runner_up=None, advantage=None, noise=None
        )
    difference, half_width = _difference(best, behind[0])
    base = fmean(behind[0].goodput_rps_per_gpu)
    return Verdict(
        load=best.load,
        offered_rps=best.offered_rps,
        leaders=leaders,
        runner_up=behind[0].entry,
        advantage=difference / base if base else None,
        noise=half_width / base if base and half_width is not None else None,
    )


def _difference(one: Outcome, other: Outcome) -> tuple[float, float | None]:
    """Return how much higher one's goodput per GPU is, and half of the 95 % confidence interval of that."""
    pairs = zip(one.goodput_rps_per_gpu, other.goodput_rps_per_gpu, strict=True)
    differences = [a - b for a, b in pairs]
    n = len(differences)
    if n < 2:
        return differences[0], None
    return fmean(differences), _T_95[min(n - 1, len(_T_95)) - 1] * stdev(differences) / math.sqrt(n)


def _tie(best: Outcome, other: Outcome) -> bool:
    difference, half_width = _difference(best, other)
    goodput = fmean(best.goodput_rps_per_gpu)
    if difference <= TIE_SHARE * goodput:
        return True
    num_better = difference / goodput * sum(best.attainment) * best.num_requests
    if num_better < LEAST_REQUESTS - 0.5:  # whole numbers, but for rounding
        return True
    return half_width is not None and difference <= half_width


def _headline(verdicts: Sequence[Verdict], by_load: Sequence[Sequence[Outcome]], per_gpu: bool) -> str:
    if len(by_load[0]) == 1:
        return f"Only {by_load[0][0].entry} was simulated, so there is nothing to compare it with."
    sentences = []
    for _, group in groupby(zip(verdicts, by_load, strict=True), lambda pair: _key(*pair)):
        pairs = list(group)
        stretch = [one for one, _ in pairs]
        where = _loads([one.load for one in stretch])
        if _serves_nobody(pairs[0][1]):
            sentences.append(f"{where} no entry serves any request within its targets.")
        elif stretch[0].runner_up is None:
            sentences.append(f"{where} {_all_tie(pairs)}.")
        else:
            sentences.append(f"{where} {_lead(stretch, per_gpu)}.")
    return " ".join(sentence[0].upper() + sentence[1:] for sentence in sentences)


def _key(one: Verdict, outcomes: Sequence[Outcome]) -> tuple[bool, bool, frozenset[str]]:
    """Return what neighbouring loads share that are told of together."""
    return _serves_nobody(outcomes), one.runner_up is None, frozenset(one.leaders)


def _serves_nobody(outcomes: Sequence[Outcome]) -> bool:
    return all(not any(outcome.goodput_rps) for outcome in outcomes)


def _all_tie(pairs: Sequence[tuple[Verdict, Sequence[Outcome]]]) -> str:
    outcomes = [outcome for _, row in pairs for outcome in row]
    lowest = min(fmean(outcome.attainment) for outcome in outcomes)
    what = "both entries tie" if len(pairs[0][1]) == 2 else "all entries tie"
    share = "all requests" if lowest == 1 else f"at least {percent(lowest)} of the requests"
    return f"{what}: each serves {share} within their targets"


def _lead(stretch: Sequence[Verdict], per_gpu: bool) -> str:
    leaders = stretch[0].leaders
    of_gpu = " per GPU" if per_gpu else ""
    if len(leaders) > 1:
        who = f"{listed(leaders)} tie for the lead{of_gpu}"
    else:
        who = f"{leaders[0]} serves the most requests within their targets{of_gpu}"
    told = [stretch[0], *stretch[1:][-1:]]
    parts = []
    for one, before in zip(told, [None, *told], strict=False):
        at = f" at load {one.load:g}" if len(stretch) > 1 else ""
        if one.advantage is None:
            parts.append(f"{one.runner_up}, the next, serves none in time{at}")
        elif before is not None and before.runner_up == one.runner_up and before.advantage is not None:
            parts.append(f"{_more(one.advantage)}{at}")
        else:
            parts.append(f"{_more(one.advantage, one.runner_up)}{at}")
    return f"{who}, {' and '.join(parts)}"


def _more(advantage: float, than: str | None = None) -> str:
    if advantage >= 1:
        return f"{advantage + 1:.2g} times as many{f' as {than}' if than else ''}"
    return f"{percent(advantage)}{f' more than {than}' if than else ''}"


def _loads(loads: Sequence[float]) -> str:
    if len(loads) == 1:
        return f"at load {loads[0]:g}"
    return f"from load {loads[0]:g} to {loads[-1]:g}"


# -- how far ----------------------------------------------------------------------------------------------------------


def _sustained(entry: str, attainment: float, outcomes: Sequence[Outcome]) -> Sustained:
    rate, previous = 0.0, 1.0
    for outcome in outcomes:
        attained = fmean(outcome.attainment)
        if attained < attainment:
            if rate:  # below the lowest load nothing was measured to interpolate from
                rate += (previous - attainment) / (previous - attained) * (outcome.offered_rps - rate)
            return Sustained(entry=entry, attainment=attainment, offered_rps=rate, is_bound=False)
        rate, previous = outcome.offered_rps, attained
    return Sustained(entry=entry, attainment=attainment, offered_rps=rate, is_bound=True)


def _in_words(sustained: Sequence[Sustained]) -> Iterable[str]:
    for attainment, group in groupby(sustained, lambda one: one.attainment):
        ranked = sorted(group, key=lambda one: -one.offered_rps)
        always = [one.entry for one in ranked if one.is_bound]
        never = [one.entry for one in ranked if not one.offered_rps]
        rates = [
            f"{number(one.offered_rps)} requests/s with {one.entry}"
            for one in ranked
            if one.entry not in always + never
        ]
        parts = [
            *([f"at all of these loads with {listed(always)}"] if always else []),
            *([f"up to {listed(rates)}"] if rates else []),
            *([f"at none of these loads with {listed(never)}"] if never else []),
        ]
        yield f"{percent(attainment)} of the requests meet their targets {'; '.join(parts)}."


# -- what limits ------------------------------------------------------------------------------------------------------


def _limit(outcome: Outcome) -> str:
    total = sum(outcome.missed.values())
    if not total:
        return f"{outcome.entry} serves all in time."
    shares = sorted(outcome.missed.items(), key=lambda item: -item[1])
    missed = [
        f"{'all' if share == total else percent(share / total)} {MISSED[name]}"
        for name, share in shares
        if share >= _WORTH_TELLING_SHARE * total
    ]
    attained = percent(fmean(outcome.attainment))
    sentence = f"{outcome.entry} serves {attained} in time; of the others, {' and '.join(missed)}."
    waited = sum(outcome.held_s.values())
    if waited > 0:
        name, held_s = max(outcome.held_s.items(), key=lambda item: item[1])
        share = "all" if held_s == waited else percent(held_s / waited)
        sentence += (
            f" A request waited {seconds(waited)} on average, {share} of it "
            f"{HELD.get(name, f'by {name}')}; running requests held {percent(outcome.kv_used_share)} of the KV memory."
        )
    return sentence


# -- how sure ---------------------------------------------------------------------------------------------------------


def _noise(verdicts: Sequence[Verdict], num_seeds: int) -> Iterable[str]:
    if num_seeds < 2:
        yield (
            f"One draw of the traffic was simulated, so how much of a difference is chance is not known; differences "
            f"of up to {percent(TIE_SHARE)} or of less than {LEAST_REQUESTS} requests are called ties. Several seeds "
            "(--seeds) would tell."
        )
        return
    yield (
        f"{num_seeds} draws of the traffic were simulated. What is called a lead is above {percent(TIE_SHARE)}, at "
        f"least {LEAST_REQUESTS} requests and outside the 95 % confidence interval of the draws' paired differences; "
        "what is not is called a tie."
    )
    told = [
        f"{one.advantage / one.noise:.2g} times at load {one.load:g}"
        for one in verdicts
        if one.advantage is not None and one.noise
    ]
    if told:
        yield f"The leads exceed the noise (half that interval) {', '.join(told)}."


def _caveats(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    longest = max(outcomes, key=lambda outcome: outcome.drain_share)
    if longest.drain_share <= _SHORT_DRAIN_SHARE:
        return ()
    span_s = longest.num_requests / longest.offered_rps
    return (
        f"The traffic is short: at load {longest.load:g} requests came for {seconds(span_s)}, and {longest.entry} went "
        f"on for {seconds(longest.drain_share * span_s)} after the last one. How long queues become in the end, and "
        "whom that hurts, takes more requests to show (--limit, or another trace).",
    )
