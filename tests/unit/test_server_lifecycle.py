"""What cuts a request short, and the start and end of the server itself."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest

from millstream.config import ServerConfig
from millstream.errors import ConfigError, EngineDeadError
from millstream.request import FinishReason
from millstream.server import listen, respond, run
from millstream.server.app import create_app
from millstream.server.prompts import LONG_TEXT_LEN
from tests.fake_llm import MODEL, FakeLLM, FakeOutput, app_of, call, served, until

CHAT = "/v1/chat/completions"
HELLO: Any = [{"role": "user", "content": "hi"}]
WAIT = 60


def body(**more: Any) -> dict[str, Any]:
    return {"messages": HELLO, **more}


# -- the client goes away ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_steps", [0, 3])
async def test_a_client_that_leaves_aborts_its_request(stream: bool, num_steps: int) -> None:
    llm = FakeLLM()
    llm.gate = asyncio.Semaphore(num_steps)
    async with served(llm) as url:
        async with aiohttp.ClientSession() as session:
            request = asyncio.create_task(session.post(url + CHAT, json=body(stream=stream)))
            await until(lambda: bool(llm.calls) and llm.calls[0].num_steps >= num_steps)
            if stream and num_steps:
                await (await request).content.readline()
            request.cancel()
        # leaving the session closes the connection; the engine hears of it without making another step
        await asyncio.wait_for(llm.aborted.wait(), WAIT)
        assert llm.calls[0].is_aborted
        assert llm.calls[0].num_steps == num_steps


class FloodLLM(FakeLLM):
    """Answers with 64 KiB at a time, for ever, as soon as the one before was taken."""

    num_taken = 0

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        try:
            while True:
                await asyncio.sleep(0)
                yield FakeOutput("flood", 0, text="x" * 2**16, token_ids=[120], num_output_tokens=1)
                self.num_taken += 1
        finally:
            self.aborted.set()


async def test_a_reader_that_does_not_read_takes_no_more_and_may_leave() -> None:
    llm = FloodLLM()
    async with served(llm) as url, aiohttp.ClientSession() as session:
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(("127.0.0.1", int(url.rpartition(":")[2])))
            data = json.dumps(body(stream=True)).encode()
            head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
            slow.sendall(head.encode() + b"\r\n\r\n" + data)

            async def takes_more() -> bool:
                before = llm.num_taken
                for _ in range(100):
                    await asyncio.sleep(0)
                return llm.num_taken > before or llm.num_taken == 0

            while await takes_more():
                pass
            # what the kernel and the socket's queue hold, not what the engine could make
            assert llm.num_taken < 200
            async with session.get(url + "/health") as response:
                assert response.status == 200
            assert not llm.aborted.is_set()
        await asyncio.wait_for(llm.aborted.wait(), WAIT)


async def test_leaving_aborts_every_prompt_of_a_request() -> None:
    llm = FakeLLM()
    llm.gate = asyncio.Semaphore(0)
    async with served(llm) as url:
        async with aiohttp.ClientSession() as session:
            request = asyncio.create_task(session.post(url + "/v1/completions", json={"prompt": ["a", "b", "c"]}))
            await until(lambda: len(llm.calls) == 3)
            request.cancel()
        await until(lambda: all(c.is_aborted for c in llm.calls))


async def test_closing_a_stream_of_the_official_client_aborts() -> None:
    llm = FakeLLM()
    llm.gate = asyncio.Semaphore(3)
    async with served(llm) as url, openai.AsyncOpenAI(base_url=url + "/v1", api_key="-", max_retries=0) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        await anext(aiter(stream))
        await stream.close()
        await asyncio.wait_for(llm.aborted.wait(), WAIT)


async def test_a_body_that_breaks_off_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    llm = FakeLLM()
    async with served(llm) as url:
        _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{{"
        with caplog.at_level(logging.DEBUG, "millstream"):
            writer.write(head.encode())
            await writer.drain()
            writer.close()
            await until(lambda: "the client went away" in caplog.text)
    assert llm.calls == []
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


async def test_one_refused_prompt_aborts_the_others() -> None:
    llm = FakeLLM()
    reply = await call(app_of(llm), "/v1/completions", {"prompt": ["a" * 500, "b" * 2000], "stream": True})
    assert reply.status == 400
    assert llm.calls[0].is_aborted


async def test_finished_requests_are_not_aborted_and_leave_nothing() -> None:
    llm = FakeLLM()
    app = app_of(llm)
    await call(app, CHAT, body())
    await call(app, CHAT, body(stream=True))
    assert [c.is_aborted for c in llm.calls] == [False, False]
    assert len(app.state.generations) == 0


# -- errors in the middle ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [(EngineDeadError("pid 4711 is gone"), "engine_dead"), (RuntimeError("secret"), "internal_error")],
)
async def test_an_error_in_a_stream_is_its_last_event(error: Exception, code: str) -> None:
    llm = FakeLLM()
    llm.fail_after = (3, error)
    reply = await call(app_of(llm), CHAT, body(stream=True))
    assert reply.status == 200
    *chunks, last = reply.events
    assert len(chunks) == 4
    assert set(last) == {"error"}
    assert last["error"]["code"] == code
    assert b"[DONE]" not in reply.body
    assert b"4711" not in reply.body
    assert b"secret" not in reply.body


async def test_the_official_client_raises_on_an_error_event() -> None:
    llm = FakeLLM()
    llm.fail_after = (3, EngineDeadError("gone"))
    async with served(llm) as url, openai.AsyncOpenAI(base_url=url + "/v1", api_key="-", max_retries=0) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        with pytest.raises(openai.APIError, match="engine has ended"):
            async for _ in stream:
                pass


async def test_an_answer_that_the_engine_aborts_is_an_error() -> None:
    llm = FakeLLM()
    llm.end_with = FinishReason.ABORT
    assert (await call(app_of(llm), CHAT, body(stream=True, max_tokens=2))).events[-1]["error"]["code"] == (
        "server_stopping"
    )
    assert (await call(app_of(llm), CHAT, body())).status == 503


async def test_headers_come_when_the_first_delta_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(respond, "FIRST_OUTPUT_PATIENCE", 0.0)
    llm = FakeLLM(lambda prompt, index: "abc")
    llm.gate = asyncio.Semaphore(0)
    async with served(llm) as url, aiohttp.ClientSession() as session:
        async with session.post(url + CHAT, json=body(stream=True)) as response:
            assert response.status == 200
            assert b'"role":"assistant"' in await response.content.readline()
            for _ in range(4):
                llm.gate.release()
            rest = await response.text()
        assert rest.count('"content"') == 3
        assert rest.endswith("[DONE]\n\n")
        # and then a refusal is an event
        llm.is_full = True
        async with session.post(url + CHAT, json=body(stream=True)) as response:
            assert response.status in (200, 429)
            assert "queue_full" in await response.text()


# -- long texts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions", CHAT])
async def test_long_texts_are_tokenized_off_the_loop(path: str) -> None:
    llm = FakeLLM()
    app = app_of(llm)
    threads = []
    llm.tokenizer.on_encode = lambda text: threads.append(threading.current_thread())
    for size in (10, LONG_TEXT_LEN + 1):
        text = "x" * size
        await call(app, path, {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text})
    assert threads[0] is threading.main_thread()
    assert threads[1] is not threading.main_thread()


# -- start and end ----------------------------------------------------------------------------------------------


async def test_a_port_in_use_is_told_before_anything_else() -> None:
    taken = listen.bind(ServerConfig(port=0))
    port = taken.getsockname()[1]
    with pytest.raises(ConfigError, match=f"--port is {port}"):
        listen.bind(ServerConfig(port=port))
    with pytest.raises(ConfigError, match="--port"):
        await run.serve(app_of(FakeLLM()), ServerConfig(port=port), lambda url: None)
    taken.close()
    with pytest.raises(ConfigError, match="--host"):
        listen.bind(ServerConfig(host="no.such.host.invalid", port=0))


async def test_the_bound_socket_is_the_one_served() -> None:
    config = ServerConfig(port=0)
    sock = listen.bind(config)
    stop, urls = asyncio.Event(), asyncio.Queue[str]()
    task = asyncio.create_task(run.serve(app_of(FakeLLM()), config, urls.put_nowait, sock=sock, stop=stop))
    url = await urls.get()
    assert url == f"http://127.0.0.1:{sock.getsockname()[1]}"
    async with aiohttp.ClientSession() as session, session.get(url + "/health") as response:
        assert response.status == 200
        assert "server" not in response.headers
    stop.set()
    await task
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_streams_with_an_error_event(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "GRACE_SECONDS", 0.0)
    llm = FakeLLM()
    llm.gate = asyncio.Semaphore(3)
    config = ServerConfig(port=0)
    app, urls = create_app(llm, config, MODEL), asyncio.Queue[str]()
    before = signal.getsignal(number)
    task = asyncio.create_task(run.serve(app, config, urls.put_nowait))
    url = await urls.get()
    async with aiohttp.ClientSession() as session, session.post(url + CHAT, json=body(stream=True)) as streamed:
        await streamed.content.readline()
        whole = asyncio.create_task(session.post(url + CHAT, json=body()))
        await until(lambda: len(llm.calls) == 2)
        os.kill(os.getpid(), number)
        text = await streamed.text()
        assert (await whole).status == 503
        assert (await (await whole).json())["error"]["code"] == "server_stopping"
    last = text.strip().rpartition("data: ")[2]
    assert json.loads(last)["error"]["code"] == "server_stopping"
    await asyncio.wait_for(task, WAIT)
    assert all(c.is_aborted for c in llm.calls)
    assert signal.getsignal(number) == before


async def test_running_answers_may_end_within_the_grace() -> None:
    llm = FakeLLM()
    llm.gate = asyncio.Semaphore(1)
    config = ServerConfig(port=0)
    stop, urls = asyncio.Event(), asyncio.Queue[str]()
    task = asyncio.create_task(run.serve(create_app(llm, config, MODEL), config, urls.put_nowait, stop=stop))
    url = await urls.get()
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + CHAT, json=body(stream=True, max_tokens=3)) as response,
    ):
        await response.content.readline()
        stop.set()
        for _ in range(2):
            llm.gate.release()
        assert (await response.text()).endswith("[DONE]\n\n")
    await asyncio.wait_for(task, WAIT)


async def test_headers_are_bounded() -> None:
    async with served(FakeLLM()) as url:
        port = int(url.rpartition(":")[2])

        async def status(size: int, chunk: int = 2**14) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nx-large: ")
            try:
                for _ in range(size // chunk):
                    writer.write(b"a" * chunk)
                    await writer.drain()
                writer.write(b"\r\nconnection: close\r\n\r\n")
                return (await reader.read())[:12]
            except ConnectionError:
                return b"cut"
            finally:
                writer.close()

        assert await status(2**15) == b"HTTP/1.1 200"
        assert await status(2**21) in (b"HTTP/1.1 400", b"cut")
        # a large body after small headers is none of this limit's business
        async with aiohttp.ClientSession() as session:
            async with session.post(url + "/tokenize", json={"prompt": "a" * 200_000}) as response:
                assert response.status == 200
            async with session.get(url + "/health") as response:
                assert response.status == 200
