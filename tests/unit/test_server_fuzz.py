"""No body makes a 5xx; every 200 has OpenAI's form; docs/api.md says what the tables say."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types import Completion, completion_create_params
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat import completion_create_params as chat_create_params

from millstream.server.docs import TABLES, in_order
from millstream.server.fields import CHAT_FIELDS, COMPLETION_FIELDS, FieldState
from millstream.server.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tests.fake_llm import FakeLLM, Reply, app_of, call

BODIES = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
API_MD = Path(__file__).parents[2] / "docs" / "api.md"

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-2, 300)
    | st.just(10**400)
    | st.floats(allow_nan=False)
    | st.floats(0, 2)
    | st.text(max_size=8)
    | st.sampled_from(["text", "user", "assistant", "none", "é", "\u0000"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "developer"]) | json_values},
        optional={
            "content": st.text(max_size=20)
            | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=5)}), max_size=3)
            | json_values,
            "name": st.text(max_size=5) | json_values,
            "tool_calls": json_values,
        },
    ),
    max_size=4,
)
prompts = st.text(max_size=20) | st.lists(st.integers(0, 257), max_size=8) | st.lists(st.text(max_size=5), max_size=3)


def bodies(path: str) -> st.SearchStrategy[Any]:
    """Bodies that are nearly right: a good core, and any values in some of the known fields."""
    core: dict[str, st.SearchStrategy[Any]] = {
        "/v1/chat/completions": {"messages": messages},
        "/v1/completions": {"prompt": prompts},
        "/tokenize": {"prompt": st.text(max_size=20)},
        "/detokenize": {"tokens": st.lists(st.integers(-1, 260), max_size=8)},
    }[path]
    good = {
        "stream": st.booleans(),
        "n": st.integers(1, 3),
        "max_tokens": st.integers(0, 9),
        "temperature": st.floats(0, 2),
        "echo": st.booleans(),
        "logprobs": st.integers(0, 5) | st.booleans(),
        "stream_options": st.just({"include_usage": True}),
    }
    fields = st.dictionaries(st.sampled_from(sorted(TABLES[path])) | st.text(max_size=5), json_values, max_size=3)
    shaped = st.fixed_dictionaries(core, optional=good)
    return st.builds(lambda a, b: {**a, **b}, shaped, fields) | shaped | json_values


def check(path: str, reply: Reply) -> None:
    assert reply.status < 500, reply.body
    if reply.status != 200:
        assert reply.status in (400, 404)
        assert reply.error["message"]
        return
    if not path.startswith("/v1"):
        json.loads(reply.body)
        return
    kind: Any
    if reply.headers["content-type"].startswith("text/event-stream"):
        kind = ChatCompletionChunk if "chat" in path else Completion
        *chunks, done = reply.events
        assert done == "[DONE]"
        ends = [c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"] is not None]
        assert sorted(ends) == sorted({c["index"] for chunk in chunks for c in chunk["choices"]})
    else:
        kind = ChatCompletion if "chat" in path else Completion
        chunks = [reply.json]
        assert all(c["finish_reason"] in ("stop", "length") for c in reply.json["choices"])
    for chunk in chunks:
        for choice in chunk["choices"]:
            if "chat" not in path:
                choice["finish_reason"] = choice["finish_reason"] or "stop"  # null in OpenAI's own chunks, too
                for name in ("token_logprobs", "top_logprobs"):
                    values = (choice["logprobs"] or {}).get(name)
                    if values and values[0] is None:  # the first token of an echo
                        del values[0]
        kind.model_validate(chunk)


@pytest.mark.parametrize("path", sorted(TABLES))
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_body_makes_a_5xx(path: str, data: st.DataObject) -> None:
    body = data.draw(bodies(path))
    check(path, asyncio.run(call(app_of(FakeLLM(lambda prompt, index: "aé")), path, body)))


@settings(max_examples=100, deadline=None)
@given(body=st.binary(max_size=50) | st.text(max_size=50).map(str.encode))
def test_no_bytes_make_a_5xx(body: bytes) -> None:
    assert asyncio.run(call(app_of(FakeLLM()), "/v1/completions", body)).status == 400


# -- the tables -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(TABLES))
def test_supported_fields_are_those_of_the_model(path: str) -> None:
    supported = {name for name, field in TABLES[path].items() if field.state is FieldState.SUPPORTED}
    assert supported == set(BODIES[path].model_fields)


def test_every_field_of_openai_has_a_state() -> None:
    for module, table in ((chat_create_params, CHAT_FIELDS), (completion_create_params, COMPLETION_FIELDS)):
        names = set(get_type_hints(module.CompletionCreateParamsStreaming))
        assert {"stream", "model", "temperature", "logit_bias"} <= names
        assert names <= set(table)


def test_api_md_says_what_the_tables_say() -> None:
    text = API_MD.read_text()
    for path, table in TABLES.items():
        section = text.split(f"## POST {path}\n")[1].split("\n## ")[0]
        rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| (.+) \|$", section, re.MULTILINE)
        assert rows == [(name, field.state.value, field.note) for name, field in in_order(table)]
