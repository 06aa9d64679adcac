"""Several clients of one engine: each gets its own, all are bounded together, and one that dies leaves nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from millstream.engine.async_llm import AsyncLLM
from millstream.engine.client import EngineConnection
from millstream.errors import EngineDeadError, OverloadedError
from millstream.messages import ClientGone, EngineReady, FromEngine, TraceTo
from millstream.server.siblings import Siblings, socket_path, summed
from tests.engine_thread import HeldExecutor, Running, connected, num_open, running_llm, until, until_idle
from tests.fakes import FakeExecutor, expected_tokens, params


@asynccontextmanager
async def another(running: Running, name: str) -> AsyncIterator[AsyncLLM]:
    gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    connection = EngineConnection(running.client.address, gone, name=name)
    llm = await connected(connection, running.config)
    try:
        yield llm
    finally:
        await llm.stop()


async def tokens(llm: AsyncLLM, prompt: list[int], count: int, name: str) -> list[int]:
    return [t async for delta in llm.generate(prompt, params(count), request_id=name) for t in delta.token_ids]


async def test_each_client_gets_its_own_answers() -> None:
    async with running_llm(FakeExecutor(num_blocks=400)) as running, another(running, "two") as two:
        prompts = [[i, i + 1] for i in range(12)]
        llms = [running.llm, two]
        found = await asyncio.gather(*(tokens(llms[i % 2], p, 20, f"r{i}") for i, p in enumerate(prompts)))
        assert found == [expected_tokens(p, 20) for p in prompts]
        await until_idle(running)
        # what is counted once for the engine adds up, whoever was told
        text = summed([llm.metrics.render() for llm in llms]).decode()
        assert 'millstream:generation_tokens_total{model_name="fake"} 240.0' in text
        assert 'millstream:time_to_first_token_seconds_count{model_name="fake"} 12.0' in text
        assert 'millstream:e2e_request_latency_seconds_bucket{le="+Inf",model_name="fake"} 12.0' in text
        assert 'millstream:request_success_total{finished_reason="length",model_name="fake"} 12.0' in text
        assert 'millstream:num_requests_running{model_name="fake"} 0.0' in text


async def test_a_client_that_died_is_aborted_running_or_waiting() -> None:
    executor = HeldExecutor(4, num_blocks=400)
    async with running_llm(executor, max_num_seqs=2) as running:
        async with another(running, "two") as two:
            mine = running.llm.generate([1], params(150), request_id="mine")
            first = await anext(mine)
            running_one = asyncio.create_task(tokens(two, [2], 150, "running"))
            await until(lambda: num_open(running) == 2)
            executor.allow(6)
            await until(lambda: running.core.scheduler.num_waiting == 0)
            waiting_one = asyncio.create_task(tokens(two, [3], 150, "waiting"))
            await until(lambda: num_open(running) == 3)
            running.client.send(ClientGone("two"))
            await until(lambda: num_open(running) == 1)
            executor.release()
            rest = [t async for delta in mine for t in delta.token_ids]
            assert first.token_ids + rest == expected_tokens([1], 150)
            await until_idle(running)
            running.core.check_integrity()
            assert sum("running" in step.request_ids for step in executor.worker.steps) <= 10
            assert not any("waiting" in step.request_ids for step in executor.worker.steps)
            # nor is more taken of it
            late = asyncio.create_task(tokens(two, [4], 5, "late"))
            assert await tokens(running.llm, [5], 5, "next") == expected_tokens([5], 5)
            assert not any("late" in step.request_ids for step in executor.worker.steps)
        for task in (running_one, waiting_one, late):
            with pytest.raises(EngineDeadError):
                await task


async def test_the_queue_is_bounded_over_all_clients() -> None:
    executor = HeldExecutor(3, num_blocks=400)
    async with running_llm(executor, max_num_seqs=1, max_num_waiting=1) as running, another(running, "two") as two:
        mine = running.llm.generate([1], params(150), request_id="running")
        await anext(mine)
        asked = [asyncio.create_task(tokens(llm, [2], 3, str(i))) for i, llm in enumerate((running.llm, two))]
        # whichever message the engine reads first, there is room for one
        (refused,), (waiting,) = await asyncio.wait(asked, return_when=asyncio.FIRST_EXCEPTION)
        with pytest.raises(OverloadedError, match="2 requests are open"):
            refused.result()
        executor.release()
        await mine.aclose()  # type: ignore[attr-defined]
        assert await waiting == expected_tokens([2], 3)


async def test_a_watcher_hears_of_start_and_end_only() -> None:
    async with running_llm(FakeExecutor()) as running:
        gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        watcher = EngineConnection(running.client.address, gone, takes_outputs=False)
        heard: list[FromEngine] = []
        while len(heard) < 2:
            heard += await watcher.receive()
        assert [type(message) for message in heard] == [EngineReady, TraceTo]
        assert await tokens(running.llm, [1], 5, "r") == expected_tokens([1], 5)
        await until_idle(running)
        gone.set_result("signal 9")
        with pytest.raises(EngineDeadError, match="signal 9"):
            await watcher.receive()
        await watcher.stop()


async def test_figures_of_a_process_that_does_not_answer_are_left_out(tmp_path, caplog) -> None:  # type: ignore[no-untyped-def]
    class Figures:
        content_type = "text/plain"

        def __init__(self, count: int) -> None:
            self._text = f"# HELP things Some\n# TYPE things counter\nthings_total {count}.0\n".encode()

        def render(self) -> bytes:
            return self._text

    here, there = Siblings(tmp_path, "a", Figures(2)), Siblings(tmp_path, "b", Figures(3))
    servers = [await each.start() for each in (here, there)]
    assert b"things_total 5.0" in await here.render()
    servers[1].close()
    socket_path(tmp_path, "b").touch()
    assert b"things_total 2.0" in await here.render()
    servers[0].close()
