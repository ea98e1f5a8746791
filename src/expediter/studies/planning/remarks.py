"""What to keep in mind about a plan, in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from expediter.studies.planning.answer import Plan


def remarks_on(plan: Plan) -> Iterator[str]:
    """Yield how the search went, how much the seeds differ, and how much rests on extrapolated step times."""
    num_ruled_out = sum(out.num_setups for out in plan.ruled_out)
    yield (
        f"Of {plan.num_setups} set-ups, {num_ruled_out} were ruled out without a simulation and {plan.num_dropped} on "
        f"shorter traces; {plan.num_simulations} simulations in all."
    )
    if not plan.is_complete:
        yield "The budget ran out before the search was over: something cheaper may meet the targets."
    for number, choice in enumerate(plan.choices, 1):
        shares = choice.point.attainments
        num_missed = sum(share < plan.attainment - 1e-12 for share in shares)
        if num_missed:
            yield (
                f"{number} meets the target over all {len(shares)} draws of the traffic, but misses it in {num_missed} "
                f"of them: {min(shares):.1%} at worst."
            )
    for number, choice in enumerate(plan.choices, 1):
        coverage = choice.point.measured.coverage
        said = [f"{coverage.outside_kernels:.0%} of the time is in steps larger than any measured kernel"]
        if coverage.outside_engine is not None:
            said.append(f"{coverage.outside_engine:.0%} in steps larger than any the engine was fitted to")
        yield f"{number} rests on modelled step times: {', '.join((*said, *choice.borrowed))}."
