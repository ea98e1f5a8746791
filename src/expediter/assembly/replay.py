"""A trace against a live server, and the simulator's account of the same run.

Both share prompts (token by token), times of sending, limits and scheduler; the simulated one takes its
step times from a model fitted to the live run's own steps. What differs then is what the simulator leaves out: HTTP,
processes, and steps that take longer or shorter than steps like them do on average. With a model from another run
(`ReplayConfig.step_time`) the simulation is a prediction: it knows nothing of the run that it is compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from expediter.assembly.simulation import SimulationConfig, build_simulation
from expediter.core.errors import ConfigurationError, ReplicaError
from expediter.core.plan import StepFeatures
from expediter.core.request import Request
from expediter.core.slo import Slo
from expediter.gateway.info import ServerInfo
from expediter.perfmodel.fitted import FittedModel, fit_step_times
from expediter.runtime.load_client import LoadClient, Outcome, TimedPrompt
from expediter.sim.distribution import Distribution
from expediter.sim.prompt_text import trace_texts
from expediter.sim.report import Report
from expediter.sim.trace import Trace

_WARM_UP_REQUESTS = 6


class _Models(msgspec.Struct):
    class Entry(msgspec.Struct):
        id: str

    data: list[Entry]


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Step(msgspec.Struct):
    sequence: int
    num_tokens: int
    num_seqs: int
    num_decodes: int
    decode_context_tokens: int
    prefill_attention: float
    elapsed_s: float


class _Steps(msgspec.Struct):
    steps: list[_Step]


class _Chat(msgspec.Struct):
    class Choice(msgspec.Struct):
        class Message(msgspec.Struct):
            content: str

        message: Message

    choices: list[Choice]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """How a trace is put to a server.

    Args:
        trace: the requests.
        rate_scale: arrival rate as a multiple of the trace's; None to choose it for the machine.
        prompt_scale, output_scale: lengths as multiples of the trace's.
        load: share of the time that the server needs for the whole slice at once, where the rate is chosen.
        slos: targets, sent with the requests and judged by; several are given to requests in turn.
        step_time: model to simulate with, of an earlier run; None to fit one to the run's own steps.
    Raises:
        ConfigurationError: a number is not above 0, or there are no targets.
    """

    trace: Trace
    slos: tuple[Slo, ...]
    rate_scale: float | None = None
    load: float = 0.6
    prompt_scale: float = 1.0
    output_scale: float = 1.0
    step_time: FittedModel | None = None

    def __post_init__(self) -> None:
        if not self.slos:
            raise ConfigurationError("a replay needs targets to judge by")
        for name in ("rate_scale", "load", "prompt_scale", "output_scale"):
            value = getattr(self, name)
            if value is not None and not (np.isfinite(value) and value > 0):
                raise ConfigurationError(f"{name} must be a finite number above 0, not {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveReport:
    """What the client saw. Fields are those of `sim.report.Report`, of which this is the live counterpart."""

    num_requests: int
    num_failed: int
    first_error: str | None
    span_s: float
    ttft_s: Distribution
    tpot_s: Distribution
    e2e_s: Distribution
    slo_attainment: float
    goodput_rps: float
    output_tokens_per_s: float
    prefix_hit_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """Both accounts of one run.

    Attributes:
        rate_scale: what was used.
        simulated, model: None if the server offers no steps to fit to (another engine).
        fit_error: mean relative error of the model on the steps of the live run.
        step_bias: time that the model gives those steps together, relative to what they took, - 1; away from 0 if the
            model is of an earlier run and the machine has changed its pace.
    """

    rate_scale: float
    live: LiveReport
    simulated: Report | None
    model: FittedModel | None
    fit_error: float | None
    step_bias: float | None


class Replay:
    """One run of a trace against one server.

    Args:
        progress: told (done, total) as requests end, if anybody wants to know.
    """

    def __init__(
        self, config: ReplayConfig, client: LoadClient, progress: Callable[[int, int], None] | None = None
    ) -> None:
        self._config = config
        self._client = client
        self._progress = progress

    async def run(self) -> ReplayReport:
        """Send the trace, then simulate it.

        Raises:
            ReplicaError: the server cannot be reached or answers nonsense. Failed requests are counted, not raised.
        """
        config = self._config
        model = (await self._client.get("/v1/models", _Models)).data[0].id
        info = await self._info()
        texts = trace_texts(config.trace, config.prompt_scale)
        lengths = self._lengths()
        tokens = await self._tokenize(texts) if info else []
        rate = config.rate_scale
        await self._warm_up(model, lengths)
        if rate is None:
            if info is None:
                raise ConfigurationError("the server says nothing of its set-up; give a rate scale")
            model_so_far = config.step_time or fit_step_times(await self._steps(0))
            rate = await self._rate_for_machine(info, model_so_far, tokens, lengths)
        arrivals = config.trace.at_rate(rate).arrival_s
        arrivals = arrivals - arrivals[0]
        prompts = [
            TimedPrompt(arrival_s=float(arrival), prompt=text, max_tokens=length, fields=_target_fields(slo))
            for arrival, text, length, slo in zip(arrivals, texts, lengths, self._targets(), strict=True)
        ]
        since = await self._next_step() if info else 0
        outcomes = await self._send(model, prompts)
        live = _summarize(outcomes, self._targets())
        if info is None:
            return ReplayReport(rate_scale=rate, live=live, simulated=None, model=None, fit_error=None, step_bias=None)
        steps = await self._steps(since)
        fitted = config.step_time or fit_step_times(steps)
        requests = _as_requests(tokens, lengths, [outcome.sent_s for outcome in outcomes], self._targets())
        return ReplayReport(
            rate_scale=rate,
            live=live,
            simulated=_simulate(info, fitted, requests),
            model=fitted,
            fit_error=_relative_error(fitted, steps),
            step_bias=sum(fitted.step_time_s(f) for f, _ in steps) / sum(elapsed_s for _, elapsed_s in steps) - 1,
        )

    async def calibrate(self) -> tuple[float, FittedModel]:
        """Warm a server up; return the rate scale for the configured load, and the step-time model of the warm-up.

        Raises:
            ReplicaError: the server cannot be reached, or says nothing of its set-up and steps.
        """
        info = await self._client.get("/server_info", ServerInfo)
        model = (await self._client.get("/v1/models", _Models)).data[0].id
        lengths = self._lengths()
        await self._warm_up(model, lengths)
        fitted = fit_step_times(await self._steps(0))
        tokens = await self._tokenize(trace_texts(self._config.trace, self._config.prompt_scale))
        return await self._rate_for_machine(info, fitted, tokens, lengths), fitted

    async def ask(self, question: str) -> str:
        """Return the model's answer to one chat message."""
        model = (await self._client.get("/v1/models", _Models)).data[0].id
        body: dict[str, object] = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 64,
            "temperature": 0,
        }
        answer = await self._client.post("/v1/chat/completions", body, _Chat)
        return answer.choices[0].message.content

    def _lengths(self) -> list[int]:
        return [max(1, round(int(n) * self._config.output_scale)) for n in self._config.trace.output_tokens]

    def _targets(self) -> list[Slo]:
        slos = self._config.slos
        return [slos[row % len(slos)] for row in range(len(self._config.trace))]

    async def _info(self) -> ServerInfo | None:
        try:
            return await self._client.get("/server_info", ServerInfo)
        except ReplicaError:
            return None  # another engine: it is measured, not simulated

    async def _tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """The server's own tokens, so that the simulator sees the prefixes that the server sees."""
        return [(await self._client.post("/tokenize", {"prompt": text}, _Tokens)).tokens for text in texts]

    async def _steps(self, since: int) -> list[tuple[StepFeatures, float]]:
        answer = await self._client.get(f"/steps?since={since}", _Steps)
        return [
            (
                StepFeatures(
                    num_tokens=step.num_tokens,
                    num_seqs=step.num_seqs,
                    num_decodes=step.num_decodes,
                    decode_context_tokens=step.decode_context_tokens,
                    prefill_attention=step.prefill_attention,
                ),
                step.elapsed_s,
            )
            for step in answer.steps
            if step.elapsed_s > 0
        ]

    async def _next_step(self) -> int:
        steps = (await self._client.get("/steps", _Steps)).steps
        return steps[-1].sequence + 1 if steps else 0

    async def _warm_up(self, model: str, lengths: Sequence[int]) -> None:
        """A few prompts of the trace's lengths but of other text: first steps are slow, and prefixes stay unknown."""
        config = self._config
        count = min(_WARM_UP_REQUESTS, len(config.trace))
        prompts = [
            TimedPrompt(
                arrival_s=0.0,
                prompt=f"Warm up {index}. " + "again and " * (round(int(num_tokens) * config.prompt_scale) // 2),
                max_tokens=length,
            )
            for index, (num_tokens, length) in enumerate(
                zip(config.trace.input_tokens[:count], lengths[:count], strict=True)
            )
        ]
        for outcome in await self._client.replay(model, prompts, lambda _: None):
            if outcome.error is not None:
                raise ReplicaError(f"the server failed a warm-up request: {outcome.error}")

    async def _rate_for_machine(
        self, info: ServerInfo, fitted: FittedModel, tokens: Sequence[Sequence[int]], lengths: Sequence[int]
    ) -> float:
        """The rate at which the slice keeps this machine busy but not overrun, by simulating it all at once."""
        at_once = _simulate(info, fitted, _as_requests(tokens, lengths, [0.0] * len(tokens), self._targets()))
        arrivals = self._config.trace.arrival_s
        span_s = float(arrivals[-1] - arrivals[0])
        return max(span_s, 1e-9) / (at_once.simulated_s / self._config.load)

    async def _send(self, model: str, prompts: Sequence[TimedPrompt]) -> list[Outcome]:
        done = 0

        def ended(_: Outcome) -> None:
            nonlocal done
            done += 1
            if self._progress is not None:
                self._progress(done, len(prompts))

        return await self._client.replay(model, prompts, ended)


def _target_fields(slo: Slo) -> dict[str, object]:
    """Targets as the server takes them in a body."""
    targets = {"ttft_ms": slo.ttft_s, "tpot_ms": slo.tpot_s, "deadline_ms": slo.e2e_s}
    return {name: 1000 * seconds for name, seconds in targets.items() if seconds is not None}


def _as_requests(
    tokens: Sequence[Sequence[int]], lengths: Sequence[int], arrivals_s: Sequence[float], slos: Sequence[Slo]
) -> list[Request]:
    requests = [
        Request(
            request_id=f"r{index:07d}",
            prompt=np.array(prompt, np.int32),
            max_tokens=length,
            arrival_s=arrival_s,
            slo=slo,
        )
        for index, (prompt, length, arrival_s, slo) in enumerate(zip(tokens, lengths, arrivals_s, slos, strict=True))
    ]
    return sorted(requests, key=lambda request: request.arrival_s)


def _simulate(info: ServerInfo, model: FittedModel, requests: Sequence[Request]) -> Report:
    config = SimulationConfig(
        preset=info.preset,
        replicas=info.replicas,
        knows_step_time=False,  # a live replica learns its step times from nothing, too
        routing=info.routing,
        policy=info.policy,
        prefix_caching=info.prefix_caching,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        num_host_blocks=info.num_host_blocks,
        block_swap_s=info.block_swap_s,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        max_model_len=info.max_model_len,
        step_time=model,
    )
    return build_simulation(config).run(requests)


def _relative_error(model: FittedModel, steps: Sequence[tuple[StepFeatures, float]]) -> float:
    return float(np.mean([abs(model.step_time_s(features) - elapsed) / elapsed for features, elapsed in steps]))


def _summarize(outcomes: Sequence[Outcome], slos: Sequence[Slo]) -> LiveReport:
    finished = [outcome for outcome in outcomes if outcome.error is None and outcome.ttft_s is not None]
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    span_s = max(outcome.end_s for outcome in outcomes) - min(outcome.sent_s for outcome in outcomes)
    met = sum(_is_met(outcome, slo) for outcome, slo in zip(outcomes, slos, strict=True))
    num_prompt = sum(outcome.num_prompt_tokens for outcome in finished)
    return LiveReport(
        num_requests=len(outcomes),
        num_failed=len(outcomes) - len(finished),
        first_error=errors[0] if errors else None,
        span_s=span_s,
        ttft_s=Distribution.of(outcome.ttft_s for outcome in finished),
        tpot_s=Distribution.of(outcome.tpot_s for outcome in finished),
        e2e_s=Distribution.of(outcome.end_s - outcome.sent_s for outcome in finished),
        slo_attainment=met / len(outcomes),
        goodput_rps=met / span_s,
        output_tokens_per_s=sum(outcome.num_output_tokens for outcome in finished) / span_s,
        prefix_hit_rate=sum(outcome.num_cached_tokens for outcome in finished) / max(num_prompt, 1),
    )


def _is_met(outcome: Outcome, slo: Slo) -> bool:
    if outcome.error is not None or outcome.ttft_s is None:
        return False
    return slo.is_met(outcome.ttft_s, outcome.tpot_s, outcome.end_s - outcome.sent_s)
