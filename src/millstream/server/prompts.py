"""From messages or prompts to token ids: checks, chat template, tokenization.

Long texts are rendered and tokenized in a thread, so that /health and the streams of others don't wait for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from millstream.errors import InvalidRequestError
from millstream.server.errors import shown
from millstream.server.llm import ServedTokenizer
from millstream.server.schema import ChatPrompt, Message

MAX_MESSAGES = 10_000
MAX_PROMPTS = 256
MAX_TEMPLATE_KWARGS = 16
MESSAGE_COST = 64
"""Characters that rendering a message counts for, besides its text."""
LONG_TEXT_LEN = 4096
"""Characters (or tokens to detokenize) from which the work moves to a thread."""

ROLES = ("system", "developer", "user", "assistant")
_EMPTY_EXTRAS = ("tool_calls", "function_call", "audio", "refusal")
"""What the official client's answers carry as null; a value would change the prompt's meaning, so it is refused."""

T = TypeVar("T")


@dataclass(frozen=True)
class Prompt:
    """One prompt of a completion request: its tokens, and its text where that was given."""

    token_ids: list[int]
    text: str | None = None


class Prompts:
    """Makes token ids of what requests bring."""

    def __init__(self, tokenizer: ServedTokenizer) -> None:
        self._tokenizer = tokenizer

    async def chat(self, body: ChatPrompt) -> list[int]:
        """The tokens of a rendered chat. Raises InvalidRequestError."""
        messages = checked_messages(body.messages)
        is_continued = bool(body.continue_final_message)
        if is_continued and body.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt are both true: only one can be",
                param="continue_final_message",
            )
        if is_continued and messages[-1]["role"] != "assistant":
            raise InvalidRequestError(
                f"continue_final_message is true: the last message's role is {shown(messages[-1]['role'])}, "
                "it must be 'assistant'",
                param="continue_final_message",
            )
        if self._tokenizer.chat_template is None:
            raise InvalidRequestError(
                "this model has no chat template: start the server with --chat-template FILE, or use /v1/completions",
                param="messages",
                code="no_chat_template",
            )
        template_kwargs = checked_template_kwargs(body.chat_template_kwargs)
        add_prompt = not is_continued if body.add_generation_prompt is None else body.add_generation_prompt

        def render() -> list[int]:
            return self._tokenizer.encode_chat(
                messages,
                add_generation_prompt=add_prompt,
                continue_final_message=is_continued,
                template_kwargs=template_kwargs,
            )

        token_ids = await self._run(render, sum(MESSAGE_COST + _text_len(m["content"]) for m in messages))
        if not token_ids:
            raise InvalidRequestError("messages give an empty prompt: it must have tokens", param="messages")
        return token_ids

    async def completion(self, value: object, *, add_special_tokens: bool, vocab_size: int) -> list[Prompt]:
        """The prompts of a completion request. Raises InvalidRequestError."""
        if value is None:
            raise InvalidRequestError("prompt is missing: it must be given", param="prompt", code="missing_field")
        if isinstance(value, list) and not value:
            raise InvalidRequestError("prompt is empty: it must have at least one token", param="prompt")
        # one prompt, or a list of prompts of one kind
        prompts: list[Any] = [value] if isinstance(value, str) or _is_ids(value) else value  # type: ignore[assignment]
        if not isinstance(prompts, list) or not (
            all(isinstance(p, str) for p in prompts) or all(map(_is_ids, prompts))
        ):
            raise InvalidRequestError(
                f"prompt is {shown(value)}: it must be a text, a list of texts, a list of token ids or a list of such",
                param="prompt",
                code="invalid_type",
            )
        if len(prompts) > MAX_PROMPTS:
            raise InvalidRequestError(
                f"prompt is a list of {len(prompts)}: at most {MAX_PROMPTS} are taken", param="prompt"
            )
        if isinstance(prompts[0], str):
            tokens = await self.encode(prompts, add_special_tokens=add_special_tokens)
            made = [Prompt(ids, text) for ids, text in zip(tokens, prompts, strict=True)]
        else:
            made = [Prompt(ids) for ids in prompts]
        for prompt in made:
            if not prompt.token_ids:
                raise InvalidRequestError("prompt is empty: it must have at least one token", param="prompt")
            if prompt.text is None:
                check_ids(prompt.token_ids, vocab_size, "prompt")
        return made

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        def work() -> list[list[int]]:
            return [self._tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]

        return await self._run(work, sum(map(len, texts)))

    async def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        def work() -> str:
            return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

        return await self._run(work, len(token_ids))

    @staticmethod
    async def _run(work: Callable[[], T], size: int) -> T:
        return await asyncio.to_thread(work) if size > LONG_TEXT_LEN else work()


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(i) is int for i in value)


def check_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise InvalidRequestError where an id lies outside the vocabulary."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        bad = next(i for i in token_ids if not 0 <= i < vocab_size)
        raise InvalidRequestError(
            f"{param} has token id {shown(bad)}: ids of this model go from 0 to {vocab_size - 1}", param=param
        )


def checked_messages(messages: list[Message] | None) -> list[dict[str, Any]]:
    """Messages as chat templates understand them: role, content (text, or parts of type text), perhaps name.

    Raises InvalidRequestError, naming the message.
    """
    if messages is None:
        raise InvalidRequestError("messages is missing: it must be given", param="messages", code="missing_field")
    if not messages:
        raise InvalidRequestError("messages is empty: it must have at least one message", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequestError(
            f"messages has {len(messages)} of them: at most {MAX_MESSAGES} are taken", param="messages"
        )
    made = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if message.role not in ROLES:
            hint = " (tools are not supported)" if message.role in ("tool", "function") else ""
            raise InvalidRequestError(
                f"{where}.role is {shown(message.role)}: it must be one of {', '.join(ROLES)}{hint}",
                param=f"{where}.role",
            )
        for name in _EMPTY_EXTRAS:
            value = (message.model_extra or {}).get(name)
            if value is not None and value != []:
                raise InvalidRequestError(
                    f"{where}.{name} is {shown(value)}: it is not supported; leave it out",
                    param=f"{where}.{name}",
                    code="unsupported_parameter",
                )
        role = "system" if message.role == "developer" else message.role
        entry: dict[str, Any] = {"role": role, "content": _content(message.content, where)}
        if message.name is not None:
            entry["name"] = message.name
        made.append(entry)
    return made


def _content(content: object, where: str) -> str | list[dict[str, str]]:
    where += ".content"
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(
            f"{where} is {shown(content)}: it must be text or a list of parts", param=where, code="invalid_type"
        )
    if not content:
        raise InvalidRequestError(f"{where} is empty: it must have at least one part", param=where)
    parts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or kind != "text":
            what = shown(kind) if isinstance(part, dict) else shown(part)
            raise InvalidRequestError(
                f"{where}[{i}] is of type {what}: only parts of type 'text' are supported",
                param=f"{where}[{i}].type",
                code="unsupported_content",
            )
        text = part.get("text")
        if not isinstance(text, str):
            raise InvalidRequestError(
                f"{where}[{i}].text is {shown(text)}: it must be a string",
                param=f"{where}[{i}].text",
                code="invalid_type",
            )
        parts.append({"type": "text", "text": text})
    return parts


def _text_len(content: str | list[dict[str, str]]) -> int:
    return len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content)


def checked_template_kwargs(given: dict[str, Any] | None) -> dict[str, Any]:
    """The values that a request gives to its chat template: a few plain ones. The template checks their names."""
    given = given or {}
    param = "chat_template_kwargs"
    if len(given) > MAX_TEMPLATE_KWARGS:
        raise InvalidRequestError(
            f"{param} has {len(given)} entries: at most {MAX_TEMPLATE_KWARGS} are taken", param=param
        )
    for name, value in given.items():
        if value is not None and not isinstance(value, bool | int | float | str):
            raise InvalidRequestError(
                f"{param}.{name[:64]} is {shown(value)}: it must be a string, a number, true, false or null",
                param=param,
            )
    return given
