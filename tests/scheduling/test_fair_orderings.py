"""Orderings that share service between tenants: how equal it is, and what counts."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from ordering_builders import STEM, build, made

from expediter.core.events import Preempted
from expediter.kvcache.manager import KVCacheManager
from expediter.scheduling.ordering.fair import DeficitPrefix, FairShare
from expediter.scheduling.ordering.queue import WaitingQueue


def rounds_of(ordering, *, num_steps, weights, costs, seed):
    """Serve tenants that always wait, one request at a time; return the largest gap of weighted service."""
    rng = np.random.default_rng(seed)
    queue, service = WaitingQueue(ordering), dict.fromkeys(costs, 0.0)
    sequence = 0

    def arrive(tenant):
        nonlocal sequence
        length = int(rng.integers(1, costs[tenant] + 1))
        queue.push(made(sequence, [sequence % 40] * length, tenant=tenant, arrival_s=float(sequence)), 0.0)
        sequence += 1

    for tenant in costs:
        arrive(tenant)
        arrive(tenant)
    largest = 0.0
    for _ in range(num_steps):
        head = queue.first(0.0)
        queue.remove(head)
        tenant, length = head.request.tenant, head.num_known_tokens
        ordering.admitted(head, length, 0)
        service[tenant] += (length + 2) / weights.get(tenant, 1.0)
        ordering.left(head, 0)
        arrive(tenant)
        largest = max(largest, max(service.values()) - min(service.values()))
    return largest


@settings(deadline=None, max_examples=40)
@given(
    costs=st.dictionaries(st.sampled_from("abcd"), st.integers(1, 300), min_size=2),
    weights=st.dictionaries(st.sampled_from("abcd"), st.sampled_from([0.5, 1.0, 3.0])),
    seed=st.integers(0, 99),
    is_deficit=st.booleans(),
)
def test_tenants_that_always_wait_get_equal_service_within_the_bound(costs, weights, seed, is_deficit):
    quantum = 500.0
    kv = KVCacheManager(num_blocks=8, block_size=4, max_num_seqs=1, max_model_len=32)
    ordering = DeficitPrefix(kv, weights, quantum) if is_deficit else FairShare(weights)
    gap = rounds_of(ordering, num_steps=300, weights=weights, costs=costs, seed=seed)
    longest = max((cost + 2) / weights.get(tenant, 1.0) for tenant, cost in costs.items())
    assert gap <= 2 * longest + (quantum if is_deficit else 0.0)


def serve_one(ordering, sequence, tenant, num_tokens, decodes=0, clock=0):
    state = made(sequence, [0] * num_tokens, tenant=tenant)
    ordering.push(state, 0.0)
    ordering.remove(state)
    ordering.admitted(state, num_tokens, clock)
    if decodes:
        ordering.joined(state, clock)
        ordering.left(state, clock + decodes)
    return state


def test_a_tenant_that_returns_is_lifted_to_the_least_that_waits():
    ordering = FairShare()
    serve_one(ordering, 0, "a", 500)
    ordering.push(made(1, tenant="a"), 0.0)
    serve_one(ordering, 2, "b", 900)  # lifted to a's 502, too
    ordering.push(made(3, tenant="b"), 0.0)
    assert (ordering.service("a"), ordering.service("b")) == (502, 502 + 902)
    ordering.push(made(4, tenant="new"), 0.0)
    assert ordering.service("new") == 502


def test_a_tenant_that_returns_when_nobody_waits_is_lifted_to_who_waited_last():
    ordering = FairShare()
    serve_one(ordering, 0, "a", 500)
    ordering.push(made(1, tenant="new"), 0.0)
    assert ordering.service("new") == 502


def test_who_was_tried_in_vain_is_not_lifted():
    ordering = FairShare()
    rich, poor = made(0, [0] * 50, tenant="rich"), made(1, tenant="poor")
    ordering.push(rich, 0.0)
    ordering.push(poor, 0.0)
    ordering.remove(rich)
    ordering.admitted(rich, 50, 0)
    ordering.push(made(2, tenant="rich"), 0.0)
    assert ordering.first(0.0) is poor
    ordering.remove(poor)
    ordering.put_back(poor, 0.0)
    assert ordering.service("poor") == 0
    assert ordering.first(0.0) is poor


def test_cached_tokens_are_free_and_weights_divide():
    driver = build("fair_share", tenant_weights={"a": 4.0})
    ordering = driver.scheduler.policy.rules.ordering
    driver.submit("cold", [*STEM, 1], 5, tenant="b")
    driver.run_to_end()
    assert ordering.service("b") == 21 + 2 * 5
    driver.submit("warm", [*STEM, 1], 5, tenant="a")
    driver.run_to_end()
    assert ordering.service("a") == 31 + (1 + 2 * 5) / 4  # lifted to b's, then one new token


def test_recomputation_is_nobodys_service():
    driver = build("fair_share", max_num_seqs=2, num_blocks=8, block_size=4)
    driver.submit("a", [1] * 8, 14, tenant="a")
    driver.submit("b", [2] * 8, 14, tenant="b")
    driver.run_to_end()
    assert [e for e in driver.events if isinstance(e, Preempted)]
    services = [driver.scheduler.policy.rules.ordering.service(tenant) for tenant in "ab"]
    assert services == [8 + 2 * 14] * 2


def test_a_deficit_is_not_forgiven_to_who_always_comes_back():
    """A tenant whose queue is empty after each start must not get a new quantum each time."""
    kv = KVCacheManager(num_blocks=8, block_size=4, max_num_seqs=1, max_model_len=32)
    ordering = DeficitPrefix(kv, quantum=100.0)
    patient = [made(number, [7] * 98, tenant="patient", arrival_s=1.0) for number in range(1000, 1050)]
    for state in patient:
        ordering.push(state, 1.0)
    service = {"patient": 0.0, "eager": 0.0}
    for number in range(60):
        ordering.push(made(number, [3] * 98, tenant="eager", arrival_s=0.0), 1.0)
        head = ordering.first(1.0)
        ordering.remove(head)
        ordering.admitted(head, 98, 0)
        service[head.request.tenant] += 100.0
    assert abs(service["patient"] - service["eager"]) <= 2 * 100 + 100


def test_the_first_of_many_tenants_is_found_without_looking_at_them_all(monkeypatch):
    kv = KVCacheManager(num_blocks=8, block_size=4, max_num_seqs=1, max_model_len=64)
    ordering = DeficitPrefix(kv, quantum=50.0)
    calls = 0
    first = WaitingQueue.first

    def counted(queue, now_s):
        nonlocal calls
        calls += 1
        return first(queue, now_s)

    for number in range(2000):
        ordering.push(made(number, [number % 40] * 40, tenant=f"t{number}"), 0.0)
    monkeypatch.setattr(WaitingQueue, "first", counted)
    for number in range(2000):
        head = ordering.first(0.0)
        ordering.remove(head)
        ordering.admitted(head, 40, 0)
        ordering.push(made(5000 + number, [number % 40] * 40, tenant=head.request.tenant), 0.0)
    assert calls <= 20 * 2000


def test_idle_tenants_are_forgotten():
    ordering = FairShare()
    for number in range(10_000):
        serve_one(ordering, number, f"t{number}", 3)
    assert len(ordering._ledger._accounts) <= 2100
