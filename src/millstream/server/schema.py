"""The bodies that the endpoints take. Null stands for a field's default everywhere, as with OpenAI.

Types are checked strictly here ("1" is no number, true is no count); ranges are SamplingParams' business. A field
typed `object` is checked where it is used: a union of lists would be tried, element by element, once per branch.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

_TOKENS = {"type": "array", "items": {"type": "integer"}}

Texts = Annotated[
    object, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]})
]
Prompt = Annotated[
    object,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                _TOKENS,
                {"type": "array", "items": _TOKENS},
            ]
        }
    ),
]
Content = Annotated[
    object,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        "required": ["type", "text"],
                    },
                },
            ]
        }
    ),
]
LogitBias = Annotated[object, WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}})]
TokenIds = Annotated[list[int], Field(fail_fast=True)]


class Body(BaseModel):
    """Base of all bodies: strict types; what it doesn't know stays in `model_extra` for `check_fields`."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=(), allow_inf_nan=True)

    model: str | None = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None
    include_progress: bool | None = None


class Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: Content = None
    name: str | None = None


class SamplingBody(Body):
    """What both generating endpoints take."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: LogitBias = None
    seed: int | None = None
    stop: Texts = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    repeat_last_n: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: TokenIds | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None


class ChatPrompt(BaseModel):
    """What a chat is rendered from; /tokenize takes it as well."""

    messages: Annotated[list[Message], Field(fail_fast=True)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatRequest(ChatPrompt, SamplingBody):
    """POST /v1/chat/completions"""

    logprobs: bool | None = None
    top_logprobs: int | None = None


class CompletionRequest(SamplingBody):
    """POST /v1/completions"""

    prompt: Prompt = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None


class TokenizeRequest(ChatPrompt, Body):
    """POST /tokenize"""

    prompt: str | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(Body):
    """POST /detokenize"""

    tokens: TokenIds
    skip_special_tokens: bool | None = None
