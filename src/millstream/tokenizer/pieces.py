"""The text of single tokens, where that does not depend on what stands before them."""

from __future__ import annotations

from typing import Protocol

from tokenizers import decoders

REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are no character (yet)."""
MAX_TOKEN_ID = 2**32 - 1


class DecodingBackend(Protocol):
    """The part of `tokenizers.Tokenizer` that is needed here."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...


class TokenPieces:
    """The text that a token adds wherever whole characters stand before it; each found out once.

    Only decoders that join the bytes of tokens have such pieces. Parts of characters are none.
    """

    def __init__(self, backend: DecodingBackend) -> None:
        self._backend = backend
        self._is_known = isinstance(getattr(backend, "decoder", None), decoders.ByteLevel)
        self._pieces: dict[bool, dict[int, str | None]] = {False: {}, True: {}}

    def of(self, *, skip_special_tokens: bool) -> dict[int, str | None]:
        """What is known so far, by token id; for `find` to add to."""
        return self._pieces[skip_special_tokens]

    def find(self, token_id: int, *, skip_special_tokens: bool) -> str | None:
        """The piece of a token; None where its text depends on what stands before it."""
        if not self._is_known or not 0 <= token_id <= MAX_TOKEN_ID:
            return None
        text = self._backend.decode([token_id], skip_special_tokens=skip_special_tokens)
        piece = None if REPLACEMENT in text else text
        self._pieces[skip_special_tokens][token_id] = piece
        return piece
