"""However the tokens of an answer are cut into messages, deltas and chunks, a reader gets the same answer."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from millstream.engine.async_llm import _Stream
from millstream.engine.output_processor import OutputProcessor, RequestOutput
from millstream.messages import EngineOutputs, TokenLogprobs
from millstream.request import FinishReason, SamplingParams
from tests.fake_llm import FakeLLM, app_of, call
from tests.unit.test_detokenizer import SAMPLE, TinyTokenizer, byte_fallback, byte_id, byte_level, texts_as_ids

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


# -- one slot for each answer -----------------------------------------------------------------------------------


class Feed:
    """An OutputProcessor that gets tokens in messages of the test's choice, and the stream of its one request."""

    def __init__(self, tokenizer: TinyTokenizer, interval: int, *, num_answers: int = 1, **params: Any) -> None:
        self.stream = _Stream(interval)
        self._processor = OutputProcessor(tokenizer)
        self.stopped: list[str] = []
        for index in range(num_answers):
            self._processor.add(
                str(index),
                request_id="r",
                index=index,
                prompt_token_ids=[],
                params=SamplingParams(**params),
                sink=self.stream.put,
            )

    def push(self, token_ids: list[int], reason: FinishReason | None = None, *, index: int = 0) -> None:
        logprobs = {str(index): [TokenLogprobs([i], [-i / 1000], 1) for i in token_ids]}
        self.stopped += self._processor.process(
            EngineOutputs([str(index)], [token_ids], [reason], [None], [0], logprobs=logprobs)
        )

    async def take(self) -> list[RequestOutput]:
        return await asyncio.wait_for(self.stream.take(), 20)

    async def poll(self) -> list[RequestOutput]:
        """What a reader that waits now is woken with; nothing if it is not."""
        task = asyncio.create_task(self.stream.take())
        for _ in range(5):
            await asyncio.sleep(0)
        if task.done():
            return task.result()
        task.cancel()
        return []


async def test_the_interval_holds_tokens_back_but_for_the_first_and_the_last() -> None:
    feed = Feed(byte_level(), 4)
    ids = [byte_id(b) for b in b"the text"]
    feed.push(ids[:1])
    assert [d.token_ids for d in await feed.take()] == [ids[:1]]
    feed.push(ids[1:2])
    feed.push(ids[2:4])
    assert await feed.poll() == []
    feed.push(ids[4:6])
    assert [d.token_ids for d in await feed.take()] == [ids[1:6]]
    feed.push(ids[6:7])
    assert await feed.poll() == []
    feed.push(ids[7:8], FinishReason.LENGTH)
    (last,) = await feed.take()
    assert (last.token_ids, last.finish_reason, last.num_output_tokens) == (ids[6:8], FinishReason.LENGTH, 8)


async def test_merged_deltas_keep_the_logprobs_of_all_their_tokens() -> None:
    feed = Feed(byte_level(), 3, logprobs=0)
    for token_id in (5, 6, 7, 8):
        feed.push([token_id])
    (merged,) = await feed.take()
    assert [entry.token_ids for entry in merged.logprobs] == [[5], [6], [7], [8]]


async def test_each_answer_has_its_own_interval() -> None:
    feed = Feed(byte_level(), 2, num_answers=2)
    feed.push([5], index=0)
    feed.push([6], index=1)
    assert sorted(d.index for d in await feed.take()) == [0, 1]
    feed.push([7], index=0)
    feed.push([8, 9], index=1)
    assert [(d.index, d.token_ids) for d in await feed.take()] == [(1, [8, 9])]
    feed.push([10], index=0)
    assert [(d.index, d.token_ids) for d in await feed.take()] == [(0, [7, 10])]


async def test_an_error_comes_after_what_was_held_back() -> None:
    feed = Feed(byte_level(), 10)
    feed.push([5])
    await feed.take()
    feed.push([6])
    feed.stream.fail(RuntimeError("the end"))
    assert [d.token_ids for d in await feed.take()] == [[6]]
    with pytest.raises(RuntimeError, match="the end"):
        await feed.take()


def random_text(rng: random.Random) -> list[int]:
    """Text with emoji and combining marks, now and then bytes that are no character."""
    ids: list[int] = []
    for _ in range(rng.randrange(1, 12)):
        begin = rng.randrange(len(SAMPLE))
        ids += texts_as_ids(SAMPLE[begin : begin + rng.randrange(1, 9)])
        if rng.random() < 0.3:
            ids += [byte_id(b) for b in rng.choice(["日", "😀", "e\u0301"]).encode()[: rng.randrange(1, 5)]]
        if rng.random() < 0.2:
            ids += [byte_id(rng.randrange(0x80, 0x100)) for _ in range(rng.randrange(1, 6))]
        if rng.random() < 0.2:
            ids.append(1)  # </s>, which is not shown
    return ids


def random_parts(rng: random.Random, ids: list[int], size: int) -> Iterator[list[int]]:
    while ids:
        count = rng.randrange(1, size + 1)
        yield ids[:count]
        ids = ids[count:]


async def read(feed: Feed, ids: list[int], rng: random.Random, size: int) -> tuple[str, list[int], RequestOutput]:
    """What a reader that comes at random times makes of it: text, tokens, the last delta."""
    text, tokens, last = "", [], None
    parts = list(random_parts(rng, ids, size))
    for i, part in enumerate(parts):
        is_end = i == len(parts) - 1
        feed.push(part, FinishReason.LENGTH if is_end else None)
        if is_end or rng.random() < 0.5:
            for delta in await feed.poll():
                assert last is None or last.finish_reason is None, "a delta after the end"
                assert len(delta.logprobs) == len(delta.token_ids)
                text, tokens, last = text + delta.text, tokens + delta.token_ids, delta
    assert last is not None
    return text, tokens, last


@pytest.mark.parametrize("seed", range(60))
async def test_joined_deltas_are_the_whole_text_for_all_cuts(seed: int) -> None:
    rng = random.Random(seed)
    tokenizer, ids = byte_level(), random_text(rng)
    if seed % 5 == 0:
        tokenizer = byte_fallback()
        ids = tokenizer.encode("".join(rng.choice("ab\u2581日é😀") for _ in range(40)))
    whole = tokenizer.decode(ids)
    feed = Feed(tokenizer, rng.choice([1, 2, 7, 1000]), logprobs=0)
    text, tokens, last = await read(feed, ids, rng, rng.choice([1, 3, 20]))
    assert text == whole
    assert tokens == ids
    assert (last.finish_reason, last.num_output_tokens) == (FinishReason.LENGTH, len(ids))


@pytest.mark.parametrize("seed", range(60))
async def test_a_stop_string_cuts_alike_for_all_cuts(seed: int) -> None:
    rng = random.Random(seed)
    ids = random_text(rng)
    whole = byte_level().decode(ids)
    begin = rng.randrange(len(whole))
    stop = tuple({whole[begin : begin + rng.randrange(1, 5)], rng.choice(["END", "語", "👩", "no such text"])})
    one_by_one = Feed(byte_level(), 1, stop=stop, logprobs=0)
    wanted = await read(one_by_one, ids, random.Random(0), 1)
    feed = Feed(byte_level(), rng.choice([1, 3, 1000]), stop=stop, logprobs=0)
    text, tokens, last = await read(feed, ids, rng, rng.choice([2, 5, 40]))
    assert (text, tokens, last.finish_reason, last.stop_reason) == (
        wanted[0],
        wanted[1],
        wanted[2].finish_reason,
        wanted[2].stop_reason,
    )
    # the first to be complete wins, and is not shown
    first = min((whole.find(s) + len(s), whole.find(s)) for s in stop if s in whole)
    assert text == whole[: first[1]]
    # the engine is told once, unless it had come to an end with the same message
    assert feed.stopped in ([], ["0"])


# -- over HTTP --------------------------------------------------------------------------------------------------


class CutLLM(FakeLLM):
    """Merges the fake's deltas at random, as readers of different speed find them."""

    def __init__(self, rng: random.Random, **more: Any) -> None:
        super().__init__(**more)
        self._rng = rng

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        held: Any = None
        async for output in super().generate(*args, **kwargs):
            if held is None:
                held = output
            else:
                held.text += output.text
                held.token_ids += output.token_ids
                held.logprobs += output.logprobs
                held.finish_reason, held.stop_reason = output.finish_reason, output.stop_reason
                held.num_output_tokens = output.num_output_tokens
            if held.finish_reason is not None or self._rng.random() < 0.3:
                yield held
                held = None


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_a_stream_joined_is_the_whole_reply(seed: int, path: str) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice(SAMPLE) for _ in range(40))
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
    logprobs: dict[str, Any] = {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
    body = {**prompt, **logprobs, "max_tokens": 500}
    whole = (await call(app_of(FakeLLM(lambda *_: text)), path, body)).json["choices"][0]
    llm = CutLLM(rng, script=lambda *_: text)
    reply = await call(app_of(llm), path, {**body, "stream": True})
    chunks = [chunk["choices"][0] for chunk in reply.events[:-1]]
    joined = "".join((c["delta"].get("content") or "") if path == CHAT else c["text"] for c in chunks)
    assert joined == (whole["message"]["content"] if path == CHAT else whole["text"])
    entries = [c["logprobs"] for c in chunks if c["logprobs"]]
    if path == CHAT:
        assert [e for c in entries for e in c["content"]] == whole["logprobs"]["content"]
    else:
        for name, values in whole["logprobs"].items():
            assert [v for c in entries for v in c[name]] == values, name
    assert chunks[-1]["finish_reason"] == whole["finish_reason"] == "stop"


async def test_the_setting_is_for_streams_and_whole_answers_come_whole() -> None:
    llm = FakeLLM()
    app = app_of(llm, stream_interval=5)
    for stream in (True, False):
        await call(app, COMPLETION, {"prompt": "a", "stream": stream})
    assert llm.calls[0].interval == 5
    assert llm.calls[1].interval > 2**32


async def test_a_stream_is_answered_for_every_event_stream_reader() -> None:
    reply = await call(app_of(FakeLLM()), COMPLETION, {"prompt": "a", "stream": True})
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-store"
    assert reply.headers["x-accel-buffering"] == "no"
    assert "content-length" not in reply.headers
    assert [line for line in reply.body.split(b"\n\n") if line and not line.startswith(b"data: ")] == []
    assert json.loads(reply.body.split(b"\n\n")[0][6:])["choices"][0]["text"] == "A"
