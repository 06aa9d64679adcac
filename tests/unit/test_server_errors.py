"""Errors: OpenAI's envelope, the right field and status for each; never a 5xx for a body."""

from __future__ import annotations

import json
import logging
from typing import Any

import openai
import pytest

from millstream.errors import ConfigError
from millstream.server.fields import UnknownFields
from tests.fake_llm import MODEL, FakeLLM, app_of, call, served

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


CHAT_BAD: list[tuple[dict[str, Any], str]] = [
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": -0.1}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": True}, "n"),
    ({"stream": "yes"}, "stream"),
    ({"seed": 2**63}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", 5]}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop_token_ids": [258]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": ["1"]}, "stop_token_ids[0]"),
    ({"logit_bias": {"258": 1}}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": "x"}}, "logit_bias"),
    ({"logit_bias": {"1": True}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"logit_bias": []}, "logit_bias"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"presence_penalty": -2.5}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repeat_last_n": -2}, "repeat_last_n"),
    ({"priority": 2**40}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * 129}, "cache_salt"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"chat_template_kwargs": {"enable_thinking": [1]}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [*HELLO, {"role": "tool", "content": "x"}]}, "messages[1].role"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    (user(5), "messages[0].content"),
    (user([]), "messages[0].content"),
    (user(["x"]), "messages[0].content[0].type"),
    (user([{"type": "image_url", "image_url": {"url": "x"}}]), "messages[0].content[0].type"),
    (user([{"type": "text"}]), "messages[0].content[0].text"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"prediction": {}}, "prediction"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"store": True}, "store"),
    ({"logits_processors": ["x"]}, "logits_processors"),
    ({"guided_json": {}}, "guided_json"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"best_of": 2}, "best_of"),
    ({"best_of": True}, "best_of"),
    ({"echo": True}, "echo"),
]


@pytest.mark.parametrize(("body", "param"), CHAT_BAD, ids=lambda v: str(v)[:50])
async def test_bad_chat_bodies(body: dict[str, Any], param: str) -> None:
    llm = FakeLLM()
    app = app_of(llm)
    # the same before a stream begins
    for stream in ({}, {"stream": True}):
        if "stream" not in body and not ("stream_options" in body and stream):
            reply = await call(app, CHAT, {"messages": HELLO, **stream, **body})
            assert reply.status == 400
            assert reply.error["param"] == param
            assert reply.error["type"] == "invalid_request_error"
            assert param.split(".")[0].split("[")[0] in reply.error["message"]
            assert len(reply.error["message"]) <= 600
    if "stream" in body:
        assert (await call(app, CHAT, {"messages": HELLO, **body})).error["param"] == param
    assert llm.calls == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": "", "add_special_tokens": False}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [258]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**64]}, "prompt"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
        ({"prompt": "a", "max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        ({"prompt": "a", "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
    ids=lambda v: str(v)[:50],
)
async def test_bad_completion_bodies(body: dict[str, Any], param: str) -> None:
    reply = await call(app_of(FakeLLM()), COMPLETION, body)
    assert reply.status == 400
    assert reply.error["param"] == param


async def test_messages_name_field_value_and_limit() -> None:
    app = app_of(FakeLLM())
    message = (await call(app, CHAT, {"messages": HELLO, "temperature": 3})).error["message"]
    assert message == "temperature is 3.0: it must be from 0 to 2"
    message = (await call(app, CHAT, {"messages": HELLO, "temperature": "hot"})).error["message"]
    assert message == "temperature is 'hot': it must be a number"
    long = (await call(app, CHAT, {"messages": HELLO, "top_p": "x" * 100_000})).error["message"]
    assert len(long) < 150


async def test_best_of_of_one_or_n() -> None:
    app = app_of(FakeLLM())
    assert (await call(app, COMPLETION, {"prompt": "a", "n": 3, "best_of": 3})).status == 200
    assert (await call(app, COMPLETION, {"prompt": "a", "best_of": 1})).status == 200


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"\xff",
        b'{"messages": NaN}',
        b"[" * 100_000,
        b'{"a":' * 5000,
        b'{"messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"n":' + b"9" * 10_000 + b"}",
        b"\xef\xbb\xbf{}",
    ],
    ids=lambda d: repr(d[:20]),
)
async def test_bodies_that_are_no_json_objects(data: bytes) -> None:
    reply = await call(app_of(FakeLLM()), CHAT, data)
    assert reply.status == 400
    assert reply.error["code"] == "invalid_json"


async def test_content_type_must_be_json() -> None:
    # a web page may post text/plain to localhost without a preflight
    data = json.dumps({"messages": HELLO}).encode()
    reply = await call(app_of(FakeLLM()), CHAT, data, headers={"content-type": "text/plain"})
    assert reply.status == 400
    assert "content-type" in reply.error["message"]
    good = {"content-type": "Application/JSON; charset=utf-8"}
    assert (await call(app_of(FakeLLM()), CHAT, data, headers=good)).status == 200


async def test_unknown_paths_methods_and_models() -> None:
    app = app_of(FakeLLM())
    reply = await call(app, "/v1/embeddings", {})
    assert (reply.status, reply.error["type"]) == (404, "not_found_error")
    reply = await call(app, CHAT, method="GET")
    assert (reply.status, reply.error["code"]) == (405, "method_not_allowed")
    assert reply.headers["allow"] == "POST"
    reply = await call(app, CHAT, {"messages": HELLO, "model": "gpt-4"})
    assert (reply.status, reply.error["code"], reply.error["param"]) == (404, "model_not_found", "model")
    assert (await call(app, CHAT, {"messages": HELLO, "model": MODEL})).status == 200
    assert (await call(app, CHAT, {"messages": HELLO, "model": None})).status == 200
    assert (await call(app, CHAT + "/", {"messages": HELLO})).status == 404


async def test_prompt_too_long() -> None:
    reply = await call(app_of(FakeLLM()), CHAT, user("x" * 2000) | {"stream": True})
    assert reply.status == 400
    assert reply.error["code"] == "context_length_exceeded"
    assert "1000" in reply.error["message"]


async def test_no_chat_template() -> None:
    llm = FakeLLM()
    llm.tokenizer.chat_template = None
    reply = await call(app_of(llm), CHAT, {"messages": HELLO})
    assert (reply.status, reply.error["code"]) == (400, "no_chat_template")
    assert "--chat-template" in reply.error["message"]


@pytest.mark.parametrize("is_declared", [True, False])
async def test_body_limit(is_declared: bool) -> None:
    data = json.dumps(user("x" * 2000)).encode()
    headers = {"content-length": str(len(data))} if is_declared else {}
    reply = await call(app_of(FakeLLM(), max_request_bytes=1024), CHAT, data, headers=headers)
    assert (reply.status, reply.error["code"]) == (413, "request_too_large")
    assert "1024" in reply.error["message"]


async def test_overloaded_dead_and_loading() -> None:
    llm = FakeLLM()
    app = app_of(llm)
    llm.is_full = True
    for stream in (False, True):
        reply = await call(app, CHAT, {"messages": HELLO, "stream": stream})
        assert (reply.status, reply.error["code"]) == (429, "queue_full")
        assert int(reply.headers["retry-after"]) >= 1
    llm.is_full, llm.is_ready = False, False
    reply = await call(app, CHAT, {"messages": HELLO})
    assert (reply.status, reply.error["code"]) == (503, "not_ready")
    assert "retry-after" in reply.headers
    llm.is_dead = True
    reply = await call(app, CHAT, {"messages": HELLO})
    assert reply.status == 503
    assert reply.headers["x-should-retry"] == "false"
    assert "4711" not in reply.error["message"]


async def test_internal_errors_tell_nothing(caplog: pytest.LogCaptureFixture) -> None:
    llm = FakeLLM()
    llm.fail_after = (0, ZeroDivisionError("secret detail"))
    with caplog.at_level(logging.ERROR, "millstream"):
        reply = await call(app_of(llm), CHAT, {"messages": HELLO}, headers={"x-request-id": "my-id.1"})
    assert reply.status == 500
    assert "secret" not in reply.body.decode()
    assert reply.headers["x-request-id"] == "my-id.1"
    assert "my-id.1" in reply.error["message"]
    assert "my-id.1" in caplog.text
    assert "secret detail" in caplog.text
    # outside the handlers, too
    llm.metrics.render = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    reply = await call(app_of(llm), "/metrics", method="GET")
    assert (reply.status, reply.error["code"]) == (500, "internal_error")
    assert "ZeroDivision" not in reply.body.decode()


async def test_request_ids() -> None:
    app = app_of(FakeLLM())
    ids = {(await call(app, "/health", method="GET")).headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3
    for bad in ("", "a b", "x" * 129, "é"):
        assert (await call(app, "/health", method="GET", headers={"x-request-id": bad})).headers["x-request-id"] != bad


async def test_api_key_guards_all_but_health_and_ready() -> None:
    app = app_of(FakeLLM(), api_key="gehéim")
    good = {"authorization": "Bearer gehéim"}
    for path in ("/health", "/ready"):
        assert (await call(app, path, method="GET")).status == 200
    for path in ("/docs", "/openapi.json", "/metrics", "/version", "/v1/models", "/nowhere", "//health", "/health/"):
        reply = await call(app, path, method="GET")
        assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
    # the path is the request's own: a Host header that holds an open one changes nothing
    reply = await call(app, "/metrics", method="GET", headers={"host": "x/health?"})
    assert reply.status == 401
    for bad in ("Bearer", "Bearer ", "Bearer gehéim2", "Basic gehéim", "gehéim", "Bearer ünicode"):
        reply = await call(app, CHAT, {"messages": HELLO}, headers={"authorization": bad})
        assert reply.status == 401
        assert reply.headers["www-authenticate"] == "Bearer"
    assert (await call(app, CHAT, {"messages": HELLO}, headers=good)).status == 200
    assert (await call(app, "/docs", method="GET", headers=good)).status == 200


async def test_an_empty_key_is_no_key() -> None:
    with pytest.raises(ConfigError, match="--api-key"):
        app_of(FakeLLM(), api_key="")


async def test_official_client_sees_its_own_errors() -> None:
    llm = FakeLLM()
    async with served(llm, api_key="k") as url:
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="k", max_retries=0) as client:
            with pytest.raises(openai.BadRequestError) as bad:
                await client.chat.completions.create(model=MODEL, messages=HELLO, temperature=5)  # type: ignore[call-overload]
            assert bad.value.param == "temperature"
            llm.is_full = True
            with pytest.raises(openai.RateLimitError):
                await client.completions.create(model=MODEL, prompt="x")


def test_unknown_fields_are_logged_once_and_bounded(caplog: pytest.LogCaptureFixture) -> None:
    unknown = UnknownFields()
    with caplog.at_level(logging.WARNING, "millstream"):
        for _ in range(3):
            unknown.note("field_of_2030")
        assert caplog.text.count("field_of_2030") == 1
        for i in range(2000):
            unknown.note(f"f{i}")
    assert len(caplog.records) == UnknownFields.MAX_NAMES


async def test_prompts_are_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    llm = FakeLLM()
    app = app_of(llm)
    with caplog.at_level(logging.DEBUG):
        await call(app, CHAT, user("my secret prompt"))
        await call(app, COMPLETION, {"prompt": "my secret prompt", "what": "my secret prompt"})
        llm.fail_after = (0, RuntimeError("x"))
        await call(app, CHAT, user("my secret prompt"))
    assert "my secret prompt" not in caplog.text
    assert "MY SECRET PROMPT" not in caplog.text
