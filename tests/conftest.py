"""Hypothesis: in CI the same examples every time, so that a red run means a change; elsewhere fresh ones."""

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("dev", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")
