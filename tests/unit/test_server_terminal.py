"""The terminal client of `millstream chat`, against a real server over the fake engine."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator

import pytest

from millstream.chat import ChatClient, ChatError, Terminal, printable
from tests.fake_llm import MODEL, FakeLLM, served, until


@pytest.fixture
def llm() -> FakeLLM:
    return FakeLLM(lambda prompt, index: f"{prompt.count('<user>')} Grüße")


@pytest.fixture
async def url(llm: FakeLLM) -> AsyncIterator[str]:
    async with served(llm, api_key="k") as url:
        yield url


def talk(url: str, typed: str, **settings: object) -> tuple[int, str]:
    out = io.StringIO()
    client = ChatClient(url, api_key="k", **settings)  # type: ignore[arg-type]
    code = Terminal(client, stdin=io.StringIO(typed), stdout=out).run()
    return code, out.getvalue()


async def test_piped_prompts_one_a_line(url: str, llm: FakeLLM) -> None:
    code, text = await asyncio.to_thread(talk, url, "first\n\nsecond\n", temperature=0.5, max_tokens=50)
    assert code == 0
    assert text == "1 Grüße\n2 Grüße\n"
    assert [m["role"] for m in llm.tokenizer.rendered[1]["messages"]] == ["user", "assistant", "user"]
    assert (llm.calls[0].params.temperature, llm.calls[0].params.max_tokens) == (0.5, 50)


async def test_commands(url: str, llm: FakeLLM) -> None:
    typed = "/system be brief\na\n/clear\nb\n/system\n/what\n/help\n/exit\nnever\n"
    code, text = await asyncio.to_thread(talk, url, typed)
    assert code == 0
    assert [m["content"] for m in llm.tokenizer.rendered[0]["messages"]] == ["be brief", "a"]
    assert [m["content"] for m in llm.tokenizer.rendered[1]["messages"]] == ["be brief", "b"]
    assert len(llm.calls) == 2
    assert "system message: be brief" in text
    assert "no command /what" in text
    assert "/clear" in text


async def test_no_server_is_said_clearly() -> None:
    code, text = await asyncio.to_thread(talk, "http://127.0.0.1:9", "hi\n")
    assert code == 1
    assert "no server answers at http://127.0.0.1:9/v1" in text.replace("\n", "")
    assert "millstream serve" in text


async def test_refusals_are_shown(url: str) -> None:
    code, text = await asyncio.to_thread(talk, url, "hi\n", model="other")
    assert code == 1
    assert MODEL in text
    code, text = await asyncio.to_thread(talk, url, "hi\n", temperature=9)
    assert code == 1
    assert "temperature is 9" in text


async def test_wrong_key(url: str) -> None:
    with pytest.raises(ChatError, match="401"):
        await ChatClient(url, api_key="wrong").connect()


async def test_stopping_an_answer_closes_the_connection_and_keeps_its_text(url: str, llm: FakeLLM) -> None:
    llm.gate = asyncio.Semaphore(4)
    client = ChatClient(url, api_key="k")
    await client.connect()
    seen: list[str] = []

    async def read() -> None:
        async for text in client.ask("hi"):
            seen.append(text)

    task = asyncio.create_task(read())
    await until(lambda: "".join(seen) == "1 Gr")
    task.cancel()  # what Ctrl-C does
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(llm.aborted.wait(), 20)
    assert client.messages == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "1 Gr"}]
    for _ in range(99):
        llm.gate.release()
    assert "".join([text async for text in client.ask("again")]) == "2 Grüße"
    assert len(client.messages) == 4
    assert client.num_tokens == len("2 Grüße".encode()) + 1


async def test_an_error_event_is_an_error(url: str, llm: FakeLLM) -> None:
    llm.fail_after = (3, RuntimeError("x"))
    client = ChatClient(url, api_key="k")
    await client.connect()
    with pytest.raises(ChatError, match="broke off"):
        async for _ in client.ask("hi"):
            pass


def test_control_characters_are_not_shown() -> None:
    assert printable("a\x1b[2J\x07b\n\tc\x9bd\x7fé") == "a[2Jb\n\tcdé"
