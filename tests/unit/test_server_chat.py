"""/v1/chat/completions, mostly through the official client over real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.fake_llm import BOS, EOS, MODEL, FakeLLM, app_of, call, served

HELLO: Any = [{"role": "user", "content": "hi"}]
PATH = "/v1/chat/completions"


@pytest.fixture
def llm() -> FakeLLM:
    return FakeLLM(lambda prompt, index: ["Grüße 👋🏽", "second", "third one"][index])


@pytest.fixture
async def client(llm: FakeLLM) -> AsyncIterator[openai.AsyncOpenAI]:
    async with served(llm) as url, openai.AsyncOpenAI(base_url=url + "/v1", api_key="-", max_retries=0) as client:
        yield client


async def test_whole_answer(client: openai.AsyncOpenAI, llm: FakeLLM) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=HELLO)
    assert answer.choices[0].message.content == "Grüße 👋🏽"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is None
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL
    assert answer.usage is not None
    num_prompt = len("<user>hi<assistant>")
    num_output = len("Grüße 👋🏽".encode()) + 1
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (num_prompt, num_output)
    assert answer.usage.total_tokens == num_prompt + num_output
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == num_prompt // 2
    ChatCompletion.model_validate(answer.model_dump())


async def test_stream_joined_equals_whole(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Grüße 👋🏽"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(c.choices[0].delta.role is None for c in chunks[1:])
    # bytes of half a character make no chunk: one for each of 8 characters, the role, the end
    assert len(chunks) == 10
    assert all(c.choices[0].delta.content for c in chunks[1:-1])
    assert [c.choices[0].finish_reason for c in chunks] == [None] * 9 + ["stop"]
    assert {c.id for c in chunks} == {chunks[0].id}


async def test_sync_client_and_stream_helper(client: openai.AsyncOpenAI) -> None:
    def talk() -> tuple[str | None, str]:
        sync = openai.OpenAI(base_url=str(client.base_url), api_key="-", max_retries=0)
        whole = sync.chat.completions.create(model=MODEL, messages=HELLO).choices[0].message.content
        streamed = sync.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        return whole, "".join(c.choices[0].delta.content or "" for c in streamed)

    assert await asyncio.to_thread(talk) == ("Grüße 👋🏽", "Grüße 👋🏽")
    async with client.chat.completions.stream(model=MODEL, messages=HELLO, logprobs=True) as stream:
        events = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "Grüße 👋🏽"
    assert final.choices[0].finish_reason == "stop"
    assert events.count("content.done") == 1


async def test_raw_stream_form() -> None:
    reply = await call(app_of(FakeLLM()), PATH, {"messages": HELLO, "stream": True, "max_tokens": 2})
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.events[-1] == "[DONE]"
    assert reply.body.endswith(b"\n\ndata: [DONE]\n\n")
    for event in reply.events[:-1]:
        assert "usage" not in event
        ChatCompletionChunk.model_validate(event, strict=True)
    assert reply.events[-2]["choices"][0]["delta"] == {}
    assert reply.events[-2]["choices"][0]["finish_reason"] == "length"


async def test_include_usage_is_one_last_chunk() -> None:
    body = {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}, "n": 2}
    events = (await call(app_of(FakeLLM(lambda p, i: "abc")), PATH, body)).events
    *chunks, last, done = events
    assert done == "[DONE]"
    assert all(c["usage"] is None and c["choices"] for c in chunks)
    assert last["choices"] == []
    # the prompt counts once, both answers of three bytes and an end count
    assert last["usage"]["prompt_tokens"] == len("<user>hi<assistant>")
    assert last["usage"]["completion_tokens"] == 8
    ChatCompletionChunk.model_validate(last, strict=True)


async def test_n_answers_interleave(client: openai.AsyncOpenAI) -> None:
    texts, ends, order = {0: "", 1: "", 2: ""}, [], []
    async for chunk in await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, n=3):
        [choice] = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        order.append(choice.index)
        if choice.finish_reason:
            ends.append(choice.index)
    assert texts == {0: "Grüße 👋🏽", 1: "second", 2: "third one"}
    assert sorted(ends) == [0, 1, 2]
    assert order[:6] == [0, 1, 2, 0, 1, 2]
    whole = await client.chat.completions.create(model=MODEL, messages=HELLO, n=3)
    assert [c.message.content for c in whole.choices] == ["Grüße 👋🏽", "second", "third one"]
    assert [c.index for c in whole.choices] == [0, 1, 2]


async def test_logprobs(client: openai.AsyncOpenAI, llm: FakeLLM) -> None:
    llm.script = lambda prompt, index: "é!"
    whole = await client.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True, top_logprobs=5)
    assert whole.choices[0].logprobs is not None
    content = whole.choices[0].logprobs.content
    assert content is not None
    assert [t.token for t in content] == ["bytes:\\xc3", "bytes:\\xa9", "!", "</s>"]
    assert [t.bytes for t in content] == [[0xC3], [0xA9], [33], list(b"</s>")]
    assert [(t.token, t.logprob) for t in content[2].top_logprobs] == [
        ("!", -1.0 + 0.5),
        ("A", -1.0),
        ("B", -2.0),
        ("C", -3.0),
        ("D", -9999.0),  # -inf is no JSON
    ]
    streamed = []
    async for chunk in await client.chat.completions.create(
        model=MODEL, messages=HELLO, logprobs=True, top_logprobs=5, stream=True
    ):
        if chunk.choices[0].logprobs is not None:
            streamed.append(chunk.choices[0].logprobs.content or [])
    # those of the first byte come with the second, where the character is whole; none is lost
    assert [t for tokens in streamed for t in tokens] == content
    assert [len(tokens) for tokens in streamed] == [2, 1, 1]


async def test_nan_logprob_is_clamped() -> None:
    llm = FakeLLM()
    llm.lowest = float("nan")
    reply = await call(app_of(llm), PATH, {"messages": HELLO, "logprobs": True, "top_logprobs": 5})
    assert reply.json["choices"][0]["logprobs"]["content"][0]["top_logprobs"][4]["logprob"] == -9999.0


async def test_sampling_fields_reach_the_engine() -> None:
    llm = FakeLLM()
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.5,
        "repeat_last_n": 64,
        "min_tokens": 2,
        "ignore_eos": True,
        "seed": -3,
        "n": 2,
    }
    more = {
        "stop": "x",
        "stop_token_ids": [5],
        "logit_bias": {"65": -100, "66": 1.5},
        "max_completion_tokens": 9,
        "priority": -4,
        "cache_salt": "tenant",
        "skip_special_tokens": False,
        "logprobs": True,
    }
    reply = await call(app_of(llm), PATH, {"messages": HELLO, **given, **more})
    assert reply.status == 200
    [made] = llm.calls
    assert {name: getattr(made.params, name) for name in given} == given
    assert made.params.stop == ("x",)
    assert made.params.stop_token_ids == (5,)
    assert made.params.logit_bias == {65: -100.0, 66: 1.5}
    assert made.params.max_tokens == 9
    assert made.params.logprobs == 0
    assert (made.priority, made.cache_salt, made.skip_special_tokens) == (-4, "tenant", False)


async def test_defaults_are_openais() -> None:
    llm = FakeLLM()
    await call(app_of(llm, repeat_last_n=32), PATH, {"messages": HELLO, "temperature": None, "stop": None})
    params = llm.calls[0].params
    assert (params.temperature, params.top_p, params.n, params.max_tokens) == (1.0, 1.0, 1, None)
    assert params.repeat_last_n == 32
    assert params.logprobs is None
    assert params.stop == ()
    assert (llm.calls[0].priority, llm.calls[0].cache_salt) == (0, "")
    assert llm.calls[0].skip_special_tokens is True


async def test_seeds_are_always_set_and_repeat_with_a_base() -> None:
    async def seeds(**settings: Any) -> list[int | None]:
        llm = FakeLLM()
        app = app_of(llm, **settings)
        for _ in range(3):
            await call(app, PATH, {"messages": HELLO})
        return [c.params.seed for c in llm.calls]

    drawn = await seeds()
    assert None not in drawn
    assert len(set(drawn)) == 3
    assert await seeds() != drawn
    based = await seeds(seed=1)
    assert based == await seeds(seed=1)
    assert len(set(based)) == 3
    assert not set(based) & set(await seeds(seed=2))


async def test_messages_reach_the_template() -> None:
    llm = FakeLLM()
    messages = [
        {"role": "developer", "content": "be brief", "name": "boss"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        # the official client sends its own answers back in this form
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None, "audio": None, "annotations": []},
    ]
    body = {"messages": messages, "chat_template_kwargs": {"enable_thinking": False}}
    assert (await call(app_of(llm), PATH, body)).status == 200
    [rendered] = llm.tokenizer.rendered
    assert rendered["messages"] == [
        {"role": "system", "content": "be brief", "name": "boss"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
    ]
    assert rendered["template_kwargs"] == {"enable_thinking": False}
    assert rendered["add_generation_prompt"] is True
    assert BOS not in llm.calls[0].prompt_token_ids


@pytest.mark.parametrize(
    ("given", "add_prompt", "is_continued"),
    [
        ({"continue_final_message": True}, False, True),
        ({"add_generation_prompt": False}, False, False),
        ({"add_generation_prompt": False, "continue_final_message": True}, False, True),
        ({"add_generation_prompt": True, "continue_final_message": False}, True, False),
    ],
)
async def test_prefill_flags(given: dict[str, Any], add_prompt: bool, is_continued: bool) -> None:
    llm = FakeLLM()
    messages = [*HELLO, {"role": "assistant", "content": "Well,"}]
    assert (await call(app_of(llm), PATH, {"messages": messages, **given})).status == 200
    assert llm.tokenizer.rendered[0]["add_generation_prompt"] is add_prompt
    assert llm.tokenizer.rendered[0]["continue_final_message"] is is_continued


async def test_stop_reason_tells_the_stop_token() -> None:
    reply = await call(app_of(FakeLLM()), PATH, {"messages": HELLO})
    assert reply.json["choices"][0]["stop_reason"] == EOS


async def test_fields_without_effect_and_harmless_values_are_accepted() -> None:
    body = {
        "messages": HELLO,
        "user": "u",
        "store": False,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "parallel_tool_calls": True,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "reasoning_effort": None,
        "a_field_of_next_year": {"x": 1},
    }
    assert (await call(app_of(FakeLLM()), PATH, body)).status == 200
