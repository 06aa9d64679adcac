"""Chat messages to a prompt, by the model's own Jinja template."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError, nodes

from millstream.errors import ConfigError, InvalidRequestError, ModelError
from millstream.tokenizer.bounded import BoundedEnvironment, RefusedError

MAX_SOURCE_LEN = 2**20
"""Letters of a template; the longest known ones have 20,000."""

_OWN_VARIABLES = frozenset(("messages", "tools", "documents", "add_generation_prompt"))
_TYPE_TESTS = frozenset(("string", "iterable", "sequence", "mapping"))


class ChatTemplate:
    """A compiled chat template. Rendering changes nothing, so it may be used from several threads."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str] | None = None) -> None:
        """`special_tokens` are the texts that the template may write by name: bos_token, eos_token, ...

        Raises ModelError when `source` is not a Jinja template.
        """
        self._special_tokens = dict(special_tokens or {})
        self._environment = BoundedEnvironment()
        if len(source) > MAX_SOURCE_LEN:
            raise ModelError(f"the chat template has {len(source)} letters: at most {MAX_SOURCE_LEN} are supported")
        try:
            tree = self._environment.parse(source)
            self._variables = frozenset(name.name for name in tree.find_all(nodes.Name) if name.ctx == "load")
            self._wants_parts = _iterates_content(tree)
            self._takes_text = not self._wants_parts or any(t.name in _TYPE_TESTS for t in tree.find_all(nodes.Test))
            self._template = self._environment.compile_bounded(tree)
        except TemplateSyntaxError as e:
            raise ModelError(f"the chat template is not valid Jinja: {e.message} (line {e.lineno})") from e
        except Exception as e:  # what Python's compiler says to nesting that is too deep
            raise ModelError(f"the chat template can't be compiled: {type(e).__name__}: {e}") from e

    @classmethod
    def from_file(cls, path: Path, *, special_tokens: Mapping[str, str] | None = None) -> ChatTemplate:
        """The template in a file. Raises ConfigError, naming --chat-template, when it can't be read or compiled."""
        try:
            return cls(path.read_text(encoding="utf-8"), special_tokens=special_tokens)
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(f"--chat-template {path} can't be read: {e}") from e
        except ModelError as e:
            raise ConfigError(f"--chat-template {path}: {e}") from e

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for `messages` (OpenAI's form: role, content as text or list of text parts, tool_calls).

        `add_generation_prompt` ends it with the beginning of an answer. `continue_final_message` ends it right after
        the last message's text instead, so that the model goes on with it; the last message must be the assistant's.
        `template_kwargs` are variables that the template reads, such as `enable_thinking`.

        Raises InvalidRequestError that names the field, with the template's own words where it refuses.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt can't both be true", param="continue_final_message"
            )
        variables: dict[str, Any] = {**self._special_tokens, **self._checked_kwargs(template_kwargs or {})}
        variables |= {"tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
        if tools:
            if "tools" not in self._variables:
                raise InvalidRequestError("the model's chat template has no place for tools", param="tools")
            variables["tools"] = [dict(tool) for tool in tools]
        if not messages:
            raise InvalidRequestError("messages is empty: at least one message is needed", param="messages")
        chat = [_plain(message, f"messages[{i}]") for i, message in enumerate(messages)]
        marker = _mark_end(chat) if continue_final_message else None
        variables["messages"] = [self._shaped(message) for message in chat]
        text = self._render(variables)
        if marker is None:
            return text
        end = text.rfind(marker)
        if end < 0:
            raise InvalidRequestError(
                "the model's chat template does not write out the final message, so it can't be continued",
                param="continue_final_message",
            )
        return text[:end]

    def _render(self, variables: dict[str, Any]) -> str:
        try:
            return self._environment.render_bounded(self._template, variables)
        except RefusedError as e:
            raise InvalidRequestError(str(e), param="messages") from e
        except Exception as e:  # a template is a program: it can fail in any way
            raise InvalidRequestError(
                f"the model's chat template fails on these messages: {type(e).__name__}: {e}", param="messages"
            ) from e

    def _checked_kwargs(self, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        for name in kwargs:
            if name in _OWN_VARIABLES or name in self._special_tokens:
                raise InvalidRequestError(f"{name} can't be set as a template variable", param="chat_template_kwargs")
            if name not in self._variables:
                raise InvalidRequestError(
                    f"the model's chat template does not read a variable {name!r}", param="chat_template_kwargs"
                )
        return kwargs

    def _shaped(self, message: dict[str, Any]) -> dict[str, Any]:
        """`message` with its content in the form that the template can read: text, or a list of parts."""
        content = message["content"]
        if isinstance(content, list) and not self._wants_parts:
            return message | {"content": "\n".join(part["text"] for part in content)}
        if isinstance(content, str) and not self._takes_text:
            return message | {"content": [{"type": "text", "text": content}]}
        return message


def _iterates_content(tree: nodes.Template) -> bool:
    """Whether a loop of the template runs over a message's content: such a template reads lists of parts."""

    def is_content(node: nodes.Node | None) -> bool:
        while isinstance(node, nodes.Filter):
            node = node.node
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        if isinstance(node, nodes.Getattr):
            return node.attr == "content"
        return isinstance(node, nodes.Name) and node.name in names

    names = {"content"}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and is_content(assign.node):
            names.add(assign.target.name)
    return any(is_content(loop.iter) for loop in tree.find_all(nodes.For))


def _plain(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A copy of `message` that was checked: role is text, content is text or a list of text parts, no field is null."""
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{where} is no object", param=where)
    plain = {key: value for key, value in message.items() if value is not None}
    if not isinstance(plain.get("role"), str):
        raise InvalidRequestError(f"{where}.role is {message.get('role')!r}: it must be text", param=f"{where}.role")
    content = plain.get("content", "")
    if isinstance(content, list):
        content = [_text_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
    elif not isinstance(content, str):
        raise InvalidRequestError(
            f"{where}.content must be text or a list of text parts, not {type(content).__name__}",
            param=f"{where}.content",
        )
    plain["content"] = content
    if "tool_calls" in plain:
        plain["tool_calls"] = _tool_calls(plain["tool_calls"], f"{where}.tool_calls")
    return plain


def _text_part(part: Any, where: str) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(part.get("text"), str):
        raise InvalidRequestError(
            f"{where} has the type {kind!r}: only parts of the type 'text' with a text are supported", param=where
        )
    return {"type": "text", "text": part["text"]}


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects: clients send them as JSON text, templates want to walk them."""
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise InvalidRequestError(f"{where} must be a list of objects", param=where)
    plain = []
    for i, call in enumerate(calls):
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            try:
                arguments = json.loads(function["arguments"] or "{}")
            except (ValueError, RecursionError) as e:
                raise InvalidRequestError(
                    f"{where}[{i}].function.arguments is not JSON: {e}", param=f"{where}[{i}].function.arguments"
                ) from e
            call = {**call, "function": {**function, "arguments": arguments}}
        plain.append(dict(call))
    return plain


def _mark_end(chat: list[dict[str, Any]]) -> str:
    """Put a marker behind the text of the last message and return it: in the output it tells where to cut."""
    last = chat[-1]
    if last["role"] != "assistant":
        raise InvalidRequestError(
            f"continue_final_message needs a final message of the assistant, not of {last['role']!r}",
            param="continue_final_message",
        )
    marker = f"end-of-final-message-{secrets.token_hex(16)}"
    content = last["content"]
    if isinstance(content, list):
        parts = content or [{"type": "text", "text": ""}]
        last["content"] = [*parts[:-1], {"type": "text", "text": parts[-1]["text"] + marker}]
    else:
        last["content"] = content + marker
    return marker
