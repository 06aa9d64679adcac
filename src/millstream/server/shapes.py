"""The two forms in which answers leave: chat completions and text completions, streamed or whole.

Both classes have the same verbs, so one responder serves both. A streamed chunk is a template made once for the
request, and one small struct.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from millstream.messages import TokenLogprobs
from millstream.request import FinishReason
from millstream.server.logprobs import ChatLogprobs, CompletionLogprobs, TextOffsets, TokenTexts, chat_logprobs

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Progress(msgspec.Struct):
    """How far the prompts of a request are computed."""

    prompt_tokens_done: int
    """Those from the prefix cache included."""
    prompt_tokens_total: int
    cached_tokens: int


@dataclass
class Answer:
    """One choice: what has come of it, and why it ended."""

    index: int
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_output_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class ReplyHead:
    """What every chunk of a reply repeats."""

    id: str
    model: str
    fingerprint: str
    created: int = field(default_factory=lambda: int(time.time()))


class Shape(Protocol):
    """How the pieces of a reply are written; chunks are whole server-sent events."""

    def start(self, index: int) -> bytes:
        """The chunk before a choice's first text; may be empty."""
        ...

    def delta(self, index: int, text: str, logprobs: Sequence[TokenLogprobs] | None) -> bytes: ...

    def finish(self, index: int, reason: FinishReason, stop_reason: int | str | None) -> bytes: ...

    def progress(self, progress: Progress) -> bytes:
        """A chunk with empty choices, before any text."""
        ...

    def usage(self, usage: Usage) -> bytes:
        """The last chunk, with empty choices."""
        ...

    def whole(self, answers: Sequence[Answer], usage: Usage, *, has_logprobs: bool) -> bytes:
        """The reply that is not streamed."""
        ...


# -- chat -------------------------------------------------------------------------------------------------------


class _Delta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class _ChatChunkChoice(msgspec.Struct):
    index: int
    delta: _Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class _ChatFinishChoice(_ChatChunkChoice):
    stop_reason: int | str | None = None


class _ChatMessage(msgspec.Struct):
    role: str
    content: str
    refusal: None = None


class _ChatChoice(msgspec.Struct):
    index: int
    message: _ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None


class _Reply(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[_ChatChoice] | list[_CompletionChoice]
    usage: Usage


class ChatShape:
    """/v1/chat/completions"""

    def __init__(self, head: ReplyHead, texts: TokenTexts, *, include_usage: bool) -> None:
        self._head = head
        self._texts = texts
        self._before, self._after = _template(head, "chat.completion.chunk", include_usage)

    def start(self, index: int) -> bytes:
        return self._chunk(_ChatChunkChoice(index, _Delta(role="assistant", content="")))

    def delta(self, index: int, text: str, logprobs: Sequence[TokenLogprobs] | None) -> bytes:
        made = None if logprobs is None else chat_logprobs(logprobs, self._texts)
        return self._before + _encode(_ChatChunkChoice(index, _Delta(None, text), made)) + self._after

    def finish(self, index: int, reason: FinishReason, stop_reason: int | str | None) -> bytes:
        return self._chunk(_ChatFinishChoice(index, _Delta(), None, str(reason), stop_reason))

    def progress(self, progress: Progress) -> bytes:
        return _progress_chunk(self._before, progress)

    def usage(self, usage: Usage) -> bytes:
        return _usage_chunk(self._head, "chat.completion.chunk", usage)

    def whole(self, answers: Sequence[Answer], usage: Usage, *, has_logprobs: bool) -> bytes:
        choices = [
            _ChatChoice(
                a.index,
                _ChatMessage("assistant", "".join(a.text)),
                chat_logprobs(a.logprobs, self._texts) if has_logprobs else None,
                str(a.finish_reason),
                a.stop_reason,
            )
            for a in answers
        ]
        h = self._head
        return _encode(_Reply(h.id, "chat.completion", h.created, h.model, h.fingerprint, choices, usage))

    def _chunk(self, choice: _ChatChunkChoice) -> bytes:
        return self._before + _encode(choice) + self._after


# -- text completions -------------------------------------------------------------------------------------------


class _CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class _CompletionFinishChoice(_CompletionChoice):
    stop_reason: int | str | None = None


class CompletionShape:
    """/v1/completions"""

    def __init__(
        self, head: ReplyHead, texts: TokenTexts, *, include_usage: bool, skip_special_tokens: bool = True
    ) -> None:
        self._head = head
        self._texts = texts
        self._skip_special_tokens = skip_special_tokens
        self._before, self._after = _template(head, "text_completion", include_usage)
        self._offsets: dict[int, TextOffsets] = {}

    def start(self, index: int) -> bytes:
        return b""

    def delta(self, index: int, text: str, logprobs: Sequence[TokenLogprobs] | None) -> bytes:
        return self._chunk(_CompletionChoice(index, text, self._logprobs(index, logprobs)))

    def finish(self, index: int, reason: FinishReason, stop_reason: int | str | None) -> bytes:
        return self._chunk(_CompletionFinishChoice(index, "", None, str(reason), stop_reason))

    def progress(self, progress: Progress) -> bytes:
        return _progress_chunk(self._before, progress)

    def usage(self, usage: Usage) -> bytes:
        return _usage_chunk(self._head, "text_completion", usage)

    def whole(self, answers: Sequence[Answer], usage: Usage, *, has_logprobs: bool) -> bytes:
        choices: list[_CompletionChoice] = [
            _CompletionFinishChoice(
                a.index,
                "".join(a.text),
                self._logprobs(a.index, a.logprobs if has_logprobs else None),
                str(a.finish_reason),
                a.stop_reason,
            )
            for a in answers
        ]
        h = self._head
        return _encode(_Reply(h.id, "text_completion", h.created, h.model, h.fingerprint, choices, usage))

    def _chunk(self, choice: _CompletionChoice) -> bytes:
        return self._before + _encode(choice) + self._after

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprobs] | None) -> CompletionLogprobs | None:
        if logprobs is None:
            return None
        offsets = self._offsets.get(index)
        if offsets is None:
            offsets = TextOffsets(self._texts, skip_special_tokens=self._skip_special_tokens)
            self._offsets[index] = offsets
        return offsets.logprobs(logprobs)


def _template(head: ReplyHead, object: str, include_usage: bool) -> tuple[bytes, bytes]:
    fields: dict[str, str | int | None] = {
        "id": head.id,
        "object": object,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.fingerprint,
    }
    if include_usage:
        fields["usage"] = None
    return b"data: " + _encode(fields)[:-1] + b',"choices":[', b"]}\n\n"


def _progress_chunk(before: bytes, progress: Progress) -> bytes:
    return before + b'],"x_progress":' + _encode(progress) + b"}\n\n"


def _usage_chunk(head: ReplyHead, object: str, usage: Usage) -> bytes:
    reply = _Reply(head.id, object, head.created, head.model, head.fingerprint, [], usage)
    return b"data: " + _encode(reply) + b"\n\n"
