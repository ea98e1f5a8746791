"""The `soak` profile: `pytest tests/scheduling/test_state_machine.py --hypothesis-profile=soak --timeout=0`."""

from hypothesis import settings

settings.register_profile("soak", max_examples=10_000, deadline=None, database=None, print_blob=True)
