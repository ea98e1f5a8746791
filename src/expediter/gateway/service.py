"""From a checked body to submitted requests: prompts, limits, defaults."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeVar

from expediter.core.errors import ConfigurationError
from expediter.core.ports import Clock
from expediter.core.request import CacheHint, Grammar, Request, SamplingParams
from expediter.engine.detokenizer import IncrementalDetokenizer, StopMatcher
from expediter.engine.sampling_params import validate_sampling, validate_token_ids
from expediter.engine.tokenizer import Tokenizer
from expediter.gateway.bodies import MAX_CHOICES, GenerationBody, PinHint
from expediter.gateway.chat_body import ChatBody
from expediter.gateway.errors import ApiError, bad_request, no_such_model
from expediter.gateway.generation import Choice, Generation
from expediter.gateway.grammars import Grammars, check_end, spec_of
from expediter.gateway.info import ServerInfo
from expediter.gateway.prompts import Prompt, Prompts
from expediter.gateway.recent import RecentRequests
from expediter.gateway.tenants import Tenant
from expediter.gateway.terms import Terms
from expediter.gateway.tools.choice import ToolUse
from expediter.gateway.tools.families import tool_format_of
from expediter.runtime.supervisor import Supervisor

_CONTEXT_TOKENS: Final = 8
"""End of the prompt that a detokenizer may want to see."""
_INT64: Final = 2**63
_MIN_TOP_P: Final = 1e-6
"""Nothing but the best token; what a `top_p` of 0 means to other servers."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """What the gateway promises its clients.

    Args:
        model_names: names under which the model is served; responses carry the first.
        max_model_len: longest prompt plus output, in tokens.
        num_kv_tokens: tokens that the smallest replica's KV pool holds.
        info: the set-up, for who asks.
        max_recent: newest names of requests that can be asked about.
    Raises:
        ConfigurationError: a value is out of range.
    """

    model_names: tuple[str, ...]
    max_model_len: int
    num_kv_tokens: int
    info: ServerInfo
    max_recent: int = 4096

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise ConfigurationError("the served model needs a name")
        if self.max_model_len < 1 or self.num_kv_tokens < 1:
            raise ConfigurationError("max_model_len and the KV pool must be at least 1 token")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is generated, beside what a body says.

    Args:
        max_tokens: as asked for; None for the default.
        default_max_tokens: where there is room for it.
        num_alternatives: logprobs per token, None for none.
        num_per_prompt: sequences of each prompt.
        grammar: what the output has to match.
        prompt_field: name of what the prompts come from, for errors.
    """

    prompts: Sequence[Prompt]
    terms: Terms
    grammar: Grammar | None
    max_tokens: int | None
    default_max_tokens: int
    num_alternatives: int | None
    num_per_prompt: int
    parses_calls: bool = False
    prompt_field: str = "messages"


class Service:
    """Turns bodies into generations.

    Args:
        text: the model's tokenizer and chat template.
        grammars: compiles what outputs have to match.
    Attributes:
        prompts: makes prompts of what clients send.
        recent: what clients may still ask about.
    """

    def __init__(
        self,
        config: GatewayConfig,
        supervisor: Supervisor,
        text: Tokenizer,
        clock: Clock,
        grammars: Grammars,
    ) -> None:
        self.config = config
        self.supervisor = supervisor
        self.text = text
        self.grammars = grammars
        self.recent = RecentRequests(config.max_recent)
        self._clock = clock
        self._ids = itertools.count()
        self._tool_format = tool_format_of(text.chat_template)
        self.prompts = Prompts(text, self._tool_format)

    def close(self) -> None:
        self.prompts.close()

    def model_names(self, tenant: Tenant) -> list[str]:
        """Return the names that a tenant may use."""
        return [name for name in self.config.model_names if tenant.may_use(name)]

    def model_name(self, asked: str | None, tenant: Tenant) -> str:
        """Return the name to answer with.

        Raises:
            ApiError: 404, there is no such model for this tenant.
        """
        names = self.model_names(tenant)
        if asked is None and names:
            return names[0]
        if asked not in names:
            raise no_such_model(names)
        return asked

    async def grammar(self, body: GenerationBody, tenant: str, tools: ToolUse | None = None) -> Grammar | None:
        """Return what the output has to match, compiled once for certain; None for anything.

        Args:
            tenant: whose request it is.
        Raises:
            ApiError: it is wrong, or did not compile in time.
            CapacityError: it cannot be compiled now.
        """
        spec = spec_of(body)
        if tools is not None and tools.is_on:
            # Schemas may be large; writing them into a grammar is not for the event loop.
            spec = await asyncio.to_thread(tools.grammar, self._tool_format, spec)
        if spec is None:
            return None
        check_end(body, spec)
        return await self.grammars.compile(spec, tenant)

    async def chat(self, body: ChatBody, terms: Terms) -> Generation:
        """Return the generation of a conversation, not submitted yet.

        Raises:
            ApiError, RequestError: a field is wrong, or the conversation does not fit.
            CapacityError: its grammar cannot be compiled now.
        """
        if body.top_logprobs is not None and not body.logprobs:
            raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
        tools = body.tool_use()
        prompt = await self.chat_prompt(body, tools)
        asked = Asked(
            prompts=[prompt],
            terms=terms,
            grammar=await self.grammar(body, terms.tenant, tools),
            max_tokens=body.max_completion_tokens or body.max_tokens,
            default_max_tokens=self.config.max_model_len,
            num_alternatives=body.num_alternatives,
            num_per_prompt=body.n or 1,
            parses_calls=tools.is_on,
        )
        return self.generation(body, asked)

    async def chat_prompt(self, body: ChatBody, tools: ToolUse) -> Prompt:
        """Return a conversation's prompt."""
        continue_final = body.continue_final_message is True
        if continue_final and body.add_generation_prompt:
            raise bad_request("the final message is either continued or answered", "continue_final_message")
        return await self.prompts.of_chat(
            body.messages,
            tools,
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final=continue_final,
        )

    def generation(self, body: GenerationBody, asked: Asked) -> Generation:
        """Return the generation of a body, not submitted yet.

        Raises:
            ApiError, RequestError: a field is wrong, or a prompt does not fit.
        """
        if len(asked.prompts) * asked.num_per_prompt > MAX_CHOICES:
            raise bad_request(f"prompts times n must not exceed {MAX_CHOICES}", "n")
        if body.stream_options is not None and not body.stream:
            raise bad_request("stream_options needs stream to be true", "stream_options")
        sampling = self._sampling(body, asked.num_alternatives)
        stop_token_ids = self._stop_token_ids(body)
        terms = asked.terms
        arrival_s = self._clock.now() if terms.arrived_s is None else terms.arrived_s
        choices: list[Choice] = []
        for prompt in asked.prompts:
            length = self._max_tokens(len(prompt.tokens), asked)
            if (body.min_tokens or 0) > length:
                raise bad_request(f"min_tokens must not exceed max_tokens ({length})", "min_tokens")
            for number in range(asked.num_per_prompt):
                request = Request(
                    request_id=f"r{next(self._ids)}",
                    prompt=prompt.tokens,
                    max_tokens=length,
                    min_tokens=body.min_tokens or 0,
                    stop_token_ids=stop_token_ids,
                    sampling=_with_seed(sampling, number),
                    grammar=asked.grammar,
                    priority=terms.priority,
                    cache_salt=terms.cache_salt,
                    cache_hint=_cache_hint(body.cache_hint),
                    tenant=terms.tenant,
                    session=terms.session,
                    slo=terms.slo,
                    slo_class=terms.slo_class,
                    value=terms.value,
                    refuse_late=terms.refuse_late,
                    arrival_s=arrival_s,
                )
                choices.append(self._choice(len(choices), request, body, asked))
        deadline_s = None if terms.deadline_s is None else arrival_s + terms.deadline_s
        return Generation(self.supervisor, choices, asked.num_per_prompt, self._clock, deadline_s)

    def _choice(self, index: int, request: Request, body: GenerationBody, asked: Asked) -> Choice:
        stops = [body.stop] if isinstance(body.stop, str) else (body.stop or [])
        context = request.prompt[-_CONTEXT_TOKENS:].tolist()
        return Choice(
            index,
            request,
            IncrementalDetokenizer(self.text, context, skip_special_tokens=body.skip_special_tokens is not False),
            StopMatcher(stops, include_stop=bool(body.include_stop_str_in_output)),
            self._tool_format.parser() if asked.parses_calls else None,
        )

    def _max_tokens(self, num_prompt_tokens: int, asked: Asked) -> int:
        """Return the longest output of a prompt, in tokens, or refuse what can never fit."""
        limit, prompt_field = self.config.max_model_len, asked.prompt_field
        if not num_prompt_tokens:
            raise bad_request(f"{prompt_field} must hold at least one token", prompt_field)
        # The last output token is never fed back, so its KV is never stored.
        fits = min(limit, self.config.num_kv_tokens + 1) - num_prompt_tokens
        if fits < 1:
            raise ApiError(
                400,
                f"the prompt has {num_prompt_tokens} tokens, which leaves no room for output within max_model_len "
                f"({limit}) and the KV cache ({self.config.num_kv_tokens} tokens)",
                param=prompt_field,
                code="context_length_exceeded",
            )
        if asked.max_tokens is None:
            return min(asked.default_max_tokens, fits)
        if asked.max_tokens > fits:
            raise ApiError(
                400,
                f"the prompt has {num_prompt_tokens} tokens and max_tokens is {asked.max_tokens}, together "
                f"{num_prompt_tokens + asked.max_tokens}: more than max_model_len ({limit}) or the KV cache "
                f"({self.config.num_kv_tokens} tokens) allows",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return asked.max_tokens

    def _sampling(self, body: GenerationBody, num_alternatives: int | None) -> SamplingParams:
        params = SamplingParams(
            temperature=_or(body.temperature, 1.0),
            top_p=max(_or(body.top_p, 1.0), _MIN_TOP_P),
            top_k=_or(body.top_k, 0),
            min_p=_or(body.min_p, 0.0),
            seed=body.seed,
            repetition_penalty=_or(body.repetition_penalty, 1.0),
            presence_penalty=_or(body.presence_penalty, 0.0),
            frequency_penalty=_or(body.frequency_penalty, 0.0),
            logit_bias=_logit_bias(body.logit_bias or {}),
            logprobs=num_alternatives,
        )
        validate_sampling(params, self.text.vocab_size)
        return params

    def _stop_token_ids(self, body: GenerationBody) -> tuple[int, ...]:
        given = body.stop_token_ids or []
        validate_token_ids(given, self.text.vocab_size, param="stop_token_ids")
        ends = () if body.ignore_eos else self.text.eos_token_ids
        return tuple(sorted({*ends, *given}))


def _or(value: Result | None, default: Result) -> Result:
    return default if value is None else value


def _with_seed(params: SamplingParams, number: int) -> SamplingParams:
    """Give choice `number` of a prompt a seed of its own, derived from the request's."""
    if params.seed is None or number == 0:
        return params
    seed = (params.seed + number + _INT64) % (2 * _INT64) - _INT64
    return replace(params, seed=seed)


def _cache_hint(given: Literal["drop"] | PinHint | None) -> CacheHint | None:
    if given is None:
        return None
    return CacheHint(drop=True) if given == "drop" else CacheHint(pin_s=given.pin_s)


def _logit_bias(given: dict[str, float]) -> tuple[tuple[int, float], ...]:
    try:
        return tuple((int(token), bias) for token, bias in given.items())
    except ValueError as error:
        raise bad_request("the keys of logit_bias must be token ids", "logit_bias") from error
