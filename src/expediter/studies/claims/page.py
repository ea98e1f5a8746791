"""The page of documentation that holds the last run of all claims."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

from expediter.studies.claims.frame import Table
from expediter.studies.claims.registry import ClaimResult

_WIDTH = 120
_INTRODUCTION = """\
# Published results, run again

`expediter claims` runs seven published results of LLM serving systems in simulation and says which come out. This page
is written by it from the results of its last full run ([claims.json](claims.json)); a test holds the two together.

```console
$ expediter claims --quick --only vtc
```

`--quick` runs a small version in which the figures are rough; a full run takes some minutes on two cores and is
`expediter claims --json docs/claims.json --page docs/claims.md`. It is deterministic: the same version gives the same
figures. `mooncake` needs the conversation trace of Mooncake's FAST'25 release in the folder that `--data` names.

A figure agrees when it lies within 25 % of the published range (or as said) and, for a factor, on the same side of 1.
Parameters come from the papers, their code or their data; what is ours is said to be. No constant was chosen to meet
a figure. Where a figure differs, runs with one assumption changed show which one makes the difference.

Sizes of a gain depend on the baseline as much as on the system. So each comparison also has a chunked-prefill baseline
with the best of several fixed token budgets, which engines ship today.
"""


def render(results: Sequence[ClaimResult]) -> str:
    """Return the page in Markdown."""
    parts = [_INTRODUCTION, _summary(results)]
    for result in results:
        claim, conclusion = result.claim, result.conclusion
        parts.append(f"## {claim.title}\n")
        parts.append(f"`{claim.name}`. Source: {claim.source}.\n")
        for head, text in (("Workload", claim.workload), ("Objective", claim.objective), ("How", claim.method)):
            parts.append(_paragraph(f"**{head}.** {text}"))
        parts.append(
            _table(
                Table(
                    title="",
                    columns=("figure", "published", "ours", ""),
                    rows=tuple((f.what, f.published, f.measured, f.verdict.value) for f in conclusion.figures),
                )
            )
        )
        parts.extend(_table(table) for table in conclusion.tables)
        if conclusion.why:
            parts.append(_paragraph(f"**Why.** {conclusion.why}"))
    return "\n".join(parts)


def _summary(results: Sequence[ClaimResult]) -> str:
    rows = [
        (f"`{result.claim.name}`", figure.what, figure.published, figure.measured, figure.verdict.value)
        for result in results
        for figure in result.conclusion.figures
    ]
    return _table(Table(title="", columns=("claim", "figure", "published", "ours", ""), rows=tuple(rows)))


def _paragraph(text: str) -> str:
    return fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False) + "\n"


def _table(table: Table) -> str:
    lines = [f"{table.title}:\n"] if table.title else []
    lines.append(f"| {' | '.join(table.columns)} |")
    lines.append(f"|{'---|' * len(table.columns)}")
    lines.extend(f"| {' | '.join(row)} |" for row in table.rows)
    return "\n".join(lines) + "\n"
