"""One request answered by our own API, in this process."""

from __future__ import annotations

import time

from starlette.types import ASGIApp

from expediter.gateway.backends.backend import Dispatch, Usage
from expediter.gateway.door import refusals
from expediter.gateway.door.relay import Asker
from expediter.gateway.door.told import TOLD, Told
from expediter.gateway.door.usage import Answered
from expediter.gateway.http.asgi import AsgiCall
from expediter.gateway.http.reply import Reply
from expediter.gateway.http.wire import HttpRequest
from expediter.gateway.tenants import Tenant


class OwnAnswer:
    """Hears of the application's answer, and passes on what the door wants to know of it."""

    def __init__(self, asker: Asker, dispatch: Dispatch) -> None:
        self._asker = asker
        self._dispatch = dispatch
        self._status = 500
        self._has_begun = False
        self._num_bytes = 0
        self._num_events = 0
        self._told = Told()

    def start(self, app: ASGIApp, request: HttpRequest, reply: Reply, shown_id: bytes, tenant: Tenant) -> None:
        """Let the application answer."""
        failure = refusals.answer(refusals.internal_error(), shown_id, request.path)
        AsgiCall(
            app, request, reply, failure, ((b"x-request-id", shown_id),), {"tenant": tenant, TOLD: self._told}, self
        )

    def app_head(self, status: int) -> None:
        """The application has begun."""
        self._status = status

    def app_data(self, data: bytes) -> None:
        """It has sent a part of the body."""
        if not self._has_begun:
            self._has_begun = True
            now_s = time.monotonic()
            self._dispatch.first_byte(now_s)
            self._asker.answering(now_s)
        self._num_bytes += len(data)
        self._num_events += 1

    def app_ended(self, *, is_whole: bool, is_gone: bool) -> None:
        """It has returned."""
        now_s = time.monotonic()
        counted = self._told.counted
        usage = None
        if counted is not None:
            usage = Usage(counted.num_prompt_tokens, counted.num_output_tokens, counted.num_cached_tokens)
        answered = Answered(self._status, usage, self._num_bytes, self._num_events)
        if is_whole:
            self._asker.answered(answered, now_s)
        elif is_gone:
            self._asker.client_left(answered)
        else:
            self._asker.broke(self._status, None, now_s)
