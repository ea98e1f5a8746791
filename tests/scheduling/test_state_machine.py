"""The stateful test; `--hypothesis-profile=soak --timeout=0` runs thousands of fresh examples instead of a few."""

from hypothesis import HealthCheck, settings
from scheduler_machine import SchedulerMachine

TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = (
    settings(stateful_step_count=60, suppress_health_check=list(HealthCheck))
    if settings.get_current_profile_name() == "soak"
    else settings(max_examples=350, stateful_step_count=40, deadline=None, derandomize=True, database=None)
)
