"""What the handlers of all APIs do with a generation: on whose terms it runs, and how it is answered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from expediter.core.errors import RequestError
from expediter.gateway.bodies import TermsBody
from expediter.gateway.delivery import EventStream, respond_at_once
from expediter.gateway.door.heads import OWN_ID
from expediter.gateway.door.told import TOLD, Told
from expediter.gateway.errors import ApiError, to_api_error
from expediter.gateway.generation import Generation
from expediter.gateway.http.wire import client_request_id
from expediter.gateway.rendering import Rendering
from expediter.gateway.service import Service
from expediter.gateway.tenants import Tenant
from expediter.gateway.terms import Terms, terms_of


def tenant_of(request: HttpRequest) -> Tenant:
    """Return whose request it is."""
    tenant: Tenant = request.scope["tenant"]
    return tenant


def terms_for(request: HttpRequest, body: TermsBody) -> Terms:
    """Return the terms of a request; raises as `terms_of`. What it has waited at the door counts."""
    terms = terms_of(body, request.headers.raw, tenant_of(request))
    return replace(terms, arrived_s=request.scope["arrived_s"])


async def respond(
    request: HttpRequest, service: Service, generation: Generation, rendering: Rendering, *, is_stream: bool
) -> Response:
    """Submit a generation and answer with it; what it is called is remembered for whoever asks about it.

    Raises:
        ApiError: a sequence failed.
        CapacityError: no replica is up.
        ClientGoneError: nobody is there to read it.
    """
    generation.submit()
    told = request.scope.get(TOLD)
    if isinstance(told, Told):
        told.counted = generation
    headers = request.headers.raw
    given, door_id = client_request_id(headers), client_request_id(headers, OWN_ID) or b""
    names = [rendering.response_id] if given is None else [rendering.response_id, given.decode("ascii")]
    ids = [choice.request.request_id for choice in generation.choices]
    service.recent.remember(tenant_of(request).name, names, ids, door_id.decode("ascii"))
    if is_stream:
        return EventStream(generation, rendering)
    return await respond_at_once(request, generation, rendering)


@contextmanager
def renamed_params(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors name the fields of the API at hand where they name those of a chat completion."""
    try:
        yield
    except (ApiError, RequestError) as error:
        told = to_api_error(error)
        name = names.get(told.param or "")
        if name is not None:
            told.message = told.message.replace(f"{told.param}: ", f"{name}: ", 1)
            told.param = name
        raise told from error
