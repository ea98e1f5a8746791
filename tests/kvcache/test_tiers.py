"""The host tier: every block is free, held or being read."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from expediter.core.errors import ConfigurationError, InvariantError
from expediter.kvcache.tiers import HostTier

NONE = np.empty(0, np.int32)


def test_blocks_go_from_free_to_held_to_read_to_free():
    tier = HostTier(5)
    assert tier.put(7, 2, 3, 11).tolist() == [0, 1, 2]
    assert (tier.num_free, tier.num_held, tier.num_in_transit) == (2, 3, 0)
    assert tier.find(7)[::2] == (2, 11)
    assert tier.take(7).blocks.tolist() == [0, 1, 2]
    assert tier.find(7) is None
    assert (tier.num_free, tier.num_held, tier.num_in_transit) == (2, 0, 3)
    assert tier.put(8, 0, 3, 12) is None, "what is being read cannot be overwritten"
    tier.settle(NONE)
    assert tier.num_free == 5
    assert tier.put(8, 0, 3, 12).tolist() == [0, 1, 2]


def test_a_full_tier_refuses_and_changes_nothing():
    tier = HostTier(2)
    assert tier.put(1, 0, 3, 9) is None
    assert tier.put(1, 0, 2, 8).tolist() == [0, 1]
    assert tier.put(2, 0, 1, 4) is None
    tier.drop(1)
    tier.drop(1)  # an abort of who holds nothing is no error
    assert tier.num_free == 2
    assert HostTier(0).put(1, 0, 1, 4) is None


def test_a_copy_that_could_not_be_written_is_given_up():
    tier = HostTier(6)
    for owner in (1, 2, 3):
        tier.put(owner, 0, 2, 8)
    tier.settle(np.array([3, 5], np.int32))
    assert tier.find(1) is not None
    assert tier.find(2) is None
    assert tier.find(3) is None
    assert tier.num_free == 4
    tier.check()


def test_what_must_not_happen_raises():
    with pytest.raises(ConfigurationError, match="-1 blocks"):
        HostTier(-1)
    tier = HostTier(4)
    tier.put(1, 0, 2, 8)
    with pytest.raises(InvariantError, match="twice"):
        tier.put(1, 0, 1, 4)
    with pytest.raises(InvariantError, match="holds no host blocks"):
        tier.take(2)
    tier._in_transit.append(np.array([1], np.int32))
    with pytest.raises(InvariantError, match="two places"):
        tier.check()


class TierMachine(RuleBasedStateMachine):
    """Any order of calls, against sets."""

    @initialize(num_blocks=st.integers(0, 8))
    def build(self, num_blocks):
        self.tier = HostTier(num_blocks)
        self.held, self.read = {}, set()

    @rule(owner=st.integers(0, 5), count=st.integers(1, 4))
    def put(self, owner, count):
        if owner in self.held:
            return
        taken = set().union(self.read, *self.held.values())
        blocks = self.tier.put(owner, 0, count, count)
        if self.tier.num_blocks - len(taken) < count:
            assert blocks is None
        else:
            self.held[owner] = set(blocks.tolist())
            assert len(self.held[owner]) == count
            assert not self.held[owner] & taken

    @rule(owner=st.integers(0, 5), reads=st.booleans())
    def give_back(self, owner, reads):
        if reads and owner in self.held:
            assert set(self.tier.take(owner).blocks.tolist()) == self.held[owner]
            self.read |= self.held.pop(owner)
        else:
            self.tier.drop(owner)
            self.held.pop(owner, None)

    @rule(failed=st.sets(st.integers(0, 7), max_size=2))
    def settle(self, failed):
        self.tier.settle(np.array(sorted(failed), np.int32))
        self.read = set()
        self.held = {owner: blocks for owner, blocks in self.held.items() if not blocks & failed}

    @invariant()
    def is_consistent(self):
        if hasattr(self, "tier"):
            self.tier.check()
            counts = (sum(map(len, self.held.values())), len(self.read))
            assert (self.tier.num_held, self.tier.num_in_transit) == counts


TestTierMachine = TierMachine.TestCase
