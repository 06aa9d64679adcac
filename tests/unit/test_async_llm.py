"""AsyncLLM and the engine's loop over real sockets, with a fake worker."""

from __future__ import annotations

import asyncio
import logging

import pytest

from millstream.engine.output_processor import RequestOutput
from millstream.errors import ContextLengthError, EngineDeadError, InvalidRequestError, OverloadedError
from millstream.request import FinishReason, SamplingParams
from tests.engine_thread import HeldExecutor, Running, letter, num_open, running_llm, until, until_idle
from tests.fakes import FakeExecutor, expected_tokens, params


async def collect(running: Running, prompt: list[int], p: SamplingParams, name: str = "r") -> list[RequestOutput]:
    return [delta async for delta in running.llm.generate(prompt, p, request_id=name)]


def text_of(tokens: list[int]) -> str:
    return "".join(letter(t) for t in tokens)


async def test_deltas_joined_are_the_answer() -> None:
    async with running_llm(FakeExecutor()) as running:
        deltas = await collect(running, [1, 2, 3], params(10))
        wanted = expected_tokens([1, 2, 3], 10)
        assert [t for d in deltas for t in d.token_ids] == wanted
        assert "".join(d.text for d in deltas) == text_of(wanted)
        assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
        last = deltas[-1]
        assert (last.finish_reason, last.num_output_tokens, last.num_prompt_tokens) == (FinishReason.LENGTH, 10, 3)


async def test_many_at_once_each_get_their_own() -> None:
    async with running_llm(FakeExecutor(num_blocks=400), max_num_seqs=50) as running:
        prompts = {f"r{i}": [i, i + 1] for i in range(50)}
        found = await asyncio.gather(*(collect(running, p, params(20), name) for name, p in prompts.items()))
        for prompt, deltas in zip(prompts.values(), found, strict=True):
            assert [t for d in deltas for t in d.token_ids] == expected_tokens(prompt, 20)


async def test_n_answers_are_numbered() -> None:
    async with running_llm(FakeExecutor()) as running:
        deltas = await collect(running, [1, 2], params(5, n=3))
        for index in range(3):
            tokens = [t for d in deltas if d.index == index for t in d.token_ids]
            assert tokens == expected_tokens([1, 2], 5)
        assert sum(d.finish_reason is not None for d in deltas) == 3


async def test_a_slow_reader_finds_its_deltas_merged() -> None:
    executor = HeldExecutor(1)
    async with running_llm(executor) as running:
        stream = running.llm.generate([1, 2], params(30), request_id="slow")
        first = await anext(stream)
        executor.release()
        await until_idle(running)
        # messages come in order, so those of the slow one are here before those of a later one
        await collect(running, [3], params(2), "later")
        rest = [d async for d in stream]
        assert len(rest) == 1
        assert first.token_ids + rest[0].token_ids == expected_tokens([1, 2], 30)
        assert rest[0].num_output_tokens == 30


@pytest.mark.parametrize("num_steps", [1, 4])
async def test_a_stop_string_ends_the_answer_and_the_engines_request(num_steps: int) -> None:
    wanted = expected_tokens([1, 2], 50)
    stop = text_of(wanted[7:9])
    async with running_llm(FakeExecutor(), num_scheduler_steps=num_steps) as running:
        deltas = await collect(running, [1, 2], params(190, stop=(stop,)))
        assert "".join(d.text for d in deltas) == text_of(wanted[:7])
        last = deltas[-1]
        assert (last.finish_reason, last.stop_reason, last.num_output_tokens) == (FinishReason.STOP, stop, 9)
        await until_idle(running)
        running.core.check_integrity()


async def test_the_stop_token_counts_but_is_not_shown() -> None:
    wanted = expected_tokens([1, 2], 6)
    async with running_llm(FakeExecutor()) as running:
        deltas = await collect(running, [1, 2], params(20, stop_token_ids=(wanted[5],)))
        assert "".join(d.text for d in deltas) == text_of(wanted[:5])
        assert deltas[-1].num_output_tokens == 6
        assert deltas[-1].stop_reason == wanted[5]


async def test_closing_the_iterator_frees_the_request() -> None:
    executor = HeldExecutor(3)
    async with running_llm(executor) as running:
        stream = running.llm.generate([1, 2], SamplingParams(seed=0), request_id="gone")
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        executor.release()
        await until_idle(running)
        running.core.check_integrity()
        assert 'request_success_total{finished_reason="abort",model_name="fake"} 1.0' in metrics(running)


async def test_cancelling_while_waiting_frees_the_request() -> None:
    executor = HeldExecutor(3, num_blocks=20)
    async with running_llm(executor, max_num_seqs=1) as running:
        first = running.llm.generate([1], params(70), request_id="first")
        await anext(first)
        second = asyncio.create_task(collect(running, [2], params(70), "second"))
        await until(lambda: running.core.scheduler.num_waiting == 1)
        second.cancel()
        await until(lambda: running.core.scheduler.num_waiting == 0)
        executor.release()
        assert [d async for d in first]
        await until_idle(running)
        running.core.check_integrity()
        # it left while it waited, so no step was spent on it
        assert not any("second" in step.request_ids for step in executor.worker.steps)


async def test_what_cannot_run_is_refused_before_the_first_delta() -> None:
    async with running_llm(FakeExecutor(max_model_len=12)) as running:
        with pytest.raises(ContextLengthError, match="12 tokens"):
            await collect(running, [1] * 12, params(1))
        with pytest.raises(InvalidRequestError, match="stop_token_ids has token id 5000"):
            await collect(running, [1], params(1, stop_token_ids=(5000,)))
        # known only to the engine process, so it comes back as a message
        with pytest.raises(InvalidRequestError, match="token id -1"):
            await collect(running, [-1], params(1))
        assert [t for d in await collect(running, [1], params(3)) for t in d.token_ids] == expected_tokens([1], 3)


async def test_the_queue_is_bounded() -> None:
    async with running_llm(HeldExecutor(3), max_num_seqs=1, max_num_waiting=1) as running:
        streams = [running.llm.generate([i], params(100), request_id=f"r{i}") for i in range(3)]
        await anext(streams[0])
        waiting = asyncio.ensure_future(anext(streams[1]))
        await until(lambda: running.core.scheduler.num_waiting == 1)
        with pytest.raises(OverloadedError, match="--max-num-waiting"):
            await anext(streams[2])
        waiting.cancel()


async def test_a_dead_engine_fails_open_streams() -> None:
    async with running_llm(HeldExecutor(3)) as running:
        stream = running.llm.generate([1, 2], SamplingParams(seed=0), request_id="r")
        await anext(stream)
        running.die()
        with pytest.raises(EngineDeadError, match="signal 9"):
            async for _ in stream:
                pass
        assert running.llm.is_dead
        with pytest.raises(EngineDeadError):
            await collect(running, [1], params(1))


async def test_an_exception_in_the_worker_is_told() -> None:
    executor = HeldExecutor(3)
    async with running_llm(executor) as running:
        stream = running.llm.generate([1, 2], SamplingParams(seed=0), request_id="r")
        await anext(stream)
        executor.worker.memory.clear()
        executor.release()
        with pytest.raises(EngineDeadError, match="IndexError"):
            async for _ in stream:
                pass


async def test_an_idle_engine_gathers_a_batch() -> None:
    # the window is longer than the test may take: it ends because nothing more could join the first step
    executor = FakeExecutor(num_blocks=400)
    async with running_llm(executor, batch_window=60, max_num_seqs=16, max_num_batched_tokens=512) as running:
        tasks = []
        for i in range(16):
            tasks.append(asyncio.create_task(collect(running, [i, i, i], params(4), f"r{i}")))
            await asyncio.sleep(0.001)
        await asyncio.gather(*tasks)
        assert len(executor.worker.steps[0].request_ids) == 16
        assert 'first_step_batch_size_bucket{le="8.0",model_name="fake"} 0.0' in metrics(running)
        assert 'first_step_batch_size_bucket{le="16.0",model_name="fake"} 1.0' in metrics(running)


async def test_nothing_waits_for_the_window_while_the_engine_runs() -> None:
    executor = HeldExecutor(3)
    async with running_llm(executor, batch_window=0.01) as running:
        stream = running.llm.generate([1], params(100), request_id="running")
        await anext(stream)
        late_one = asyncio.create_task(collect(running, [2], params(3), "late"))
        await until(lambda: num_open(running) == 2)
        executor.release()
        assert len(await late_one) > 0
        # the late one joined the running one's steps
        late = [s.request_ids for s in executor.worker.steps if "late" in s.request_ids]
        assert late[0] == ["running", "late"]
        await stream.aclose()  # type: ignore[attr-defined]


async def test_figures_reach_metrics_and_log(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("millstream").propagate = True
    with caplog.at_level(logging.INFO, logger="millstream"):
        async with running_llm(FakeExecutor()) as running:
            await collect(running, [1, 2, 3], params(4), "cmpl-1")
            await until_idle(running)
            text = metrics(running)
            assert 'millstream:prompt_tokens_total{model_name="fake"} 3.0' in text
            assert 'millstream:generation_tokens_total{model_name="fake"} 4.0' in text
            assert 'millstream:time_to_first_token_seconds_count{model_name="fake"} 1.0' in text
            assert 'millstream:inter_token_latency_seconds_count{model_name="fake"} 3.0' in text
            assert 'millstream:num_requests_running{model_name="fake"} 0.0' in text
    lines = "\n".join(r.getMessage() for r in caplog.records)
    assert "Request cmpl-1 with 3 prompt tokens added" in lines
    assert "Request cmpl-1 finished (length): 4 tokens in" in lines
    assert "[1 requests] Prefilling: 3 prompt tokens processed in" in lines
    assert "[1 requests] Decoding: 4 tokens processed in" in lines


def metrics(running: Running) -> str:
    return running.llm.metrics.render().decode()
