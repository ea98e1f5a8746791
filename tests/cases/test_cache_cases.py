"""What is reused, what is evicted, and that nothing is ever mixed up."""

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expediter.kvcache.node import Node
from expediter.kvcache.radix import RadixTree
from expediter.scheduling.config import SchedulerConfig
from expediter.testing.scheduler_driver import SchedulerDriver

CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)


@pytest.mark.parametrize("block_size", [1, 2, 4, 5])
@pytest.mark.parametrize("num_blocks_of_prompt", [1, 2, 3])
@pytest.mark.parametrize("max_tokens", [1, 2, 6])
def test_the_same_prompt_of_whole_blocks_again_still_computes(block_size, num_blocks_of_prompt, max_tokens):
    """Case 8 (vllm #30320, #53706, LMCache PR#3322): all is cached, yet a step needs a token to sample from."""
    prompt = list(range(block_size * num_blocks_of_prompt))
    driver = SchedulerDriver.build(CONFIG, num_blocks=24, block_size=block_size)
    for name in ("cold", "warm", "warmer"):
        driver.submit(name, prompt, max_tokens)
        driver.run_to_end()
    assert driver.requests["cold"].admissions == [0]
    for name in ("warm", "warmer"):
        assert driver.requests[name].admissions == [len(prompt) - block_size]
        entries = [step.entries[name] for step in driver.steps if name in step.entries]
        assert entries[0] == (len(prompt) - block_size, block_size)
        assert driver.output(name) == driver.output("cold")


@settings(deadline=None, max_examples=60)
@given(block_size=st.integers(1, 4), chain=st.integers(2, 8), data=st.data())
def test_a_full_cache_gives_up_the_tail_of_a_chain_first(block_size, chain, data):
    """Case 10 (llm-d-inference-sim #704): the chain 1-2-3 fills the cache, one block is needed, 3 goes, 1-2 hit."""
    needed = data.draw(st.integers(1, chain - 1))
    prompt = list(range(chain * block_size))
    driver = SchedulerDriver.build(CONFIG, num_blocks=chain, block_size=block_size)
    driver.submit("chain", prompt, 1)
    driver.run_to_end()
    assert driver.scheduler.kv.num_cached_blocks == chain
    driver.submit("other", [49] * (needed * block_size), 1)
    driver.run_to_end()
    kept = driver.scheduler.kv.match(driver.requests["chain"].request.prompt.tobytes() + bytes(4), "")
    assert kept.num_blocks == chain - needed
    driver.submit("again", prompt, 1)
    driver.run_to_end()
    assert driver.requests["again"].admissions == [(chain - needed) * block_size]


@settings(deadline=None, max_examples=60)
@given(block_size=st.integers(2, 5), num_cached=st.integers(1, 5), partial=st.integers(1, 4), needed=st.integers(1, 4))
def test_blocks_without_reusable_content_are_taken_first(block_size, num_cached, partial, needed):
    """Case 11 (vllm PR#42656): half-filled blocks are never hit again, so they go before cached ones."""
    partial = min(partial, block_size - 1)
    driver = SchedulerDriver.build(CONFIG, num_blocks=num_cached + needed, block_size=block_size)
    prompt = [*range(num_cached * block_size), *[48] * partial]
    driver.submit("first", prompt, 1)
    driver.run_to_end()
    assert driver.scheduler.kv.num_cached_blocks == num_cached
    driver.submit("other", [49] * (needed * block_size), 1)
    driver.run_to_end()
    assert driver.scheduler.kv.num_cached_blocks == num_cached + needed
    driver.submit("again", prompt, 1)
    driver.run_to_end()
    assert driver.requests["again"].admissions == [num_cached * block_size]


@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("num_output", [1, 4, 9])
def test_a_next_turn_reuses_the_answer_of_the_last(block_size, num_output):
    """Cases 8 and 11, for outputs: what a sequence generated stays as reusable as its prompt, in whole blocks."""
    driver = SchedulerDriver.build(CONFIG, num_blocks=64, block_size=block_size)
    driver.submit("first", range(5), num_output)
    driver.run_to_end()
    driver.submit("second", [*range(5), *driver.output("first"), 7, 7], 2)
    driver.run_to_end()
    stored = 5 + num_output - 1  # the KV of the last token was never computed
    assert driver.requests["second"].admissions == [stored // block_size * block_size]


class CollidingBytes(bytes):
    """Tokens whose every slice has the same hash."""

    def __hash__(self):
        return 1

    def __eq__(self, other):
        return bytes.__eq__(self, other)

    def __getitem__(self, index):
        return CollidingBytes(bytes.__getitem__(self, index))

    def __add__(self, other):
        return CollidingBytes(bytes.__add__(self, other))


@settings(deadline=None, max_examples=40)
@given(prompts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=2, max_size=6))
def test_colliding_hashes_never_mix_up_prompts(prompts):
    """Case 12 (CVE-2025-25183): with a constant hash there is no hit across prompts, and every output is right."""
    match, insert, tokens_of = RadixTree.match, RadixTree.insert, Node.tokens.fget
    admissions = []
    for is_colliding in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if is_colliding:
                patch.setattr(
                    RadixTree, "match", lambda tree, tokens, *args: match(tree, CollidingBytes(tokens), *args)
                )
                patch.setattr(
                    RadixTree, "insert", lambda tree, tokens, *args: insert(tree, CollidingBytes(tokens), *args)
                )
                patch.setattr(Node, "tokens", property(lambda node: CollidingBytes(tokens_of(node))))
            driver = SchedulerDriver.build(CONFIG, num_blocks=12, block_size=2)
            for number, prompt in enumerate(prompts):
                driver.submit(f"r{number}", prompt, 3)
                driver.run_to_end()
            for node in driver.scheduler.kv.tree.nodes:
                assert hash(node.tokens) == 1 or not is_colliding
            admissions.append([request.admissions for request in driver.requests.values()])
    assert admissions[0] == admissions[1]


PROGRAM = """
from expediter.scheduling.config import SchedulerConfig
from expediter.testing.scheduler_driver import SchedulerDriver

config = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=9, max_model_len=64, max_bypasses=2)
driver = SchedulerDriver.build(config, num_blocks=9, block_size=2, ordering="priority")
for number in range(12):
    prompt = [*range(number % 5), *[number] * (number % 4), 7]
    driver.submit(f"r{number}", prompt, 5, priority=number % 2, cache_salt="ab"[number % 2])
    driver.step()
driver.run_to_end()
print([step for step in driver.steps])
print([(r.request_id, r.admissions, r.output) for r in driver.requests.values()])
"""


def test_decisions_do_not_depend_on_the_hash_seed():
    """Cases 12 and 13 (LMCache PR#1380, #2535): processes with different PYTHONHASHSEED decide and hit alike."""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(outputs) == 1
    assert "preempted=('r" in outputs.pop()


@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
@pytest.mark.parametrize("num_shared_blocks", [1, 2])
@pytest.mark.parametrize("num_sharers", [2, 3, 4])
def test_a_shared_block_on_the_edge_is_freed_once(block_size, num_shared_blocks, num_sharers):
    """Case 15 (sglang-jax PR#982, sglang #35270): sequences end with their last slot on a block edge.

    They share a prefix, and they end at different times; the shared blocks count once, to the last owner.
    """
    shared = list(range(num_shared_blocks * block_size))
    driver = SchedulerDriver.build(CONFIG, num_blocks=64 // block_size, block_size=block_size)
    kv = driver.scheduler.kv
    driver.submit("first", shared, 1)
    driver.run_to_end()
    for number in range(num_sharers):
        # The last output token is not stored: prompt + max_tokens - 1 tokens fill whole blocks.
        driver.submit(f"s{number}", [*shared, *[40 + number] * block_size], 1 + (number + 1) * block_size)
    driver.step()
    assert kv.pool.refs.max() == num_sharers
    while driver.live:
        owners = sum(1 for request in driver.live if request.is_running)
        shared_ids = kv.tables.ids[driver.scheduler.find(driver.live[0].request_id).slot, :num_shared_blocks]
        assert (kv.pool.refs[shared_ids] == owners).all()
        assert kv.num_used_blocks == num_shared_blocks + sum(
            -(-(r.num_computed_tokens) // block_size) - num_shared_blocks for r in driver.live
        )
        driver.step()
    driver.run_to_end()


def test_a_salt_is_a_wall():
    """Case 13 (LMCache #2535), the salt's part: equal prompts under different salts never share a block."""
    driver = SchedulerDriver.build(CONFIG, num_blocks=32, block_size=2)
    prompt = list(range(9))
    for name, salt in (("a", ""), ("b", "tenant"), ("c", "tenant"), ("d", "")):
        driver.submit(name, prompt, 2, cache_salt=salt)
        driver.run_to_end()
    assert [driver.requests[name].admissions for name in "abcd"] == [[0], [0], [8], [8]]
