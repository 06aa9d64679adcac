"""/v1/completions, /tokenize, /detokenize, and the small pages."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types import Completion

from tests.fake_llm import BOS, EOS, MODEL, FakeLLM, app_of, call, served

PATH = "/v1/completions"


@pytest.mark.parametrize(
    ("prompt", "prompts", "texts"),
    [
        ("ab", [[BOS, 97, 98]], ["AB"]),
        (["ab", "c"], [[BOS, 97, 98], [BOS, 99]], ["AB", "C"]),
        ([97, 98], [[97, 98]], ["AB"]),
        ([[97], [98, 99]], [[97], [98, 99]], ["A", "BC"]),
    ],
)
async def test_kinds_of_prompts(prompt: Any, prompts: list[list[int]], texts: list[str]) -> None:
    llm = FakeLLM()
    reply = await call(app_of(llm), PATH, {"prompt": prompt})
    assert [c["text"] for c in reply.json["choices"]] == texts
    assert [c["index"] for c in reply.json["choices"]] == list(range(len(texts)))
    assert [c.prompt_token_ids for c in llm.calls] == prompts
    assert reply.json["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert reply.json["usage"]["completion_tokens"] == sum(len(t) + 1 for t in texts)
    assert all(c.params.max_tokens == 16 for c in llm.calls)
    assert len({c.request_id for c in llm.calls}) == len(prompts)
    Completion.model_validate(reply.json, strict=True)


async def test_special_tokens_can_be_left_out() -> None:
    llm = FakeLLM()
    await call(app_of(llm), PATH, {"prompt": "a", "add_special_tokens": False})
    assert llm.calls[0].prompt_token_ids == [97]


async def test_prompts_share_a_given_seed_only() -> None:
    llm = FakeLLM()
    app = app_of(llm)
    await call(app, PATH, {"prompt": ["a", "b"], "seed": 5})
    await call(app, PATH, {"prompt": ["a", "b"]})
    seeds = [c.params.seed for c in llm.calls]
    assert seeds[:2] == [5, 5]
    assert seeds[2] != seeds[3]


async def test_stream_of_several_prompts_and_answers() -> None:
    llm = FakeLLM(lambda prompt, index: prompt.upper() + str(index))
    body = {"prompt": ["ab", "c"], "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, done = (await call(app_of(llm), PATH, body)).events
    texts, ends = ["", "", "", ""], []
    for chunk in chunks:
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            ends.append((choice["index"], choice["finish_reason"]))
        assert chunk["usage"] is None
    assert texts == ["AB0", "AB1", "C0", "C1"]
    assert sorted(ends) == [(i, "stop") for i in range(4)]
    assert usage["usage"]["completion_tokens"] == 4 + 4 + 3 + 3
    assert done == "[DONE]"


async def test_echo_with_logprobs_has_the_prompt_in_front() -> None:
    llm = FakeLLM(lambda prompt, index: "x")
    reply = await call(app_of(llm), PATH, {"prompt": "éa", "echo": True, "logprobs": 1, "n": 2})
    for choice in reply.json["choices"]:
        assert choice["text"] == "éax"
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == ["<s>", "bytes:\\xc3", "bytes:\\xa9", "a", "x", "</s>"]
        # the first token has nothing before it; <s> is not in the text; é is whole with its second byte
        assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5, -0.5]
        assert logprobs["text_offset"] == [0, 0, 0, 1, 2, 3]
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["top_logprobs"][3] == {"a": -0.5}
    assert llm.calls[0].params.prompt_logprobs == 1


async def test_streamed_echo_waits_for_the_prompts_logprobs() -> None:
    llm = FakeLLM(lambda prompt, index: "xy")
    body = {"prompt": [97, 98], "echo": True, "logprobs": 2, "n": 2, "stream": True}
    whole = await call(app_of(llm), PATH, body | {"stream": False})
    streamed = await call(app_of(llm), PATH, body)
    for i in range(2):
        parts = [e["choices"][0] for e in streamed.events[:-1] if e["choices"][0]["index"] == i]
        expected = whole.json["choices"][i]
        assert "".join(p["text"] for p in parts) == expected["text"] == "abxy"
        joined: dict[str, list[Any]] = {name: [] for name in expected["logprobs"]}
        for part in parts:
            for name, values in (part["logprobs"] or {}).items():
                joined[name] += values
        assert joined == expected["logprobs"]
        assert joined["text_offset"] == [0, 1, 2, 3, 4]
        assert joined["token_logprobs"][:2] == [None, -0.5]


async def test_scoring_a_prompt() -> None:
    llm = FakeLLM()
    reply = await call(app_of(llm), PATH, {"prompt": "ab", "echo": True, "logprobs": 0, "max_tokens": 0})
    [choice] = reply.json["choices"]
    assert choice["text"] == "ab"
    assert choice["logprobs"]["tokens"] == ["<s>", "a", "b"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert choice["finish_reason"] == "length"
    assert reply.json["usage"]["completion_tokens"] == 0
    assert llm.calls[0].params.max_tokens == 1
    streamed = await call(
        app_of(llm), PATH, {"prompt": "ab", "echo": True, "logprobs": 0, "max_tokens": 0, "stream": True}
    )
    assert [e["choices"][0]["text"] for e in streamed.events[:-1]] == ["ab", ""]


async def test_echo_without_logprobs() -> None:
    llm = FakeLLM()
    reply = await call(app_of(llm), PATH, {"prompt": [[97], [BOS, 98]], "echo": True})
    assert [c["text"] for c in reply.json["choices"]] == ["aA", "bB"]
    assert reply.json["choices"][0]["logprobs"] is None
    assert llm.calls[0].params.prompt_logprobs is None


async def test_official_client() -> None:
    llm = FakeLLM(lambda prompt, index: "a Ω b")
    async with served(llm) as url, openai.AsyncOpenAI(base_url=url + "/v1", api_key="-", max_retries=0) as client:
        whole = await client.completions.create(model=MODEL, prompt="x", max_tokens=4, logprobs=1)
        stream = await client.completions.create(model=MODEL, prompt="x", max_tokens=4, stream=True)
        assert "".join([c.choices[0].text async for c in stream]) == whole.choices[0].text == "a Ω"
        assert whole.choices[0].finish_reason == "length"
        assert [m.id async for m in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.NotFoundError) as missing:
            await client.models.retrieve("other")
        assert missing.value.code == "model_not_found"


async def test_tokenize_and_detokenize() -> None:
    llm = FakeLLM()
    app = app_of(llm)
    reply = await call(app, "/tokenize", {"prompt": "é"})
    assert reply.json == {"count": 3, "max_model_len": 1000, "tokens": [BOS, 0xC3, 0xA9]}
    reply = await call(app, "/tokenize", {"prompt": "é", "add_special_tokens": False})
    assert reply.json["tokens"] == [0xC3, 0xA9]
    reply = await call(app, "/tokenize", {"messages": [{"role": "user", "content": "a"}]})
    assert bytes(reply.json["tokens"]) == b"<user>a<assistant>"
    reply = await call(app, "/detokenize", {"tokens": [BOS, 0xC3, 0xA9, EOS]})
    assert reply.json == {"prompt": "<s>é</s>"}
    reply = await call(app, "/detokenize", {"tokens": [BOS, 97], "skip_special_tokens": True})
    assert reply.json == {"prompt": "a"}
    for bad in ({"tokens": [258]}, {"tokens": [-1]}, {"tokens": [2**70]}, {"tokens": "a"}, {"tokens": [True]}, {}):
        reply = await call(app, "/detokenize", bad)
        assert reply.status == 400
        assert reply.error["param"].startswith("tokens")
    for bad in ({}, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, {"prompt": 1}):
        assert (await call(app, "/tokenize", bad)).status == 400


async def test_small_pages() -> None:
    llm = FakeLLM()
    app = app_of(llm)
    models = (await call(app, "/v1/models", method="GET")).json
    assert models["data"][0]["id"] == MODEL
    assert models["data"][0]["max_model_len"] == 1000
    assert (await call(app, "/metrics", method="GET")).body == b"millstream_fake 1\n"
    assert (await call(app, "/metrics", method="GET")).headers["content-type"] == llm.metrics.content_type
    assert set((await call(app, "/version", method="GET")).json) == {"version"}
    page = (await call(app, "/docs", method="GET")).body.decode()
    assert "/v1/chat/completions" in page
    assert "repeat_last_n" in page
    # nothing is loaded from elsewhere: it works offline
    assert "<script" not in page
    assert "http://" not in page
    assert "https://" not in page
    schema = (await call(app, "/openapi.json", method="GET")).json
    assert "messages" in schema["components"]["schemas"]["ChatRequest"]["properties"]


async def test_health_and_ready() -> None:
    llm = FakeLLM()
    app = app_of(llm)
    assert (await call(app, "/ready", method="GET")).status == 200
    assert (await call(app, "/health", method="HEAD")).status == 200
    llm.is_ready = False
    assert (await call(app, "/ready", method="GET")).json == {"status": "loading"}
    llm.is_ready, llm.is_dead = True, True
    assert (await call(app, "/ready", method="GET")).status == 503
    assert (await call(app, "/health", method="GET")).status == 200
