"""Memory rules, budgets, batchings and victims by example beside their neighbours, and what each promises."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expediter.core.errors import ConfigurationError
from expediter.core.events import PreemptCause, Preempted
from expediter.core.plan import StepFeatures
from expediter.core.request import Request
from expediter.core.slo import Slo
from expediter.scheduling.build import BATCHINGS, MEMORY_RULES, PolicyConfig, limits_with_budget
from expediter.scheduling.config import SchedulerConfig
from expediter.scheduling.prediction import _MANY_BANDS, OutputLengths
from expediter.scheduling.step_time import OnlineStepTime
from expediter.testing.scheduler_driver import SchedulerDriver


def build(*, num_blocks=20, block_size=4, batching="stall_free", memory="paged", victims="lowest_priority", **limits):
    policy = PolicyConfig(batching=batching, memory=memory, victims=victims)
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 200, "max_model_len": 200, **limits}
    return SchedulerDriver.build(
        SchedulerConfig(**limits), num_blocks=num_blocks, block_size=block_size, policy=policy, prefix_caching=False
    )


# -- memory -----------------------------------------------------------------------------------------------------------


def growth_preemptions(driver):
    return [e for e in driver.events if isinstance(e, Preempted) and e.cause is PreemptCause.GROWTH]


@pytest.mark.parametrize(
    ("memory", "started", "num_preemptions"),
    [
        ("paged", ("a", "b", "c"), 1),  # 15 blocks for prompts of 20 tokens; their outputs need 5 each
        ("full", ("a",), 0),  # 6 blocks for a's whole life, 11 for b's
        ("predicted_peak", ("a", "b"), 0),  # a ends before b has grown
    ],
)
def test_each_memory_rule_starts_as_many_as_it_thinks_right(memory, started, num_preemptions):
    driver = build(num_blocks=16, memory=memory, max_bypasses=0)
    for name, max_tokens in (("a", 4), ("b", 24), ("c", 24)):
        driver.submit(name, [ord(name) - 90] * 20, max_tokens)
    driver.step()
    assert driver.steps[-1].admitted == started
    driver.run_to_end()
    assert (len(growth_preemptions(driver)) > 0) == (num_preemptions > 0)


def test_no_memory_rule_is_forgotten():
    assert set(MEMORY_RULES) == {"paged", "full", "predicted_peak"}


requests = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 25), st.integers(0, 6)), min_size=1, max_size=14)


@settings(deadline=None, max_examples=150)
@given(
    requests=requests,
    num_blocks=st.integers(12, 40),
    block_size=st.integers(1, 4),
    budget=st.sampled_from([9, 16, 64]),
    prefix_caching=st.booleans(),
    num_shared=st.integers(0, 8),
)
def test_a_predicted_peak_is_never_exceeded_when_predictions_are_right(
    requests, num_blocks, block_size, budget, prefix_caching, num_shared
):
    """Nothing is known of lengths, so max_tokens is predicted, and every request gets as long as that."""
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=budget, max_model_len=num_blocks * block_size)
    driver = SchedulerDriver.build(
        config,
        num_blocks=num_blocks,
        block_size=block_size,
        policy=PolicyConfig(memory="predicted_peak"),
        prefix_caching=prefix_caching,
    )
    for number, (length, max_tokens, num_steps) in enumerate(requests):
        driver.submit(f"r{number}", [*range(num_shared), *[number] * length], max_tokens)
        for _ in range(num_steps):
            driver.step()
    driver.run_to_end()
    assert not growth_preemptions(driver)


@settings(deadline=None, max_examples=60)
@given(requests=requests, num_blocks=st.integers(12, 40))
def test_full_reservation_never_preempts(requests, num_blocks):
    driver = build(num_blocks=num_blocks, memory="full", max_model_len=num_blocks * 4)
    for number, (length, max_tokens, num_steps) in enumerate(requests):
        driver.submit(f"r{number}", [number] * length, max_tokens)
        for _ in range(num_steps):
            driver.step()
    driver.run_to_end()
    assert not [e for e in driver.events if isinstance(e, Preempted)]


def test_a_predicted_peak_holds_more_than_full_reservation():
    def most_running(memory):
        driver = build(num_blocks=40, memory=memory)
        for number in range(8):
            driver.submit(f"r{number}", [number] * 4, 4 + 12 * number)
        most = 0
        while driver.live:
            driver.step()
            most = max(most, driver.scheduler.num_running)
        return most

    assert most_running("full") < most_running("predicted_peak") < most_running("paged")


# -- batchings --------------------------------------------------------------------------------------------------------


def steps_of(batching):
    """Two decode when a long prompt and a short one come; return tokens of decodes and of prompts per step."""
    driver = build(batching=batching, num_blocks=200, max_num_batched_tokens=200 if batching != "stall_free" else 20)
    driver.submit("a", [1] * 3, 6)
    driver.submit("b", [2] * 3, 9)
    driver.step()
    driver.submit("long", [3] * 40, 2)
    driver.submit("short", [4] * 5, 2)
    for _ in range(9):
        driver.step()
    steps = []
    for step in driver.steps[1:]:
        prompts = [length for name, (_, length) in step.entries.items() if name not in step.decodes]
        steps.append((len(step.decodes), sum(prompts)))
    driver.run_to_end()
    return steps


BATCHES = {
    "stall_free": [(2, 18), (2, 18), (2, 9), (4, 0), (2, 0)],  # chunks beside the decodes, inside 20 tokens
    "iteration_level": [(2, 45), (4, 0), (2, 0), (2, 0), (2, 0)],  # whole prompts beside the decodes
    "prompts_first": [(0, 45), (4, 0), (2, 0), (2, 0), (2, 0)],  # whole prompts instead of the decodes
    "static": [(2, 0)] * 5 + [(1, 0)] * 3 + [(0, 45)],  # whole prompts once everybody has ended
}


@pytest.mark.parametrize("batching", sorted(BATCHINGS))
def test_each_batching_fills_the_same_steps_in_its_own_way(batching):
    expected = BATCHES[batching]
    assert steps_of(batching)[: len(expected)] == expected


def test_a_static_batch_is_padded_to_its_longest_and_to_those_that_have_ended():
    driver = build(batching="static", num_blocks=200)
    driver.submit("long", [1] * 10, 5)
    driver.submit("short", [2] * 4, 2)
    plan = driver.plan()
    assert plan.features == StepFeatures(20, 2, 0, 0, 2 * 10 * 10 / 2)
    driver.finish(plan)
    for context in (11, 12, 13, 14):
        plan = driver.plan()
        assert plan.features == StepFeatures(2, 2, 2, 2 * context, 0.0)
        driver.finish(plan)


def test_a_budget_follows_from_the_model_where_prompts_are_whole():
    limits = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=500)
    assert limits_with_budget(limits, PolicyConfig(), None) == limits
    assert limits_with_budget(limits, PolicyConfig(), 32).max_num_batched_tokens == 32
    whole = PolicyConfig(batching="prompts_first")
    assert limits_with_budget(limits, whole, None).max_num_batched_tokens == 508
    assert limits_with_budget(limits, whole, 500).max_num_batched_tokens == 500
    with pytest.raises(ConfigurationError, match=r"\(499\) must be at least max_model_len \(500\)"):
        limits_with_budget(limits, whole, 499)


# -- victims ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("victims", "victim"),
    [("lowest_priority", "low"), ("last_in", "new"), ("least_value", "late")],
)
def test_each_victim_rule_names_another_one(victims, victim):
    driver = build(victims=victims, num_blocks=100)
    driver.submit("late", [1] * 20, 50, slo=Slo(ttft_s=1.0))
    driver.submit("low", [2] * 20, 50, priority=3)
    driver.submit("ordinary", [3] * 20, 50)
    driver.submit("new", [4] * 19, 50, priority=-1)
    driver.step()
    driver.step()
    driver.now_s += 2
    running = driver.scheduler.live.running
    driver.scheduler.find("late").first_token_s = 5.0
    ranked = driver.scheduler.policy.rules.victims.ranked(running, driver.now_s)
    assert ranked[0].request_id == victim


# -- predictions ------------------------------------------------------------------------------------------------------


def asked(length=10, tenant="", max_tokens=10_000):
    return Request(request_id="r", prompt=np.ones(length, np.int32), max_tokens=max_tokens, tenant=tenant)


def test_lengths_are_learned_by_tenant_and_band():
    lengths = OutputLengths()
    assert lengths.predict(asked(max_tokens=77)) == 77  # nothing is known: be prepared for the longest
    for _ in range(30):
        lengths.observe(asked(10, "short"), 20)
        lengths.observe(asked(10, "long"), 900)
        lengths.observe(asked(500, "short"), 100)
    assert lengths.predict(asked(11, "short")) == pytest.approx(20, rel=0.2)
    assert lengths.predict(asked(11, "long")) == pytest.approx(900, rel=0.2)
    assert lengths.predict(asked(400, "short")) == pytest.approx(100, rel=0.2)
    assert lengths.predict(asked(10, "unknown")) == pytest.approx(100, rel=0.2)  # the median of all
    assert lengths.predict(asked(10, "long", max_tokens=50)) == 50


def test_lengths_are_conditioned_on_what_is_generated():
    lengths = OutputLengths()
    for _ in range(60):
        lengths.observe(asked(), 20)
    for _ in range(40):
        lengths.observe(asked(), 500)
    assert lengths.predict(asked()) == pytest.approx(20, rel=0.2)
    assert lengths.predict(asked(), q=0.9) == pytest.approx(500, rel=0.2)
    assert lengths.predict(asked(), 60) == pytest.approx(500, rel=0.2)
    assert lengths.predict(asked(), 5000) == 10_000  # nobody got so long


@settings(deadline=None, max_examples=100)
@given(
    seen=st.lists(st.integers(1, 3000), min_size=20, max_size=80),
    num_output=st.integers(0, 2000),
    quantiles=st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted),
)
def test_quantiles_rise_and_stay_in_range(seen, num_output, quantiles):
    lengths = OutputLengths()
    for length in seen:
        lengths.observe(asked(), length)
    low, high = (lengths.predict(asked(max_tokens=4000), num_output, q) for q in quantiles)
    assert num_output < low <= high <= 4000


def test_tenants_beyond_number_are_forgotten():
    lengths = OutputLengths()
    for number in range(_MANY_BANDS + 100):
        lengths.observe(asked(tenant=f"t{number}"), 5)
    assert len(lengths._by_band) == _MANY_BANDS


# -- step times -------------------------------------------------------------------------------------------------------


def true_time_s(features):
    weights = 0.003 + 64e-6 * features.num_tokens + 30e-9 * features.decode_context_tokens
    return weights + 1.7e-9 * features.prefill_attention


def some_step(rng, *, has_chunk):
    size = int(rng.integers(1, 200))
    context = size * int(rng.integers(100, 3000))
    if not has_chunk:
        return StepFeatures(size, size, size, context, 0.0)
    chunk, prefix = int(rng.integers(1, 2000)), int(rng.integers(0, 4000))
    return StepFeatures(size + chunk, size + 1, size, context, chunk * (prefix + chunk / 2))


class HalfRight:
    """A prior that is off by a factor and a constant."""

    def step_time_s(self, features):
        return 0.6 * true_time_s(features) + 0.002

    def decode_run_s(self, features, num_steps):
        raise NotImplementedError


def error_of(model, rng, has_chunk=True):
    steps = [some_step(rng, has_chunk=has_chunk) for _ in range(200)]
    return float(np.mean([abs(model.step_time_s(step) / true_time_s(step) - 1) for step in steps]))


@pytest.mark.parametrize("prior", [None, HalfRight()])
def test_step_times_are_learned_and_kept_through_an_hour_of_decoding(prior):
    rng = np.random.default_rng(0)
    model = OnlineStepTime(prior)
    for number in range(1500):
        step = some_step(rng, has_chunk=number % 2 == 0)
        model.observe(step, true_time_s(step) * (1 + 0.05 * rng.standard_normal()))
    assert error_of(model, rng) < 0.03
    assert model.relative_error == pytest.approx(0.04, abs=0.03)
    same = StepFeatures(64, 64, 64, 64_000, 0.0)
    for _ in range(20_000):
        model.observe(same, true_time_s(same) * (1 + 0.05 * rng.standard_normal()))
    assert np.linalg.eigvalsh(model._fit.covariance).min() > 0
    assert np.trace(model._fit.covariance) <= 600
    assert error_of(model, rng) < 0.06
    for _ in range(5):  # and one odd step does not overturn it
        model.observe(some_step(rng, has_chunk=True), 3.0)
    assert error_of(model, rng) < 0.3


def test_step_times_follow_a_machine_that_slows_down():
    rng = np.random.default_rng(1)
    model = OnlineStepTime()
    for factor in (1, 2):
        for _ in range(3000):
            step = some_step(rng, has_chunk=True)
            model.observe(step, factor * true_time_s(step))
    step = some_step(rng, has_chunk=True)
    assert model.step_time_s(step) == pytest.approx(2 * true_time_s(step), rel=0.1)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 1000),
    durations=st.lists(st.one_of(st.floats(1e-5, 10), st.sampled_from([0.0, -1.0, np.nan, np.inf])), max_size=40),
)
def test_predictions_are_positive_and_finite_whatever_was_measured(seed, durations):
    rng = np.random.default_rng(seed)
    model = OnlineStepTime()
    for duration_s in durations:
        model.observe(some_step(rng, has_chunk=rng.random() < 0.5), duration_s)
    step = some_step(rng, has_chunk=True)
    assert 0 < model.step_time_s(step) <= model.bound_s(step) <= 1.5 * model.step_time_s(step)
    assert np.isfinite(model.bound_s(step))
