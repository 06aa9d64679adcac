"""The state of every request field, one table for each endpoint; docs/api.md shows the same tables.

A field is supported, accepted without effect (and documented as such), or refused by name. A refused field may still
be sent with one of its `harmless` values, which mean what the server does anyway: clients send them by default.
Fields in no table are new to us: they are accepted, and logged once.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millstream.errors import InvalidRequestError
from millstream.log import log
from millstream.server.errors import shown


class FieldState(enum.StrEnum):
    SUPPORTED = "supported"
    NO_EFFECT = "accepted without effect"
    REFUSED = "refused"


@dataclass(frozen=True)
class Field:
    """One request field: what happens to it, and a sentence on that."""

    state: FieldState
    note: str
    harmless: tuple[Any, ...] = ()
    """Values of a refused field that are accepted besides null."""


def _yes(note: str) -> Field:
    return Field(FieldState.SUPPORTED, note)


def _idle(note: str) -> Field:
    return Field(FieldState.NO_EFFECT, note)


def _no(note: str, *harmless: Any) -> Field:
    return Field(FieldState.REFUSED, note, harmless)


_SAMPLING: dict[str, Field] = {
    "model": _yes("the served name; may be left out"),
    "stream": _yes("server-sent events"),
    "stream_options": _yes("`include_usage`; extension: `include_progress`; only with `stream`"),
    "n": _yes("1 to 128"),
    "max_completion_tokens": _yes("at least 1; the same as `max_tokens`, both given must be equal"),
    "temperature": _yes("0 (greedy) to 2, default 1"),
    "top_p": _yes("over 0, at most 1"),
    "presence_penalty": _yes("-2 to 2"),
    "frequency_penalty": _yes("-2 to 2"),
    "logit_bias": _yes("token id to a bias of -100 to 100, at most 1024 entries"),
    "seed": _yes("same seed and prompt, same text, whatever else runs; drawn where absent"),
    "stop": _yes("a string or at most 16 of them, 1 to 512 characters each"),
    "top_k": _yes("extension: choose among the k likeliest tokens; 0 or -1: all"),
    "min_p": _yes("extension: 0 to 1, fraction of the likeliest token's probability"),
    "repetition_penalty": _yes("extension: over 0, at most 10; 1 is none"),
    "repeat_last_n": _yes("extension: penalties look at the last n tokens; -1: all; default `--repeat-last-n`"),
    "min_tokens": _yes("extension: no end before this many tokens"),
    "ignore_eos": _yes("extension: go on after the end-of-text token"),
    "stop_token_ids": _yes("extension: at most 256 token ids that end the answer"),
    "skip_special_tokens": _yes("extension: leave special tokens out of the text, default true"),
    "priority": _yes("extension: lower runs first, default 0"),
    "cache_salt": _yes("extension: only requests with the same salt (1 to 128 characters) share cached prefixes"),
    "user": _idle("the server keeps nothing by user"),
    "metadata": _idle("the server stores nothing"),
    "service_tier": _idle("there is one tier"),
    "safety_identifier": _idle("the server keeps nothing by user"),
    "prompt_cache_key": _idle("prefixes are found by content; `cache_salt` keeps them apart"),
    "prompt_cache_options": _idle("the prefix cache is always implicit"),
    "prompt_cache_retention": _idle("cached prefixes are kept until their memory is needed"),
    "structured_outputs": _no("constrained output is not supported"),
    "guided_json": _no("constrained output is not supported"),
    "guided_regex": _no("constrained output is not supported"),
    "guided_choice": _no("constrained output is not supported"),
    "guided_grammar": _no("constrained output is not supported"),
    "grammar": _no("constrained output is not supported"),
    "json_schema": _no("constrained output is not supported"),
    "logits_processors": _no("code from a request is never run"),
    "custom_logit_processor": _no("code from a request is never run"),
    "bad_words": _no("use `logit_bias`", []),
    "allowed_token_ids": _no("use `logit_bias`"),
    "use_beam_search": _no("beam search is not supported", False),
    "length_penalty": _no("beam search is not supported", 1),
    "include_stop_str_in_output": _no("stop strings are never part of the text", False),
    "truncate_prompt_tokens": _no("a prompt that is too long is refused, not cut"),
    "prompt_logprobs": _no("use `echo` with `logprobs` of /v1/completions"),
    "return_token_ids": _no("not supported", False),
    "return_tokens_as_token_ids": _no("not supported", False),
    "prompt_embeds": _no("tensors are never taken from a request"),
    "typical_p": _no("not supported", 1),
    "dry_multiplier": _no("not supported", 0),
    "mirostat": _no("not supported", 0),
    "top_a": _no("not supported", 0),
}

CHAT_FIELDS: Mapping[str, Field] = {
    "messages": _yes("roles system, developer (taken as system), user, assistant; text, or parts of type text"),
    **_SAMPLING,
    "max_tokens": _yes("at least 1; default: the rest of the context"),
    "logprobs": _yes("true or false"),
    "top_logprobs": _yes("0 to 20; only with `logprobs`"),
    "add_generation_prompt": _yes("extension: default true, unless `continue_final_message`"),
    "continue_final_message": _yes("extension: go on with the last message, which must be the assistant's"),
    "chat_template_kwargs": _yes("extension: values for variables that the model's chat template reads"),
    "parallel_tool_calls": _idle("there are no tools"),
    "store": _no("the server stores nothing", False),
    "tools": _no("tools are not supported", []),
    "tool_choice": _no("tools are not supported", "none"),
    "functions": _no("tools are not supported", []),
    "function_call": _no("tools are not supported", "none"),
    "response_format": _no("constrained output is not supported", {"type": "text"}),
    "modalities": _no("answers are text", ["text"]),
    "audio": _no("answers are text"),
    "prediction": _no("not supported"),
    "web_search_options": _no("the server does not search"),
    "moderation": _no("the server does not moderate"),
    "reasoning_effort": _no("not supported", "none"),
    "verbosity": _no("not supported", "medium"),
    "chat_template": _no("code from a request is never run; the server has --chat-template"),
    "documents": _no("not supported", []),
    "add_special_tokens": _no("the chat template decides on special tokens", False),
    "echo": _no("only /v1/completions can echo", False),
    "best_of": _no("use `n`", 1),
}

COMPLETION_FIELDS: Mapping[str, Field] = {
    "prompt": _yes("text, a list of texts, token ids, or a list of lists of token ids; at most 256 prompts"),
    **_SAMPLING,
    "max_tokens": _yes("at least 1, default 16; 0 with `echo` scores the prompt"),
    "echo": _yes("the text begins with the prompt; with `logprobs`, so do they"),
    "logprobs": _yes("0 to 20"),
    "best_of": _yes("only 1 or the same as `n`"),
    "add_special_tokens": _yes("extension: begin a text prompt as the tokenizer does (BOS), default true"),
    "suffix": _no("filling in is not supported", ""),
    "store": _no("the server stores nothing", False),
    "response_format": _no("constrained output is not supported", {"type": "text"}),
    "tools": _no("tools are not supported", []),
}

TOKENIZE_FIELDS: Mapping[str, Field] = {
    "model": _yes("the served name; may be left out"),
    "prompt": _yes("a text; this or `messages`"),
    "messages": _yes("a chat, as in /v1/chat/completions"),
    "add_special_tokens": _yes("begin a text as the tokenizer does (BOS), default true; not for `messages`"),
    "add_generation_prompt": _yes("as in /v1/chat/completions"),
    "continue_final_message": _yes("as in /v1/chat/completions"),
    "chat_template_kwargs": _yes("as in /v1/chat/completions"),
    "tools": _no("tools are not supported", []),
    "chat_template": _no("code from a request is never run; the server has --chat-template"),
}

DETOKENIZE_FIELDS: Mapping[str, Field] = {
    "model": _yes("the served name; may be left out"),
    "tokens": _yes("token ids"),
    "skip_special_tokens": _yes("leave special tokens out of the text, default false"),
}


class UnknownFields:
    """Logs each unknown field once. Bounded: the names come from clients."""

    MAX_NAMES = 1000

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def note(self, name: str) -> None:
        name = name[:64]
        if name not in self._seen and len(self._seen) < self.MAX_NAMES:
            self._seen.add(name)
            log.warning("request field %r is unknown: it is accepted and has no effect (logged once)", name)


def check_fields(extra: Mapping[str, Any], table: Mapping[str, Field], unknown: UnknownFields) -> None:
    """Go through the fields of a body that its model doesn't have.

    Raises InvalidRequestError for the first one that `table` refuses.
    """
    for name, value in extra.items():
        field = table.get(name)
        if field is None:
            unknown.note(name)
        elif field.state is FieldState.REFUSED and value is not None and not _is_harmless(value, field):
            also = "".join(f" or {shown(v)}" for v in field.harmless)
            raise InvalidRequestError(
                f"{name} is {shown(value)}: it is refused ({field.note}); leave it out, or send null{also}",
                param=name,
                code="unsupported_parameter",
            )


def _is_harmless(value: Any, field: Field) -> bool:
    # by type as well: True is not 1 here
    return any(type(value) is type(v) and value == v for v in field.harmless) or (
        type(value) is float and any(type(v) is int and value == v for v in field.harmless)
    )
