"""The routes. Each handler is short: read, check, generate, answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from expediter import __version__
from expediter.core.errors import ExpediterError
from expediter.core.explanation import Span
from expediter.gateway.auth import RequireKey
from expediter.gateway.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
    decode_body,
    read_body,
)
from expediter.gateway.errors import ApiError, bad_request, handle_error
from expediter.gateway.formats import ChatFormat, CompletionFormat, ResponseFormat
from expediter.gateway.generation import Generation
from expediter.gateway.middleware import Drain, DrainGate, EchoRequestId, client_request_id
from expediter.gateway.responses import (
    CLIENT_CLOSED_REQUEST,
    ClientGoneError,
    Envelope,
    EventStream,
    respond_at_once,
)
from expediter.gateway.service import Prompt, Service
from expediter.gateway.tenants import Tenant, Tenants
from expediter.gateway.terms import Terms, terms_of
from expediter.telemetry.metrics import CONTENT_TYPE, ServerMetrics
from expediter.telemetry.step_log import StepLog

_COMPLETION: Final = msgspec.json.Decoder(CompletionBody)
_CHAT: Final = msgspec.json.Decoder(ChatBody)
_TOKENIZE: Final = msgspec.json.Decoder(TokenizeBody)
_DETOKENIZE: Final = msgspec.json.Decoder(DetokenizeBody)


class Api:
    """The handlers, over one service."""

    def __init__(self, service: Service, metrics: ServerMetrics, step_log: StepLog, drain: Drain) -> None:
        self._service = service
        self._metrics = metrics
        self._step_log = step_log
        self._drain = drain
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        return [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/server_info", self.server_info, methods=["GET"]),
            Route("/steps", self.steps, methods=["GET"]),
            Route("/requests/{name:path}", self.explanation, methods=["GET"]),
        ]

    async def completions(self, request: HttpRequest) -> Response:
        body = decode_body(await read_body(request), _COMPLETION)
        model = self._service.model_name(body.model)
        if body.echo and body.logprobs is not None:
            raise bad_request("echo with logprobs is not supported: prompts have no logprobs here", "echo")
        prompts = await self._service.completion_prompts(body)
        grammar = await self._service.grammar(body)
        generation = self._service.completion(body, prompts, self._terms(request, body), grammar)
        echoes = await self._echoes(body, prompts)
        form = CompletionFormat(self._service.text, echoes, body.logprobs)
        return await self._respond(request, body, generation, form, model)

    async def chat(self, request: HttpRequest) -> Response:
        body = decode_body(await read_body(request), _CHAT)
        model = self._service.model_name(body.model)
        prompt = await self._service.chat_prompt(body.messages)
        grammar = await self._service.grammar(body)
        generation = self._service.chat(body, prompt, self._terms(request, body), grammar)
        num_alternatives = (body.top_logprobs or 0) if body.logprobs else None
        form = ChatFormat(self._service.text, len(generation.choices), num_alternatives)
        return await self._respond(request, body, generation, form, model)

    async def models(self, request: HttpRequest) -> Response:
        tenant = _tenant(request)
        entries = [self._model(name) for name in self._service.config.model_names if tenant.may_use(name)]
        return _json({"object": "list", "data": entries})

    async def model(self, request: HttpRequest) -> Response:
        return _json(self._model(self._service.model_name(request.path_params["name"])))

    async def tokenize(self, request: HttpRequest) -> Response:
        body = decode_body(await read_body(request), _TOKENIZE)
        self._service.model_name(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("give either prompt or messages", "prompt")
        if body.messages is not None:
            prompt = await self._service.chat_prompt(body.messages, add_generation_prompt=body.add_generation_prompt)
        else:
            prompt = await self._service.encode(body.prompt or "", add_special_tokens=body.add_special_tokens)
        tokens: list[int] = prompt.tokens.tolist()
        texts = [self._service.text.token_text(token) for token in tokens] if body.return_token_strs else None
        limit = self._service.config.max_model_len
        return _json({"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": texts})

    async def detokenize(self, request: HttpRequest) -> Response:
        body = decode_body(await read_body(request), _DETOKENIZE)
        self._service.model_name(body.model)
        return _json({"prompt": await self._service.decode(body.tokens)})

    async def health(self, _: HttpRequest) -> Response:
        """Alive: the event loop answers. Says nothing of the replicas."""
        return _json({"status": "ok"})

    async def ready(self, _: HttpRequest) -> Response:
        """Ready: new work is taken, because at least one replica serves and the server does not drain."""
        ready = self._service.supervisor.is_ready and not self._drain.is_draining
        states = {str(number): state.value for number, state in self._service.supervisor.states.items()}
        return _json({"ready": ready, "replicas": states}, 200 if ready else 503)

    async def version(self, _: HttpRequest) -> Response:
        return _json({"version": __version__})

    async def server_info(self, _: HttpRequest) -> Response:
        return _json(self._service.config.info)

    async def metrics(self, _: HttpRequest) -> Response:
        return Response(self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def steps(self, request: HttpRequest) -> Response:
        """The newest steps with features and durations, from `?since=SEQUENCE` on; fits step-time models."""
        since = request.query_params.get("since", "0")
        if not since.isascii() or not since.isdigit() or len(since) > 18:
            raise bad_request("since must be a step's sequence number", "since")
        rows = [
            {"sequence": s.sequence, "replica": s.replica_id, **s.features._asdict(), "elapsed_s": s.elapsed_s}
            for s in self._step_log.since(int(since))
        ]
        return _json({"steps": rows})

    async def explanation(self, request: HttpRequest) -> Response:
        """What held a request and what it did: by our id, the response's, or the client's own X-Request-Id."""
        name = request.path_params["name"]
        ids = self._service.recent.find(_tenant(request).name, name)
        told = [(one, await self._service.supervisor.explain(one)) for one in ids]
        entries = [{"request_id": one, "spans": _spans(spans)} for one, spans in told if spans]
        if not entries:
            raise ApiError(404, "no such request, or it ended too long ago", code="request_not_found")
        return _json({"id": name, "requests": entries})

    def _terms(self, request: HttpRequest, body: GenerationBody) -> Terms:
        return terms_of(body, request.headers.raw, _tenant(request))

    def _model(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "expediter",
            "root": self._service.config.model_names[0],
            "parent": None,
            "max_model_len": self._service.config.max_model_len,
        }

    async def _echoes(self, body: CompletionBody, prompts: list[Prompt]) -> list[str]:
        """Return the text in front of each choice: its prompt's with `echo`, else nothing."""
        texts = [""] * len(prompts)
        if body.echo:
            texts = [p.text if p.text is not None else await self._service.decode(p.tokens.tolist()) for p in prompts]
        return [text for text in texts for _ in range(body.n or 1)]

    async def _respond(
        self, request: HttpRequest, body: GenerationBody, generation: Generation, form: ResponseFormat, model: str
    ) -> Response:
        generation.submit()
        envelope = Envelope(form, model)
        own = client_request_id(request.scope)
        names = [envelope.response_id] if own is None else [envelope.response_id, own.decode("ascii")]
        ids = [choice.request.request_id for choice in generation.choices]
        self._service.recent.remember(_tenant(request).name, names, ids)
        if not body.stream:
            return await respond_at_once(request, generation, envelope)
        options = body.stream_options
        return EventStream(
            generation,
            envelope,
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.continuous_usage_stats),
        )


def build_app(service: Service, metrics: ServerMetrics, step_log: StepLog, tenants: Tenants, drain: Drain) -> Starlette:
    """Return the ASGI application; keys are asked for before anything else looks at a request."""
    api = Api(service, metrics, step_log, drain)
    return Starlette(
        routes=api.routes(),
        middleware=[
            Middleware(EchoRequestId),
            Middleware(RequireKey, tenants=tenants),
            Middleware(DrainGate, drain=drain),
        ],
        exception_handlers={
            ApiError: handle_error,
            ExpediterError: handle_error,
            HTTPException: handle_error,
            ClientGoneError: _client_gone,
            Exception: handle_error,
        },
    )


async def _client_gone(request: HttpRequest, error: Exception) -> Response:  # noqa: ARG001 - starlette's signature
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def _tenant(request: HttpRequest) -> Tenant:
    tenant: Tenant = request.scope["tenant"]
    return tenant


def _spans(spans: Sequence[Span]) -> list[dict[str, object]]:
    """Return spans with times since the first one's start: the replicas' clock means nothing to a client."""
    origin_s = spans[0].from_s
    return [
        {
            "from_s": span.from_s - origin_s,
            "to_s": None if span.to_s is None else span.to_s - origin_s,
            "reason": span.reason.value,
            "details": span.details,
            "text": span.in_words(),
        }
        for span in spans
    ]


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
