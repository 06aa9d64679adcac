"""From the token ids of one answer to the text a client may see, piece by piece.

Pieces joined are what decoding all the ids at once gives, whatever the pushes were: never half a character, never a
part of a stop string, never text of the prompt.

`tokenizers.decoders.DecodeStream` does the first half of this, but it waits while the text ends in U+FFFD, which a run
of invalid bytes may do for ever, begins with text of the prompt if that ends within a character, and raises where
byte-fallback tokens change text already given. So the ids are decoded by the library over a short window that is kept
here; but where a decoder joins bytes (GPT-2's, most models'), a token of whole characters after whole characters adds
the same text always, which is looked up: a fifth of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from millstream.tokenizer.pieces import MAX_TOKEN_ID, REPLACEMENT, DecodingBackend, TokenPieces

_MAX_PENDING = 3
"""Bytes that an incomplete character can have. Byte-fallback decoders write as many U+FFFD, byte-level ones one."""

_WINDOW_LEN = 10
_WINDOW_LIMIT = 96
_TAIL_LENS = (4, 5, 6, 7, 8)
_LONG_TAIL_LENS = (12, 11, 10, 9)
"""While a character is incomplete. 12 bytes show at least one U+FFFD beyond the three that may be held back."""
_PRIME_LENS = (8, 32)


class DecodingTokenizer(Protocol):
    """The part of `millstream.tokenizer.Tokenizer` that is needed here."""

    @property
    def backend(self) -> DecodingBackend: ...


class TextDelta(NamedTuple):
    """New text of an answer."""

    text: str
    num_tokens: int
    """How many of the tokens pushed count: fewer than given when a stop string was completed before the last one."""
    stop: str | None
    """The stop string that has ended the answer."""


class Detokenizer:
    """Turns the tokens of one answer into text, up to the first stop string.

    The stop string that is complete first wins; of two complete with the same character, the longer one. A stop string
    counts only if it is completed by token number `min_tokens` or a later one.
    """

    def __init__(
        self,
        tokenizer: DecodingTokenizer,
        prompt_token_ids: Sequence[int],
        *,
        stop: tuple[str, ...] = (),
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        pieces: TokenPieces | None = None,
    ) -> None:
        """`pieces` are those of the same tokenizer that other answers have found."""
        pieces = pieces or TokenPieces(tokenizer.backend)
        self._stream = _TextStream(tokenizer.backend, pieces, prompt_token_ids, skip_special_tokens=skip_special_tokens)
        self._stop = stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""
        """Text that may be the begin of a stop string."""
        self._num_exempt = 0
        """Characters of it that came before min_tokens: no stop string may end in them."""
        self._found: str | None = None
        self._is_finished = False

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """The text that may be shown now that these tokens are known. After a stop string: nothing more."""
        pieces = []
        num_tokens = 0
        for token_id in token_ids:
            if self._found is not None or self._is_finished:
                break
            num_tokens += 1
            self._num_tokens += 1
            text = self._stream.step(token_id)
            if text:
                pieces.append(self._release(text))
        return TextDelta("".join(pieces), num_tokens, self._found)

    def finish(self) -> str:
        """The text held back: an incomplete character as U+FFFD, a begun stop string as it is. Once."""
        if self._found is not None or self._is_finished:
            return ""
        self._is_finished = True
        return self._release(self._stream.finish()) + self._held

    def _release(self, text: str) -> str:
        """The part of the text held and of `text` that can't belong to a stop string; keeps the rest."""
        if not self._stop:
            return text
        text = self._held + text
        if self._num_tokens < self._min_tokens:
            self._num_exempt = len(text)
        else:
            begin = self._find_stop(text)
            if begin is not None:
                self._held = ""
                return text[:begin]
        cut = min(_begun(text, stop) for stop in self._stop)
        self._held = text[cut:]
        self._num_exempt = max(0, self._num_exempt - cut)
        return text[:cut]

    def _find_stop(self, text: str) -> int | None:
        """Where the first stop string begins that ends after the exempt characters; notes which it is."""
        first = None
        for stop in self._stop:
            begin = text.find(stop, max(0, self._num_exempt - len(stop) + 1))
            if begin >= 0 and (first is None or (begin + len(stop), begin) < first):
                first = (begin + len(stop), begin)
                self._found = stop
        return None if first is None else first[1]


def _begun(text: str, stop: str) -> int:
    """Where the longest end of `text` begins that is a begin of `stop` but not all of it; len(text) if none is."""
    begin = max(0, len(text) - len(stop) + 1)
    while (begin := text.find(stop[0], begin)) >= 0:
        if stop.startswith(text[begin:]):
            return begin
        begin += 1
    return len(text)


class _TextStream:
    """Decodes one token at a time over a window of the last tokens, giving out only whole characters."""

    def __init__(
        self, backend: DecodingBackend, pieces: TokenPieces, prompt_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> None:
        self._backend = backend
        self._pieces = pieces
        self._known = pieces.of(skip_special_tokens=skip_special_tokens)
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._given = ""
        """The text of the window that was given out, or is the prompt's."""
        self._num_odd = 0
        """Tokens at the window's end with which its text no longer begins with what was given out."""
        self._is_whole = True
        """All of the window's text was given out, and it is whole characters."""
        # the prompt's last tokens decide whether a space stands between it and the answer
        for prime_len in _PRIME_LENS:
            window = [i for i in prompt_ids[-prime_len:] if 0 <= i <= MAX_TOKEN_ID]
            text = self._decode(window)
            if text and not text.endswith(REPLACEMENT):
                self._window, self._given = window, text
                break

    def step(self, token_id: int) -> str:
        """The text that is certain with this token; an id that is none adds nothing."""
        if self._is_whole:
            if token_id in self._known:
                piece = self._known[token_id]
            else:
                piece = self._pieces.find(token_id, skip_special_tokens=self._skip_special_tokens)
            if piece is not None:
                if piece:
                    self._window, self._given = [token_id], piece
                return piece
        if not 0 <= token_id <= MAX_TOKEN_ID:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if not text.startswith(self._given):
            self._num_odd += 1
            self._is_whole = False
            return self._restart() if self._num_odd > _MAX_PENDING else ""
        self._num_odd = 0
        begin = len(self._given)
        end = len(text)
        while end > max(begin, len(text) - _MAX_PENDING) and text[end - 1] == REPLACEMENT:
            end -= 1
        if len(text) == begin > 0 and not text.endswith(REPLACEMENT):
            # a special token that is skipped: were it kept, many of them would fill the window
            self._window.pop()
        self._given = text[:end]
        self._is_whole = end == len(text)
        if len(self._window) > _WINDOW_LEN and not self._shorten(text) and len(self._window) > _WINDOW_LIMIT:
            # scores of skipped tokens within one character: it is not worth an ever longer window
            end = len(text)
            self._window = self._window[-1:]
            self._given = self._decode(self._window)
        return text[begin:end]

    def finish(self) -> str:
        """The text of the bytes still waiting for the rest of their character."""
        text = self._decode(self._window)
        rest = text[len(self._given) :] if text.startswith(self._given) else self._restart()
        self._given = text
        return rest

    def _decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

    def _restart(self) -> str:
        """Give out the odd tokens by themselves.

        Byte-fallback decoders write a run of byte tokens that is no valid UTF-8 as nothing but U+FFFD, its good
        characters included, which were given out when they were complete. More odd tokens than a character has bytes
        are not going to become one.
        """
        self._window = self._window[-self._num_odd :]
        self._num_odd = 0
        self._given = self._decode(self._window)
        return self._given

    def _shorten(self, text: str) -> bool:
        """Drop the window's older part, if the rest decodes to the same end of `text`; says whether it does."""
        num_held = len(text) - len(self._given)
        for length in _TAIL_LENS if num_held == 0 else _LONG_TAIL_LENS:
            tail = self._decode(self._window[-length:])
            # a cut within a character shows as U+FFFD in front
            clean = tail.lstrip(REPLACEMENT) or tail
            if (len(clean) > num_held and text.endswith(clean)) or not text:
                self._window = self._window[-length:]
                self._given = tail[: len(tail) - num_held]
                return True
        return False
