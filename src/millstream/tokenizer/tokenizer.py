"""The Tokenizer: text to token ids and back, and chat messages to a prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from millstream.errors import InvalidRequestError
from millstream.hub.files import ModelFiles
from millstream.tokenizer.chat_template import ChatTemplate
from millstream.tokenizer.from_folder import vocabulary_from_folder
from millstream.tokenizer.from_gguf import vocabulary_from_gguf
from millstream.tokenizer.vocabulary import Vocabulary

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_letters() -> dict[str, int]:
    """GPT-2's letter for each byte: printable bytes stand for themselves, the others for the letters from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_letters()


class Tokenizer:
    """A model's tokenizer. Its methods may be called from several threads."""

    def __init__(self, vocabulary: Vocabulary, *, chat_template: ChatTemplate | None = None) -> None:
        """With `chat_template`, that one in place of all of the model's own."""
        self.backend = vocabulary.backend
        self.bos_token_id = vocabulary.bos_token_id
        self.eos_token_ids = vocabulary.eos_token_ids
        self.vocab_size: int = self.backend.get_vocab_size(with_added_tokens=True)
        """Ids below this have a token. A model may have more rows than that in its logits: they mean nothing."""
        added = self.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._added = {i: token.content for i, token in added.items()}
        self._form = vocabulary.form
        self.chat_template = chat_template
        self._tool_template = chat_template
        if chat_template is None:
            made = {
                name: ChatTemplate(source, special_tokens=vocabulary.special_tokens)
                for name, source in vocabulary.chat_templates.items()
                if name in ("default", "tool_use")
            }
            self.chat_template = made.get("default")
            self._tool_template = made.get("tool_use", self.chat_template)

    @classmethod
    def load(cls, files: ModelFiles, *, chat_template: str | Path | None = None) -> Tokenizer:
        """The tokenizer of a model; with `chat_template`, a file whose Jinja template replaces the model's.

        Raises ModelError when the files hold no tokenizer that can be used, ConfigError for the template's file.
        """
        if files.kind == "gguf":
            vocabulary = vocabulary_from_gguf(files.gguf)
        else:
            vocabulary = vocabulary_from_folder(files.path)
        template = None
        if chat_template is not None:
            template = ChatTemplate.from_file(Path(chat_template), special_tokens=vocabulary.special_tokens)
        return cls(vocabulary, chat_template=template)

    # -- text and tokens ------------------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of `text`. Special tokens written in it are taken as such.

        With `add_special_tokens` the model's begin (and end) tokens are added as its files say.
        Raises InvalidRequestError when `text` is not Unicode text.
        """
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """As `encode`, for many texts, on all cores."""
        try:
            return [e.ids for e in self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)]
        except TypeError:
            raise InvalidRequestError(
                "the text has half of a surrogate pair in it, which is not Unicode text"
            ) from None

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD, ids without a token become nothing.

        Raises InvalidRequestError for an id that is negative or has more than 32 bits.
        """
        try:
            text: str = self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except OverflowError:
            bad = next(i for i in ids if not 0 <= i < 2**32)
            raise InvalidRequestError(f"the token id {bad} is outside the vocabulary of {self.vocab_size}") from None
        return text

    def token_text(self, id: int) -> str:
        """The text of one token alone, special tokens included; U+FFFD where it is a part of a character."""
        return self.token_bytes(id).decode("utf-8", "replace")

    def token_bytes(self, id: int) -> bytes:
        """The bytes that one token adds to the text; empty for an id without a token."""
        if id in self._added:
            return self._added[id].encode()
        token = self.backend.id_to_token(id) if 0 <= id < 2**32 else None
        if token is None:
            return b""
        if self._form == "byte_level":
            if all(letter in _BYTE_OF_LETTER for letter in token):
                return bytes(_BYTE_OF_LETTER[letter] for letter in token)
        elif self._form == "sentencepiece":
            byte = _BYTE_TOKEN.fullmatch(token)
            return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()
        return token.encode()

    # -- chats ----------------------------------------------------------------------------------------------

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for a chat, as text: see `ChatTemplate.render`.

        Raises InvalidRequestError when the model has no chat template or the template refuses the messages.
        """
        template = self._tool_template if tools else self.chat_template
        if template is None:
            raise InvalidRequestError(
                "the model has no chat template: send a prompt to /v1/completions, or start the server with "
                "--chat-template FILE",
                param="messages",
            )
        return template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The prompt for a chat, as token ids. The template writes the begin token where the model wants one, so
        none is added here: it would be there twice."""
        text = self.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
        )
        return self.encode(text, add_special_tokens=False)
