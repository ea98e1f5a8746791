"""The comparison before two vLLM servers: what it sends, and what it makes of the answers; without the servers."""

from __future__ import annotations

from collections import Counter

from benchmarks.vllm_pair import P50, P99, Load, Turn, ratios

from expediter.runtime.load_client import Outcome

LOAD = Load(200, 4.0, 5, 64, num_own_tokens=8, num_output_tokens=2)


def test_a_round_is_the_same_for_all_systems_and_no_other_round() -> None:
    prompts = LOAD.prompts(seed=1)
    assert prompts == LOAD.prompts(seed=1)
    prefixes = Counter(prompt.prompt[:200] for prompt in prompts)
    assert len(prefixes) == 5
    assert max(prefixes.values()) > 2 * min(prefixes.values())  # some are far busier
    assert not prefixes.keys() & {prompt.prompt[:200] for prompt in LOAD.prompts(seed=2)}
    assert 30 < prompts[-1].arrival_s < 80  # 200 requests at 4 a second
    assert not {prompt.prompt for prompt in prompts} & {prompt.prompt for prompt in LOAD.warm_ups(seed=1)}


def test_failed_requests_are_counted_apart() -> None:
    good = [
        Outcome(sent_s=0.0, token_times_s=[0.1 * place], num_prompt_tokens=10, num_cached_tokens=5)
        for place in range(1, 4)
    ]
    turn = Turn([*good, Outcome(sent_s=0.0, error="503", token_times_s=[9.0])], [3.0, 1.0])
    row = (turn + turn).row("all", "ours")
    assert (row[P50], row["hit rate"], row["busier server"], row["failed"]) == (200.0, 0.5, 0.75, 2)


def test_ratios_are_taken_round_by_round() -> None:
    rows = [
        {"round": str(number), "system": system, P50: p50, P99: 2 * p50}
        for number, pair in enumerate([(1.0, 4.0), (3.0, 4.0), (2.0, 4.0)])
        for system, p50 in zip(("ours", "theirs"), pair, strict=True)
    ]
    assert ratios(rows, "ours", "theirs") == {
        "round": "ratio",
        "system": "ours / theirs",
        P50: "0.50 (0.25 to 0.75)",
        P99: "0.50 (0.25 to 0.75)",
    }
