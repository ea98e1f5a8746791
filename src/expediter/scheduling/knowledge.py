"""What a scheduler has learned of its replica: output lengths, step times, the speed of prefilling under load."""

from __future__ import annotations

import math

from expediter.core.plan import StepFeatures, StepPlan, StepResult
from expediter.core.ports import StepTimeModel
from expediter.core.request import Request, RequestState
from expediter.scheduling.prediction import OutputLengths
from expediter.scheduling.step_time import OnlineStepTime

_MEMORY_TOKENS = 50_000.0


class Knowledge:
    """Shared by the parts of one scheduler; written only from results.

    Args:
        prior: analytic step-time model to start from, if there is one.
        block_swap_s: time to move one block between device and host, one way; None if it is not known.
    """

    def __init__(self, prior: StepTimeModel | None = None, block_swap_s: float | None = None) -> None:
        self.block_swap_s = block_swap_s
        self.lengths = OutputLengths()
        self.step_time = OnlineStepTime(prior)
        self._is_asked = False
        self._busy_s = 0.0
        self._busy_tokens = 0.0
        self._busy_all_tokens = 0.0
        self._busy_steps = 0.0

    def ask(self) -> None:
        """Say that step times will be needed: a policy that never asks pays nothing for learning them."""
        self._is_asked = True

    def observe(self, plan: StepPlan, result: StepResult, *, is_full: bool) -> None:
        """Learn from a finished plan.

        Args:
            is_full: it took all the prefill tokens that its budget allowed, so it shows the speed under load.
        """
        if not self._is_asked or plan.num_swapped_blocks:
            return  # moves take time that no feature accounts for
        features = plan.features
        durations = result.durations_s or (result.elapsed_s,)
        for index, duration_s in enumerate(durations):
            if self.step_time.wants(plan.step_id + index):
                self.step_time.observe(features.later(index), duration_s)
            if is_full and features.num_prefill_tokens > 0:
                self._observe_load(features, duration_s)

    def _observe_load(self, features: StepFeatures, duration_s: float) -> None:
        fade = math.exp(-features.num_prefill_tokens / _MEMORY_TOKENS)
        self._busy_s = self._busy_s * fade + duration_s
        self._busy_tokens = self._busy_tokens * fade + features.num_prefill_tokens
        self._busy_steps = self._busy_steps * fade + 1
        self._busy_all_tokens = self._busy_all_tokens * fade + features.num_tokens

    @property
    def prefill_token_s(self) -> float:
        """Seconds per prefill token while there is more to prefill than a step can take, decodes going on beside."""
        if self._busy_tokens > 0:
            return self._busy_s / self._busy_tokens
        many = 2048
        return self.step_time.step_time_s(StepFeatures(many, 1, 0, 0, many * many / 2)) / many

    def recompute_s(self, num_tokens: int, num_kept: int, num_decodes: int, context_tokens: int) -> float:
        """Return the least time that computing tokens again is likely to take.

        A request that resumes computes its newest token anyway, beside the decodes that go on; this is what
        `num_tokens` before it add to that step. It is 0 as long as nothing is known of step times.

        Args:
            num_kept: tokens before those, whose KV exists.
            num_decodes, context_tokens: of the decodes.
        """
        if not self.step_time.knows_something:
            return 0.0

        def step_s(chunk: int, prefix: int) -> float:
            attention = chunk * (prefix + chunk / 2)
            features = StepFeatures(num_decodes + chunk, num_decodes + 1, num_decodes, context_tokens, attention)
            return self.step_time.step_time_s(features)

        added_s = max(0.0, step_s(num_tokens + 1, num_kept) - step_s(1, num_kept + num_tokens))
        return added_s / (1 + min(0.5, 2 * self.step_time.relative_error))

    @property
    def busy_tokens_per_s(self) -> float:
        """Tokens per second, prompts and outputs together, while there is more to prefill than a step can take."""
        return self._busy_all_tokens / self._busy_s if self._busy_s > 0 else math.inf

    def pace_s(self, state: RequestState, now_s: float) -> float:
        """Return the time per output token that a request can afford from its first token at `now_s` on."""
        request = state.request
        if request.slo.tpot_s is not None:
            return request.slo.tpot_s
        if request.slo.e2e_s is None:
            return math.inf
        left = max(1, self.lengths.predict(request, len(state.output), 0.9) - len(state.output))
        # Who starts too late for its deadline must not force short steps, and a worse use of the device, on everybody.
        return max(self.loaded_token_s, (request.arrival_s + request.slo.e2e_s - now_s) / left)

    def first_token_deadline_s(self, request: Request) -> float:
        """Return when the first token is due: by its target, or so that the rest can be done by the end's; or never."""
        slo = request.slo
        deadline_s = math.inf if slo.ttft_s is None else request.arrival_s + slo.ttft_s
        if slo.e2e_s is not None:
            decoding_s = self.lengths.predict(request, 0, 0.9) * self.loaded_token_s
            deadline_s = min(deadline_s, request.arrival_s + slo.e2e_s - decoding_s)
        return deadline_s

    @property
    def loaded_token_s(self) -> float:
        """Duration of a step, and so of an output token, under load."""
        if self._busy_steps > 0:
            return self._busy_s / self._busy_steps
        return self.step_time.step_time_s(StepFeatures(64, 64, 64, 64 * 1024, 0.0))
