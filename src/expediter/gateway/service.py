"""From a checked body to submitted requests: prompts, limits, defaults."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeVar

import numpy as np

from expediter.core.errors import ConfigurationError
from expediter.core.ports import Clock
from expediter.core.request import CacheHint, Grammar, Request, SamplingParams, TokenArray
from expediter.engine.detokenizer import IncrementalDetokenizer
from expediter.engine.sampling_params import validate_sampling, validate_token_ids
from expediter.engine.tokenizer import Tokenizer
from expediter.gateway.bodies import (
    MAX_CHOICES,
    MAX_PROMPTS,
    ChatBody,
    CompletionBody,
    GenerationBody,
    Message,
    PinHint,
)
from expediter.gateway.errors import ApiError, bad_request
from expediter.gateway.generation import Choice, Generation
from expediter.gateway.grammars import Grammars, spec_of
from expediter.gateway.info import ServerInfo
from expediter.gateway.recent import RecentRequests
from expediter.gateway.terms import Terms
from expediter.runtime.supervisor import Supervisor

_INLINE_CHARACTERS: Final = 4096
"""Texts up to here are tokenized on the event loop: handing them to a thread costs more than the work."""
_DEFAULT_COMPLETION_TOKENS: Final = 16
_CONTEXT_TOKENS: Final = 8
"""End of the prompt that a detokenizer may want to see."""
_INT64: Final = 2**63

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


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """Token ids, int32, shape [num_tokens], and the text that they came from where it is known."""

    tokens: TokenArray
    text: str | None


class Service:
    """Turns bodies into generations.

    Args:
        text: the model's tokenizer and chat template.
        grammars: compiles what outputs have to match.
    Attributes:
        recent: what clients may still ask about.
    """

    def __init__(
        self, config: GatewayConfig, supervisor: Supervisor, text: Tokenizer, clock: Clock, grammars: Grammars
    ) -> None:
        self.config = config
        self.supervisor = supervisor
        self.text = text
        self.grammars = grammars
        self.recent = RecentRequests(config.max_recent)
        self._clock = clock
        self._ids = itertools.count()
        self._threads = ThreadPoolExecutor(2, "tokenizer")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def model_name(self, asked: str | None) -> str:
        """Return the name to answer with.

        Raises:
            ApiError: 404, there is no such model.
        """
        if asked is None:
            return self.config.model_names[0]
        if asked not in self.config.model_names:
            names = ", ".join(self.config.model_names)
            raise ApiError(404, f"no such model; there is: {names}", param="model", code="model_not_found")
        return asked

    # ---- prompts

    async def completion_prompts(self, body: CompletionBody) -> list[Prompt]:
        """Return the prompts of a completion.

        Raises:
            ApiError: they are of mixed kinds, too many or empty, or ids are out of the vocabulary.
        """
        given = body.prompt
        if isinstance(given, str):
            return [await self.encode(given)]
        if all(isinstance(item, int) for item in given):
            return [self._prompt_of_ids([item for item in given if isinstance(item, int)])]
        if len(given) > MAX_PROMPTS:
            raise bad_request(f"at most {MAX_PROMPTS} prompts in one request", "prompt")
        if all(isinstance(item, str) for item in given):
            return [await self.encode(item) for item in given if isinstance(item, str)]
        if all(isinstance(item, list) for item in given):
            return [self._prompt_of_ids(item) for item in given if isinstance(item, list)]
        raise bad_request("prompt must be a text, texts, token ids or lists of token ids, not a mixture", "prompt")

    async def chat_prompt(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> Prompt:
        """Return the conversation as the model's template writes it.

        Raises:
            ApiError: a part is not text, or the template refuses the conversation.
        """
        plain = [{"role": _role(message), "content": _content(message)} for message in messages]
        num_characters = sum(len(message["content"]) for message in plain)
        ids = await self._off_loop(
            num_characters, lambda: self.text.chat_prompt(plain, add_generation_prompt=add_generation_prompt)
        )
        return Prompt(np.array(ids, dtype=np.int32), None)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> Prompt:
        """Return a text's tokens; large ones are tokenized in a thread."""
        ids = await self._off_loop(len(text), lambda: self.text.encode(text, add_special_tokens=add_special_tokens))
        return Prompt(np.array(ids, dtype=np.int32), text)

    async def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included.

        Raises:
            RequestError: an id is out of the vocabulary.
        """
        validate_token_ids(tokens, self.text.vocab_size, param="tokens")
        return await self._off_loop(len(tokens), lambda: self.text.decode(tokens, skip_special_tokens=False))

    def _prompt_of_ids(self, ids: list[int]) -> Prompt:
        validate_token_ids(ids, self.text.vocab_size, param="prompt")
        return Prompt(np.array(ids, dtype=np.int32), None)

    async def _off_loop(self, size: int, work: Callable[[], Result]) -> Result:
        if size <= _INLINE_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    # ---- requests

    async def grammar(self, body: GenerationBody) -> Grammar | None:
        """Return what the output has to match, compiled once for certain; None for anything.

        Raises:
            ApiError: it is wrong, or did not compile in time.
            CapacityError: it cannot be compiled now.
        """
        spec = spec_of(body)
        return None if spec is None else await self.grammars.compile(spec)

    def completion(
        self, body: CompletionBody, prompts: Sequence[Prompt], terms: Terms, grammar: Grammar | None
    ) -> Generation:
        """Return the generation of a completion, not submitted yet.

        Raises:
            ApiError, RequestError: a field is wrong, or a prompt does not fit.
        """
        return self._generation(
            body, prompts, terms, grammar, "prompt", body.max_tokens, _DEFAULT_COMPLETION_TOKENS, body.logprobs
        )

    def chat(self, body: ChatBody, prompt: Prompt, terms: Terms, grammar: Grammar | None) -> Generation:
        """Return the generation of a chat completion, not submitted yet.

        Raises:
            ApiError, RequestError: a field is wrong, or the conversation does not fit.
        """
        if body.top_logprobs is not None and not body.logprobs:
            raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
        max_tokens = body.max_completion_tokens or body.max_tokens
        num_alternatives = (body.top_logprobs or 0) if body.logprobs else None
        return self._generation(
            body, [prompt], terms, grammar, "messages", max_tokens, self.config.max_model_len, num_alternatives
        )

    def _generation(
        self,
        body: GenerationBody,
        prompts: Sequence[Prompt],
        terms: Terms,
        grammar: Grammar | None,
        prompt_field: str,
        max_tokens: int | None,
        default_max_tokens: int,
        num_alternatives: int | None,
    ) -> Generation:
        num_per_prompt = body.n or 1
        if len(prompts) * num_per_prompt > MAX_CHOICES:
            raise bad_request(f"prompts times n must not exceed {MAX_CHOICES}", "n")
        if body.stream_options is not None and not body.stream:
            raise bad_request("stream_options needs stream to be true", "stream_options")
        sampling = self._sampling(body, num_alternatives)
        stop_token_ids = self._stop_token_ids(body)
        stops = [body.stop] if isinstance(body.stop, str) else (body.stop or [])
        now_s = self._clock.now()
        choices: list[Choice] = []
        for prompt in prompts:
            length = self._max_tokens(len(prompt.tokens), prompt_field, max_tokens, default_max_tokens)
            if (body.min_tokens or 0) > length:
                raise bad_request(f"min_tokens must not exceed max_tokens ({length})", "min_tokens")
            for number in range(num_per_prompt):
                request = Request(
                    request_id=f"r{next(self._ids)}",
                    prompt=prompt.tokens,
                    max_tokens=length,
                    min_tokens=body.min_tokens or 0,
                    stop_token_ids=stop_token_ids,
                    sampling=_with_seed(sampling, number),
                    grammar=grammar,
                    priority=terms.priority,
                    cache_salt=terms.cache_salt,
                    cache_hint=_cache_hint(body.cache_hint),
                    tenant=terms.tenant,
                    session=terms.session,
                    slo=terms.slo,
                    slo_class=terms.slo_class,
                    value=terms.value,
                    refuse_late=terms.refuse_late,
                    arrival_s=now_s,
                )
                choices.append(
                    Choice(
                        len(choices),
                        request,
                        IncrementalDetokenizer(self.text, prompt.tokens[-_CONTEXT_TOKENS:].tolist()),
                        stops,
                    )
                )
        return Generation(self.supervisor, choices, num_per_prompt)

    def _max_tokens(self, num_prompt_tokens: int, prompt_field: str, asked: int | None, default: int) -> int:
        """Return the longest output of a prompt, in tokens, or refuse what can never fit."""
        limit = self.config.max_model_len
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
        if asked is None:
            return min(default, fits)
        if asked > fits:
            raise ApiError(
                400,
                f"the prompt has {num_prompt_tokens} tokens and max_tokens is {asked}, together "
                f"{num_prompt_tokens + asked}: more than max_model_len ({limit}) or the KV cache "
                f"({self.config.num_kv_tokens} tokens) allows",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return asked

    def _sampling(self, body: GenerationBody, num_alternatives: int | None) -> SamplingParams:
        params = SamplingParams(
            temperature=_or(body.temperature, 1.0),
            top_p=_or(body.top_p, 1.0),
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


def _role(message: Message) -> str:
    return "system" if message.role == "developer" else message.role  # templates know the older name


def _content(message: Message) -> str:
    if message.tool_calls:
        raise bad_request("tool_calls are not supported", "messages")
    if message.content is None:
        raise bad_request("every message needs content", "messages")
    if isinstance(message.content, str):
        return message.content
    for part in message.content:
        if part.type != "text" or part.text is None:
            raise bad_request("only text parts are supported as message content", "messages")
    return "".join(part.text or "" for part in message.content)
