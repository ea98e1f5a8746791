"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from expediter.core.plan import TokenLogprobs
from expediter.gateway.api.chunks import ChunkRendering
from expediter.gateway.api.exchange import respond, tenant_of, terms_for
from expediter.gateway.bodies import MAX_CHOICES, MAX_N, GenerationBody, TokenId, decode_body, read_body
from expediter.gateway.delivery import EventStream, respond_at_once
from expediter.gateway.errors import ApiError, bad_request
from expediter.gateway.generation import Delta
from expediter.gateway.prompts import Prompt
from expediter.gateway.rendering import Vocabulary, finite
from expediter.gateway.service import Asked, Service

MAX_PROMPTS: Final = 256
_DEFAULT_TOKENS: Final = 16
"""OpenAI's default of max_tokens here."""


class CompletionBody(GenerationBody, kw_only=True):
    """`POST /v1/completions`. A list of texts or of token lists is that many prompts; a list of ids is one."""

    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    add_special_tokens: bool | None = None
    # Refused unless it is off: see `bodies._OFF`.
    suffix: Any = None


_BODY: Final = msgspec.json.Decoder(CompletionBody)


class CompletionsApi:
    """The handler, over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        return [Route("/v1/completions", self.complete, methods=["POST"])]

    async def complete(self, request: HttpRequest) -> Response:
        body = decode_body(await read_body(request), _BODY)
        model = self._service.model_name(body.model, tenant_of(request))
        _check(body)
        prompts = await self._prompts(body)
        terms = terms_for(request, body)
        num_shown = body.n or 1
        num_per_prompt = max(num_shown, body.best_of or 1)
        echoes = await self._echoes(body, prompts, num_shown)
        form = CompletionFormat(self._service.text, echoes, body.logprobs, num_shown, num_per_prompt)
        if body.max_tokens == 0:
            source = PromptsAlone(self._fitting(prompts), num_shown)
            rendering = ChunkRendering(form, model, source, body)
            if body.stream:
                return EventStream(source, rendering)
            return await respond_at_once(request, source, rendering)
        asked = Asked(
            prompts=prompts,
            terms=terms,
            grammar=await self._service.grammar(body, terms.tenant),
            max_tokens=body.max_tokens,
            default_max_tokens=_DEFAULT_TOKENS,
            # Candidates are compared by their logprobs, asked for or not.
            num_alternatives=body.logprobs if num_per_prompt == num_shown else body.logprobs or 0,
            num_per_prompt=num_per_prompt,
            prompt_field="prompt",
        )
        generation = self._service.generation(body, asked)
        rendering = ChunkRendering(form, model, generation, body)
        return await respond(request, self._service, generation, rendering, is_stream=bool(body.stream))

    async def _prompts(self, body: CompletionBody) -> list[Prompt]:
        """Return the prompts.

        Raises:
            ApiError: they are of mixed kinds, too many or empty, or ids are out of the vocabulary.
        """
        given, prompts = body.prompt, self._service.prompts
        adds_special = body.add_special_tokens is not False
        if isinstance(given, str):
            return [await prompts.of_text(given, add_special_tokens=adds_special)]
        if all(isinstance(item, int) for item in given):
            return [prompts.of_ids([item for item in given if isinstance(item, int)])]
        if len(given) > MAX_PROMPTS:
            raise bad_request(f"at most {MAX_PROMPTS} prompts in one request", "prompt")
        if all(isinstance(item, str) for item in given):
            texts = [item for item in given if isinstance(item, str)]
            return [await prompts.of_text(text, add_special_tokens=adds_special) for text in texts]
        if all(isinstance(item, list) for item in given):
            return [prompts.of_ids(item) for item in given if isinstance(item, list)]
        raise bad_request("prompt must be a text, texts, token ids or lists of token ids, not a mixture", "prompt")

    async def _echoes(self, body: CompletionBody, prompts: list[Prompt], num_shown: int) -> list[str]:
        """Return the text in front of each choice that is shown: its prompt's with `echo`, else nothing."""
        texts = [""] * len(prompts)
        if body.echo:
            decode = self._service.prompts.decode
            texts = [p.text if p.text is not None else await decode(p.tokens.tolist()) for p in prompts]
        return [text for text in texts for _ in range(num_shown)]

    def _fitting(self, prompts: list[Prompt]) -> list[Prompt]:
        """Return the prompts, if each is one that could be continued at all.

        Raises:
            ApiError: 400, one is empty or longer than the model's context.
        """
        limit = self._service.config.max_model_len
        for prompt in prompts:
            if not len(prompt.tokens):
                raise bad_request("prompt must hold at least one token", "prompt")
            if len(prompt.tokens) > limit:
                raise ApiError(
                    400,
                    f"the prompt has {len(prompt.tokens)} tokens, more than max_model_len ({limit})",
                    param="prompt",
                    code="context_length_exceeded",
                )
        return prompts


def _check(body: CompletionBody) -> None:
    """Refuse what does not go together."""
    if body.echo and body.logprobs is not None:
        raise bad_request("echo with logprobs is not supported: prompts have no logprobs here", "echo")
    if body.max_tokens == 0 and not body.echo:
        raise bad_request("max_tokens must be at least 1, or echo true", "max_tokens")
    if body.best_of is not None:
        if body.best_of < (body.n or 1):
            raise bad_request("best_of must be at least n", "best_of")
        if body.stream and body.best_of > (body.n or 1):
            raise bad_request("best_of above n cannot be streamed", "best_of")


class PromptsAlone:
    """A `Source` of choices without output: `echo` with `max_tokens` 0. No replica sees it.

    Raises:
        ApiError: 400, they are too many.
    """

    may_end_unstarted = False
    num_cached_tokens = 0
    num_output_tokens = 0

    def __init__(self, prompts: Sequence[Prompt], num_per_prompt: int) -> None:
        self._num_choices = len(prompts) * num_per_prompt
        if self._num_choices > MAX_CHOICES:
            raise bad_request(f"prompts times n must not exceed {MAX_CHOICES}", "n")
        self.num_prompt_tokens = sum(len(prompt.tokens) for prompt in prompts)

    async def until_started(self) -> None:
        return

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        yield [Delta(index, "", finish_reason="length") for index in range(self._num_choices)]

    def abort(self) -> None:
        return


class CompletionFormat:
    """A `ChoiceFormat`.

    Args:
        echoes: text in front of each choice's own, one per choice that is shown; empty strings without `echo`.
        num_alternatives: logprobs asked for, None for none.
        num_shown, num_per_prompt: of each prompt, the best so many candidates of so many are shown.
    """

    id_prefix = "cmpl-"
    full_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self,
        vocabulary: Vocabulary,
        echoes: Sequence[str],
        num_alternatives: int | None,
        num_shown: int,
        num_per_prompt: int,
    ) -> None:
        self._vocabulary = vocabulary
        self._echoes = echoes
        self._num_alternatives = num_alternatives
        self._num_shown = num_shown
        self._num_per_prompt = num_per_prompt
        self._text_offsets = [0] * len(echoes)

    def opening(self) -> list[dict[str, Any]]:
        return [self._choice(Delta(i, echo), i, echo) for i, echo in enumerate(self._echoes) if echo]

    def chunk(self, delta: Delta) -> dict[str, Any]:
        return self._choice(delta, delta.index, delta.text)

    def full(self, deltas: Sequence[Delta]) -> list[dict[str, Any]]:
        shown: list[Delta] = []
        for begin in range(0, len(deltas), self._num_per_prompt):
            candidates = deltas[begin : begin + self._num_per_prompt]
            if self._num_per_prompt > self._num_shown:
                candidates = sorted(candidates, key=lambda delta: _mean_logprob(delta.logprobs), reverse=True)
            shown += candidates[: self._num_shown]
        return [self._choice(delta, i, self._echoes[i] + delta.text) for i, delta in enumerate(shown)]

    def _choice(self, delta: Delta, index: int, text: str) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(delta, index),
            "finish_reason": delta.finish_reason,
        }

    def _logprobs(self, delta: Delta, index: int) -> dict[str, Any] | None:
        if self._num_alternatives is None or not delta.logprobs:
            return None
        token_text = self._vocabulary.token_text
        texts = [token_text(token) for token in delta.tokens]
        offsets: list[int] = []
        for text in texts:
            offsets.append(self._text_offsets[index])
            self._text_offsets[index] += len(text)
        tops = [
            {token_text(token): finite(logprob) for token, logprob in entry.top[: self._num_alternatives]}
            | {text: finite(entry.logprob)}
            for text, entry in zip(texts, delta.logprobs, strict=True)
        ]
        return {
            "tokens": texts,
            "token_logprobs": [finite(entry.logprob) for entry in delta.logprobs],
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def _mean_logprob(logprobs: Sequence[TokenLogprobs]) -> float:
    """Return the log-probability per token, by which candidates are compared; one without tokens comes last."""
    if not logprobs:
        return float("-inf")
    return sum(finite(entry.logprob) for entry in logprobs) / len(logprobs)
