"""`stream_options.include_progress`, from the engine's steps to the chunks of a stream; and pings."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import openai
import pytest
from openai.types.chat import ChatCompletionChunk
from openai.types.completion import Completion

from millstream.config import ServerConfig
from millstream.engine.core import EngineCore
from millstream.engine.output_processor import RequestOutput
from millstream.engine.process import EngineSocket
from millstream.errors import ConfigError
from millstream.messages import (
    EngineOutputs,
    EngineRequest,
    PromptProgress,
    SchedulerStats,
    TokenLogprobs,
)
from tests.engine_thread import letter, running_llm
from tests.fake_llm import MODEL, FakeLLM, app_of, call, served
from tests.fakes import FakeExecutor, expected_tokens, make_core, params

CHAT = "/v1/chat/completions"
HELLO: Any = [{"role": "user", "content": "hi"}]
ASKED = {"stream": True, "stream_options": {"include_progress": True}}


def outputs_of(core: EngineCore) -> list[EngineOutputs]:
    found = []
    while core.has_work:
        if (outputs := core.step()) is not None:
            found.append(outputs)
    return found


# -- the engine -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 3])
def test_each_chunk_but_the_last_is_told(depth: int) -> None:
    core = make_core(FakeExecutor(depth=depth), max_num_batched_tokens=16, chunk_policy="fixed")
    core.add(EngineRequest("a", list(range(40)), params(3), has_progress=True))
    outputs = outputs_of(core)
    assert [o.progress for o in outputs[:2]] == [{"a": PromptProgress(16, 0)}, {"a": PromptProgress(32, 0)}]
    # neither with the first token nor later
    assert all(not o.progress for o in outputs[2:])
    # and no rows: a middle chunk's message holds the progress alone
    assert [o.request_ids for o in outputs[:3]] == [[], [], ["a"]]


def test_who_did_not_ask_gets_nothing() -> None:
    core = make_core(FakeExecutor(), max_num_batched_tokens=16)
    core.add(EngineRequest("a", list(range(40)), params(2)))
    core.add(EngineRequest("b", list(range(50, 90)), params(2), has_progress=True))
    assert {name for o in outputs_of(core) for name in o.progress} == {"b"}


def test_cached_tokens_count_as_done() -> None:
    core = make_core(FakeExecutor(), max_num_batched_tokens=16)
    core.add(EngineRequest("a", list(range(40)), params(1)))
    outputs_of(core)
    core.add(EngineRequest("b", [*range(40), *range(60, 100)], params(1), has_progress=True))
    news = [o.progress["b"] for o in outputs_of(core) if o.progress]
    cached = core.info.block_size * (40 // core.info.block_size)
    assert cached > 0
    assert news == [PromptProgress(n, cached) for n in range(cached + 16, 80, 16)]


def test_a_request_that_starts_again_does_not_go_backwards() -> None:
    # the later request loses its blocks to the earlier one's decodes, in the middle of its prompt
    core = make_core(FakeExecutor(num_blocks=12), max_num_batched_tokens=4, enable_prefix_caching=False)
    block_size = core.info.block_size
    core.add(EngineRequest("a", [1], params(7 * block_size)))
    core.add(EngineRequest("b", list(range(1, 9 * block_size)), params(1), has_progress=True))
    done = [o.progress["b"].num_computed_tokens for o in outputs_of(core) if o.progress]
    assert done == sorted(set(done))


def test_an_aborted_request_is_not_told_of_again() -> None:
    core = make_core(FakeExecutor(), max_num_batched_tokens=16)
    core.add(EngineRequest("a", list(range(80)), params(3), has_progress=True))
    core.step()
    core.abort("a")
    core.add(EngineRequest("b", [1, 2], params(1)))
    assert all(not o.progress for o in outputs_of(core))


def test_each_client_gets_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    socket = EngineSocket(f"ipc://{tmp_path / 'engine'}")
    try:
        sent: list[tuple[bytes, EngineOutputs]] = []
        monkeypatch.setattr(socket, "_clients", dict.fromkeys([b"one", b"two", b"three"], True))
        monkeypatch.setattr(socket, "send", lambda client, message: sent.append((client, message)))
        socket.owners = {"a": b"one", "b": b"two"}
        progress = {"a": PromptProgress(1, 0), "b": PromptProgress(2, 0)}
        socket.send_outputs(EngineOutputs([], [], [], [], [], stats=SchedulerStats(), progress=progress))
        assert [(client, o.progress) for client, o in sent] == [
            (b"one", {"a": PromptProgress(1, 0)}),
            (b"two", {"b": PromptProgress(2, 0)}),
        ]
    finally:
        socket.close()


async def test_the_reader_sees_progress_then_the_answer() -> None:
    async with running_llm(FakeExecutor(), max_num_batched_tokens=16) as running:
        prompt = [i % 50 for i in range(60)]
        found = []
        async for delta in running.llm.generate(prompt, params(3, n=2), request_id="r", has_progress=True):
            found.append(delta)
        wanted = expected_tokens(prompt, 3)
        for index in (0, 1):
            mine = [d for d in found if d.index == index]
            assert "".join(d.text for d in mine) == "".join(letter(t) for t in wanted)
            done = [d.progress.num_computed_tokens for d in mine if d.progress is not None]
            begun = [d.progress is None for d in mine]
            assert begun == sorted(begun)
            # merged where the reader is slow, but only answer 0 has any
            assert set(done) <= {16, 32, 48} if index == 0 else done == []


def test_a_first_delta_takes_the_place_of_unread_progress() -> None:
    judged = TokenLogprobs([3], [-0.5], 1)

    def output(text: str, *, progress: PromptProgress | None = None, cached: int = 0) -> RequestOutput:
        tokens, prompt_logprobs = ([], None) if progress else ([7], [judged])
        return RequestOutput("r", 0, text, tokens, [], prompt_logprobs, None, None, 40, len(tokens), cached, progress)

    unread = output("", progress=PromptProgress(16, 0))
    unread.merge(output("", progress=PromptProgress(32, 8), cached=8))
    assert (unread.progress, unread.num_cached_tokens) == (PromptProgress(32, 8), 8)
    unread.merge(output("a", cached=8))
    unread.merge(output("b", cached=8))
    assert (unread.progress, unread.text, unread.token_ids) == (None, "ab", [7, 7])
    assert unread.prompt_logprobs == [judged]


# -- the server -------------------------------------------------------------------------------------------------


def told(*done: int) -> FakeLLM:
    llm = FakeLLM(lambda prompt, index: "abc")
    llm.progress = [PromptProgress(n, 4) for n in done]
    return llm


async def test_progress_chunks_of_a_chat() -> None:
    events = (await call(app_of(told(8, 16)), CHAT, {"messages": HELLO, **ASKED, "n": 2})).events
    role0, role1, first, second, *rest = events
    total = len("<user>hi<assistant>")
    assert role0["choices"][0]["delta"]["role"] == role1["choices"][0]["delta"]["role"] == "assistant"
    for chunk, done in ((first, 8), (second, 16)):
        assert chunk["choices"] == []
        assert chunk["x_progress"] == {"prompt_tokens_done": done, "prompt_tokens_total": total, "cached_tokens": 4}
        ChatCompletionChunk.model_validate(chunk, strict=True)
    assert rest.pop() == "[DONE]"
    assert all(chunk["choices"] and "x_progress" not in chunk for chunk in rest)


async def test_progress_chunks_of_completions_count_all_prompts() -> None:
    body = {
        "prompt": [[1] * 10, [2] * 20],
        **ASKED,
        "stream_options": {"include_progress": True, "include_usage": True},
    }
    events = (await call(app_of(told(5)), "/v1/completions", body)).events
    news = [e for e in events[:-1] if "x_progress" in e]
    assert [e["x_progress"] for e in news] == [
        {"prompt_tokens_done": 5, "prompt_tokens_total": 30, "cached_tokens": 4},
        {"prompt_tokens_done": 10, "prompt_tokens_total": 30, "cached_tokens": 8},
    ]
    assert all(e["usage"] is None for e in news)
    assert events[:2] == news
    Completion.model_validate(news[0], strict=True)


@pytest.mark.parametrize("options", [None, {"include_usage": True}, {"include_progress": False}])
async def test_no_progress_where_it_was_not_asked_for(options: Any) -> None:
    reply = await call(app_of(told(8)), CHAT, {"messages": HELLO, "stream": True, "stream_options": options})
    assert b"x_progress" not in reply.body


async def test_progress_needs_a_stream_and_a_bool() -> None:
    options = {"stream_options": {"include_progress": True}}
    reply = await call(app_of(told(8)), CHAT, {"messages": HELLO, **options})
    assert (reply.status, reply.error["param"]) == (400, "stream_options")
    reply = await call(
        app_of(told(8)), CHAT, {"messages": HELLO, "stream": True, "stream_options": {"include_progress": 1}}
    )
    assert (reply.status, reply.error["param"]) == (400, "stream_options.include_progress")


async def test_the_official_client_takes_progress() -> None:
    async with (
        served(told(8, 16)) as url,
        openai.AsyncOpenAI(base_url=url + "/v1", api_key="-", max_retries=0) as client,
    ):
        options: Any = {"include_progress": True}
        async with client.chat.completions.stream(model=MODEL, messages=HELLO, stream_options=options) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_completion()
    assert final.choices[0].message.content == "abc"
    chunks = [event.chunk for event in events if event.type == "chunk"]
    assert [c.x_progress["prompt_tokens_done"] for c in chunks if not c.choices] == [8, 16]  # type: ignore[attr-defined]


# -- pings ------------------------------------------------------------------------------------------------------


async def test_a_quiet_stream_gets_pings_as_often_as_set() -> None:
    llm = FakeLLM(lambda prompt, index: "a")
    llm.gate = asyncio.Semaphore(0)
    async with (
        served(llm, sse_ping_interval=0.01) as url,
        aiohttp.ClientSession() as session,
        # the headers wait for the first delta no longer than a ping would
        session.post(url + CHAT, json={"messages": HELLO, "stream": True}) as response,
    ):
        pings = 0
        while pings < 2:
            pings += (await response.content.readline()).startswith(b": ping")
        for _ in range(2):
            llm.gate.release()
        assert (await response.text()).endswith("[DONE]\n\n")


async def test_no_pings_with_interval_0() -> None:
    llm = FakeLLM(lambda prompt, index: "a")
    llm.gate = asyncio.Semaphore(1)
    async with (
        served(llm, sse_ping_interval=0) as url,
        aiohttp.ClientSession() as session,
        session.post(url + CHAT, json={"messages": HELLO, "stream": True}) as response,
    ):
        await response.content.readline()
        # an interval taken as it is would have sent a flood by now
        for _ in range(50):
            await asyncio.sleep(0)
        llm.gate.release()
        assert ": ping" not in await response.text()


def test_interval_is_checked() -> None:
    assert ServerConfig().sse_ping_interval == 15
    with pytest.raises(ConfigError, match="--sse-ping-interval is -1"):
        ServerConfig(sse_ping_interval=-1)
