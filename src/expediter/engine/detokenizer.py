"""Tokens to text as they come: characters whole, stop strings never shown."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Final, Protocol

from expediter.core.errors import RequestError
from expediter.engine.tokenizer import Tokenizer

_REPLACEMENT: Final = "\ufffd"
_MAX_PENDING: Final = 8
"""Tokens that may wait for the rest of a character. One has at most 4 bytes, so more are invalid for good."""

_CONTEXT: Final = 4
"""Tokens before the first one that decide how it is written, such as whether its leading space shows."""


class _Stage(Protocol):
    def push(self, token_ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class IncrementalDetokenizer:
    """Turns a stream of tokens into a stream of text, O(1) amortised per token.

    The concatenation of everything returned equals decoding the whole at once, but for a character that the end cuts
    off, which is left out. U+FFFD appears only for bytes that no continuation could make valid. Byte-level tokenizers
    meet this exactly. For those whose tokens depend on their neighbours (SentencePiece, WordPiece) a window is decoded
    again with each token; bytes of a broken character that come one token each are reported one by one.

    Args:
        prompt_ids: what the output continues, for tokenizers whose tokens depend on what precedes them.
        skip_special_tokens: leave out end-of-sequence marks and the like.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._stage: _Stage
        if tokenizer.is_byte_level:
            self._stage = _ByteStage(tokenizer, skipped)
        else:
            self._stage = _WindowStage(tokenizer, prompt_ids, skipped)

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        return self._stage.push(token_ids)

    def flush(self) -> str:
        """Return what was held back, without a cut-off character; call it once, at the end."""
        return self._stage.flush()


class _ByteStage:
    """Byte-level: bytes through an incremental UTF-8 decoder."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        token_bytes = self._tokenizer.token_bytes
        return self._decoder.decode(b"".join(token_bytes(id_) for id_ in token_ids if id_ not in self._skipped))

    def flush(self) -> str:
        self._decoder.reset()  # the decoder holds only bytes that a continuation could still complete
        return ""


class _WindowStage:
    """Any tokenizer: decode a window with and without the new tokens; the difference is new text.

    `_ids[:_read]` has been shown. The window starts one emission back, so that the text of its first tokens is written
    as in the middle of a text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._ids = [id_ for id_ in prompt_ids[-_CONTEXT:] if id_ not in skipped]
        self._read = len(self._ids)

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join([self._push_one(id_) for id_ in token_ids if id_ not in self._skipped])

    def _push_one(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._unread_text()
        is_open = text.endswith(_REPLACEMENT) or not text
        if is_open and len(self._ids) - self._read < _MAX_PENDING:
            return ""
        del self._ids[: self._read]
        self._read = len(self._ids)
        return text

    def flush(self) -> str:
        text = self._unread_text().rstrip(_REPLACEMENT)
        self._read = len(self._ids)
        return text

    def _unread_text(self) -> str:
        decode = self._tokenizer.decode
        shown = decode(self._ids[: self._read], skip_special_tokens=False)
        return decode(self._ids, skip_special_tokens=False)[len(shown) :]


class StopMatcher:
    """Cuts a stream of text before the first stop string, however the stream is divided.

    Text that could be the beginning of a stop string is held back until it cannot. The stop string that is complete
    first wins; of those complete at the same character, the longest.

    Args:
        stops: strings, none empty.
        include_stop: show the stop string itself, too (vLLM's `include_stop_str_in_output`).
    Raises:
        RequestError: a stop string is empty.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        if not all(stops):
            raise RequestError("stop strings must not be empty", param="stop")
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._is_stopped = False

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that may be shown, and the stop string that ended the stream, if one did.

        After a stop, nothing more is shown.
        """
        if self._is_stopped:
            return "", None
        if not self._stops:
            return text, None
        text = self._held + text
        matches = [(begin + len(stop), begin, stop) for stop in self._stops if (begin := text.find(stop)) >= 0]
        if matches:
            end, begin, stop = min(matches)
            self._held, self._is_stopped = "", True
            return text[: end if self._include_stop else begin], stop
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], None

    def flush(self) -> str:
        """Return what was held back, at the end of a stream in which no stop string came."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Return the length of the longest end of `text` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[len(text) - length :]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
