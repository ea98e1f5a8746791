"""One HTTP request's sequences: tokens in from the replicas, text deltas out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from expediter.core.errors import InvariantError
from expediter.core.events import Finished, Rejected, RejectReason
from expediter.core.plan import TokenLogprobs
from expediter.core.ports import Clock
from expediter.core.request import FinishReason, Request
from expediter.engine.detokenizer import IncrementalDetokenizer, StopMatcher
from expediter.gateway.errors import ApiError, bad_request, deadline_exceeded, overloaded, replica_lost
from expediter.gateway.tools.base import CallDelta, CallParser
from expediter.runtime.streams import OutputTokens, RequestStream, StreamItem
from expediter.runtime.supervisor import Supervisor


@dataclass(slots=True)
class Delta:
    """What a choice has new.

    Attributes:
        text: for the reader; calls are not in it.
        tokens: output tokens whose text is in `text` or was held back earlier, with their logprobs if asked for.
        calls: what is new of tool calls.
        finish_reason: OpenAI's word, on the last delta of the choice.
        stop: the stop string that ended it, if one did.
    """

    index: int
    text: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    calls: list[CallDelta] = field(default_factory=list)
    finish_reason: str | None = None
    stop: str | None = None


class Choice:
    """One sequence: detokenizes, looks for stop strings and tool calls, and knows when it is over.

    Args:
        matcher: of stop strings.
        parser: of tool calls; None where there are none.
    Attributes:
        finish_reason: set with the choice's last delta.
        has_ended: whether the replica has said so; a choice that found a stop string is finished before.
    """

    def __init__(
        self,
        index: int,
        request: Request,
        detokenizer: IncrementalDetokenizer,
        matcher: StopMatcher,
        parser: CallParser | None = None,
    ) -> None:
        self.index = index
        self.request = request
        self.stream: RequestStream | None = None
        self.num_output_tokens = 0
        self.finish_reason: str | None = None
        self.has_ended = False
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._parser = parser
        self._stop: str | None = None
        self._held = Delta(index, "")

    @property
    def num_cached_tokens(self) -> int:
        return self.stream.num_cached_tokens if self.stream else 0

    def poll(self) -> Delta | None:
        """Return what is new, or None; never waits. Not to be called after the last delta.

        Raises:
            ApiError: the sequence failed.
        """
        if self.stream is None:
            raise InvariantError("a choice is polled before its request was submitted")
        items = self.stream.take()
        ended = next((item for item in items if isinstance(item, Finished | Rejected)), None)
        self.has_ended = ended is not None
        ends_with_stop_token = isinstance(ended, Finished) and ended.reason is FinishReason.STOP
        text = self._read(items, ends_with_stop_token)
        if ended is not None and self.finish_reason is None:
            reason = _finish_reason(ended, self.stream.retry_after_s)
            text += self._match(self._detokenizer.flush())
            if self.finish_reason is None:
                self.finish_reason = reason
                text += self._matcher.flush()
        calls: list[CallDelta] = []
        if self._parser is not None:
            text, calls = self._take_apart(self._parser, text)
        if not text and not calls and self.finish_reason is None:
            return None
        delta, self._held = self._held, Delta(self.index, "")
        delta.text, delta.calls, delta.finish_reason, delta.stop = text, calls, self.finish_reason, self._stop
        return delta

    def _take_apart(self, parser: CallParser, text: str) -> tuple[str, list[CallDelta]]:
        """Return what of new output is text and what is calls; the end of the choice ends both."""
        parsed = parser.push(text)
        if self.finish_reason is not None:
            parsed.extend(parser.flush())
            if self.finish_reason == "stop" and parser.num_calls:
                self.finish_reason = "tool_calls"
        return parsed.text, parsed.calls

    def _read(self, items: Sequence[StreamItem], ends_with_stop_token: bool) -> str:
        """Return the text that new tokens complete; the token that stopped the sequence has none."""
        outputs = [item for item in items if isinstance(item, OutputTokens)]
        tokens = [token for item in outputs for token in item.tokens]
        logprobs = [entry for item in outputs for entry in item.logprobs]
        num_shown = len(tokens) - ends_with_stop_token
        text = ""
        for position, token in enumerate(tokens):
            self.num_output_tokens += 1
            if position == num_shown:
                break
            self._held.tokens.append(token)
            self._held.logprobs += logprobs[position : position + 1]
            text += self._match(self._detokenizer.push((token,)))
            if self.finish_reason is not None:
                break
        return text

    def _match(self, text: str) -> str:
        """Return what may be shown of new text, and finish at a stop string. Before min_tokens none counts."""
        if not text or self.num_output_tokens < self.request.min_tokens:
            return text
        shown, stop = self._matcher.push(text)
        if stop is not None:
            self.finish_reason, self._stop = "stop", stop
        return shown


def _finish_reason(ended: Finished | Rejected, retry_after_s: float) -> str:
    """Return OpenAI's word for how a sequence ended, or raise what went wrong.

    Args:
        retry_after_s: when one that was refused is worth another try.
    """
    if isinstance(ended, Rejected):
        match ended.reason:
            case RejectReason.SHUTDOWN:
                raise overloaded(ended.message, retry_after_s=retry_after_s)
            case RejectReason.LATE:
                raise overloaded(ended.message, code="late", retry_after_s=retry_after_s)
            case _:
                raise bad_request(ended.message)
    match ended.reason:
        case FinishReason.STOP | FinishReason.LENGTH:
            return str(ended.reason.value)
        case FinishReason.ABORT:
            raise ApiError(500, "the request was aborted", type="server_error", code="aborted")
        case FinishReason.ERROR:
            raise bad_request(ended.message) if ended.message else replica_lost()


class Generation:
    """All choices of one HTTP request.

    Args:
        num_per_prompt: choices [k * num_per_prompt, (k + 1) * num_per_prompt) belong to prompt k.
        deadline_s: when it ends if no sequence has started, by `clock`; None for never.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        choices: Sequence[Choice],
        num_per_prompt: int,
        clock: Clock,
        deadline_s: float | None = None,
    ) -> None:
        self.choices = choices
        self._clock = clock
        self._deadline_s = deadline_s
        self._supervisor = supervisor
        self._num_per_prompt = num_per_prompt
        self._wake = asyncio.Event()

    def submit(self) -> None:
        """Dispatch every choice, or none; those of one prompt go together.

        Raises:
            CapacityError: no replica is up.
        """
        try:
            for begin in range(0, len(self.choices), self._num_per_prompt):
                group = self.choices[begin : begin + self._num_per_prompt]
                streams = self._supervisor.submit([choice.request for choice in group], self._wake)
                for choice, stream in zip(group, streams, strict=True):
                    choice.stream = stream
        except BaseException:
            self.abort()
            raise

    async def until_started(self) -> None:
        """Return once the first sequence has started; if one may be refused late, once all have.

        Raises:
            ApiError: one was refused, or the deadline passed before.
        """
        streams = [choice.stream for choice in self.choices if choice.stream is not None]
        left_s = None if self._deadline_s is None else self._deadline_s - self._clock.now()
        try:
            async with asyncio.timeout(left_s):
                await self._until(lambda: any(stream.has_started for stream in streams))
        except TimeoutError as error:
            raise deadline_exceeded() from error
        if self._may_be_refused_late:
            await self._until(lambda: all(stream.has_started for stream in streams))
        for stream in streams:
            if stream.rejection is not None:
                _finish_reason(stream.rejection, stream.retry_after_s)

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self._wake.clear()
            if not is_so():
                await self._wake.wait()

    @property
    def may_end_unstarted(self) -> bool:
        """Whether it may still be refused, or miss its deadline, after it was queued."""
        return self._deadline_s is not None or self._may_be_refused_late

    @property
    def _may_be_refused_late(self) -> bool:
        return any(choice.request.refuse_late for choice in self.choices)

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """Yield what is new, of any choice, until each has had its last delta.

        Raises:
            ApiError: a sequence failed; the others are worthless to the client then.
        """
        unfinished = list(self.choices)
        while unfinished:
            self._wake.clear()  # before looking: what comes while looking wakes us again
            deltas = [delta for choice in unfinished if (delta := self._poll(choice)) is not None]
            unfinished = [choice for choice in unfinished if choice.finish_reason is None]
            if deltas:
                yield deltas
            elif unfinished:
                await self._wake.wait()

    def _poll(self, choice: Choice) -> Delta | None:
        delta = choice.poll()
        if delta is not None and delta.finish_reason is not None and not choice.has_ended:
            self._supervisor.abort(choice.request.request_id, FinishReason.STOP)
        return delta

    def abort(self) -> None:
        """End what has not finished; does nothing where everything has."""
        for choice in self.choices:
            if choice.stream is not None and choice.finish_reason is None:
                self._supervisor.abort(choice.request.request_id)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once however many choices it has."""
        return sum(choice.request.num_prompt_tokens for choice in self._first_choices())

    @property
    def num_cached_tokens(self) -> int:
        """Reused tokens of all prompts, as their first choice met them."""
        return sum(choice.num_cached_tokens for choice in self._first_choices())

    @property
    def num_output_tokens(self) -> int:
        return sum(choice.num_output_tokens for choice in self.choices)

    def _first_choices(self) -> Sequence[Choice]:
        return self.choices[:: self._num_per_prompt]
