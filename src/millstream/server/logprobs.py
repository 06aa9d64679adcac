"""Log-probabilities in the forms of both APIs."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import msgspec

from millstream.messages import TokenLogprobs
from millstream.server.llm import ServedTokenizer

LOWEST = -9999.0
"""Stands for -inf and NaN, which JSON can't hold."""


def clamped(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST  # false for NaN too


def first_token(token_id: int) -> TokenLogprobs:
    """A prompt's first token: nothing comes before it, so it has no log-probability. Known by rank 0."""
    return TokenLogprobs(token_ids=[token_id], logprobs=[LOWEST], rank=0)


class TokenTexts:
    """How tokens are shown, remembered: at most one entry for each token of the vocabulary."""

    def __init__(self, tokenizer: ServedTokenizer) -> None:
        self._tokenizer = tokenizer
        self._shown: dict[int, tuple[str, list[int]]] = {}
        self._hidden: dict[int, bool] = {}

    def shown(self, token_id: int) -> tuple[str, list[int]]:
        """The token's text and bytes. Bytes that are no text of their own look like `bytes:\\xe2\\x80`."""
        found = self._shown.get(token_id)
        if found is None:
            raw = self._tokenizer.token_bytes(token_id)
            try:
                text = raw.decode()
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{b:02x}" for b in raw)
            found = self._shown[token_id] = (text, list(raw))
        return found

    def is_hidden(self, token_id: int) -> bool:
        """Whether it is a special token, which the text leaves out."""
        found = self._hidden.get(token_id)
        if found is None:
            found = self._hidden[token_id] = self._tokenizer.decode([token_id], skip_special_tokens=True) == ""
        return found


class ChatTopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


def chat_logprobs(entries: Sequence[TokenLogprobs], texts: TokenTexts) -> ChatLogprobs:
    """The form of /v1/chat/completions."""
    content = []
    for entry in entries:
        text, raw = texts.shown(entry.token_ids[0])
        top = [
            ChatTopLogprob(texts.shown(i)[0], clamped(p), texts.shown(i)[1])
            for i, p in zip(entry.token_ids[1:], entry.logprobs[1:], strict=True)
        ]
        content.append(ChatTokenLogprob(text, clamped(entry.logprobs[0]), raw, top))
    return ChatLogprobs(content)


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextOffsets:
    """The form of /v1/completions, with the place of each token in the text: in characters, of one answer."""

    def __init__(self, texts: TokenTexts, *, skip_special_tokens: bool) -> None:
        self._texts = texts
        self._skip_special_tokens = skip_special_tokens
        # a character may be spread over several tokens: it is counted where it is complete
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0

    def logprobs(self, entries: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        made = CompletionLogprobs([], [], [], [])
        for entry in entries:
            token_id = entry.token_ids[0]
            text, raw = self._texts.shown(token_id)
            made.tokens.append(text)
            made.text_offset.append(self._num_chars)
            if entry.rank == 0:
                made.token_logprobs.append(None)
                made.top_logprobs.append(None)
            else:
                made.token_logprobs.append(clamped(entry.logprobs[0]))
                top: dict[str, float] = {}
                for i, p in zip(entry.token_ids, entry.logprobs, strict=True):
                    top.setdefault(self._texts.shown(i)[0], clamped(p))
                made.top_logprobs.append(top)
            if not (self._skip_special_tokens and self._texts.is_hidden(token_id)):
                self._num_chars += len(self._decoder.decode(bytes(raw)))
        return made
