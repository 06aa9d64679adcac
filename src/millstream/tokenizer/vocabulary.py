"""What a Tokenizer is made from, whatever kind of file it came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import tokenizers

TokenForm = Literal["byte_level", "sentencepiece", "text"]
"""How a token's string stands for bytes: GPT-2's letter for each byte; text with ▁ for a space and <0x0A> for a
byte; or plain text."""


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A tokenizer's parts as a model's files give them."""

    backend: tokenizers.Tokenizer
    form: TokenForm
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """The tokens that end an answer, without repetition."""
    special_tokens: dict[str, str] = field(default_factory=dict)
    """Their texts by the names that chat templates use: bos_token, eos_token, unk_token, pad_token."""
    chat_templates: dict[str, str] = field(default_factory=dict)
    """Jinja sources by name; `default` is the one for plain chats, `tool_use` the one for chats with tools."""
