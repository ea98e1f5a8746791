"""The claims by name, and how they are run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from expediter.core.errors import ConfigurationError
from expediter.studies.claims import distserve, mooncake, qoserve, sarathi, sglang, splitwise, vtc
from expediter.studies.claims.frame import Claim, Conclusion, Effort, Numbers
from expediter.studies.workers import Task, Workers

CLAIMS: Mapping[str, Claim] = {
    claim.name: claim
    for claim in (
        distserve.CLAIM,
        splitwise.CLAIM,
        mooncake.CLAIM,
        sarathi.CLAIM,
        sglang.CLAIM,
        vtc.CLAIM,
        qoserve.CLAIM,
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimResult:
    """What came out of a claim.

    Attributes:
        results: what each job measured.
    """

    claim: Claim
    conclusion: Conclusion
    results: Mapping[str, Numbers]


def claims_named(names: Sequence[str]) -> tuple[Claim, ...]:
    """Return the claims of those names, all of them if there are no names.

    Raises:
        ConfigurationError: there is none of a name; the message lists those that exist.
    """
    for name in names:
        if name not in CLAIMS:
            raise ConfigurationError(f"no claim {name!r}; there are: {', '.join(CLAIMS)}")
    return tuple(CLAIMS[name] for name in names or CLAIMS)


def missing_files(claim: Claim, effort: Effort) -> tuple[str, ...]:
    """Return the files that a claim needs and the data folder lacks."""
    return tuple(name for name in claim.files if not (effort.data / name).is_file())


def run_claims(
    claims: Sequence[Claim],
    effort: Effort,
    workers: Workers,
    progress: Callable[[int, int, str], None] | None = None,
) -> Iterator[ClaimResult]:
    """Run the claims' jobs and yield each claim's result as soon as its jobs are done, in the order of the claims.

    The results do not depend on the number of workers.

    Args:
        progress: told how many jobs are done, of how many, and which one was done last.
    """
    jobs = {claim.name: claim.jobs(effort) for claim in claims}
    tasks = [Task(label=f"{name}: {job}", call=call) for name, of in jobs.items() for job, call in of.items()]
    told = None if progress is None else lambda done, label: progress(done, len(tasks), label)
    measured = workers.run(tasks, told)
    for claim in claims:
        results = {job: next(measured) for job in jobs[claim.name]}
        yield ClaimResult(claim=claim, conclusion=claim.conclude(results), results=results)


def to_json(results: Sequence[ClaimResult], effort: Effort) -> bytes:
    """Return the results as indented JSON with a final newline; `claims_from_json` reads the measurements back."""
    content = {
        "quick": effort.quick,
        "claims": [
            {
                "name": result.claim.name,
                "verdict": result.conclusion.verdict.value,
                "figures": [
                    {**asdict(figure), "verdict": figure.verdict.value} for figure in result.conclusion.figures
                ],
                "measured": result.results,
            }
            for result in results
        ],
    }
    return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"


def from_json(content: bytes) -> list[ClaimResult]:
    """Return results whose measurements are in the file, concluded anew.

    Raises:
        ConfigurationError: the content is not what `to_json` writes, or is of a quick run.
    """
    try:
        read = msgspec.json.decode(content, type=dict[str, Any])
        if read["quick"]:
            raise ConfigurationError("the results are of a quick run, whose figures are rough")
        measured = {each["name"]: each["measured"] for each in read["claims"]}
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise ConfigurationError(f"not the results of claims: {error}") from error
    return [
        ClaimResult(claim=claim, conclusion=claim.conclude(measured[claim.name]), results=measured[claim.name])
        for claim in claims_named(list(measured))
    ]
