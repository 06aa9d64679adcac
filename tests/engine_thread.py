"""A real engine loop on a real socket, in a thread, over the fake executor: AsyncLLM without a process and a model."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from millstream.config import EngineConfig, SchedulerConfig
from millstream.engine.async_llm import AsyncLLM
from millstream.engine.client import EngineClient, EngineConnection, address_in
from millstream.engine.core import EngineCore
from millstream.engine.process import EngineProcess, EngineSocket
from millstream.executor.base import Wake
from millstream.messages import EngineFailed, EngineReady, Hello
from tests.fakes import FakeExecutor


class HeldExecutor(FakeExecutor):
    """Runs `num_free_steps` steps, then none until `allow` or `release` is called.

    Meanwhile the engine takes messages, as it does while a real step is computed.
    """

    def __init__(self, num_free_steps: int, **more: Any) -> None:
        super().__init__(**more)
        self._num_free_steps: float = num_free_steps
        self._gate_moved, self._move_gate = os.pipe()

    def allow(self, num_steps: float) -> None:
        """Let so many more steps run."""
        self._num_free_steps += num_steps
        os.write(self._move_gate, b".")

    def release(self) -> None:
        self.allow(math.inf)

    def wait(self, wake: Wake | None = None) -> None:
        if self.awaited and len(self.worker.steps) < self._num_free_steps:
            return self.run_next()
        watched: list[Any] = [self._gate_moved] if wake is None else [self._gate_moved, wake]
        if self._gate_moved in dict(zmq.zmq_poll([(w, zmq.POLLIN) for w in watched], -1)):
            os.read(self._gate_moved, 1)
        return None

    def kill(self) -> None:
        """There is no process to end."""


class LetterBackend:
    """Token i is the letter U+4E00 + i."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(letter(i) for i in ids)


class LetterTokenizer:
    backend = LetterBackend()


def letter(token_id: int) -> str:
    return chr(0x4E00 + token_id)


class ThreadAsProcess:
    """What EngineClient asks of a process."""

    def __init__(self) -> None:
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        return await asyncio.shield(self.exited)

    def kill(self) -> None:
        raise AssertionError("the engine did not end when it was asked to")


@dataclass
class Running:
    llm: AsyncLLM
    core: EngineCore
    executor: FakeExecutor
    die: Any
    """Call it to stop the engine in mid-step and make its process look killed."""
    config: EngineConfig
    client: EngineClient


async def connected(client: EngineConnection, config: EngineConfig) -> AsyncLLM:
    """An AsyncLLM over a connection to the engine, ready to run requests."""
    llm = AsyncLLM(client, config=config, tokenizer=LetterTokenizer(), model_name="fake")  # type: ignore[arg-type]
    await llm.start()
    return llm


@contextlib.asynccontextmanager
async def running_llm(executor: FakeExecutor, *, batch_window: float = 0.0, **scheduler: int) -> AsyncIterator[Running]:
    folder = Path(tempfile.mkdtemp(prefix="millstream-test-"))
    settings: dict[str, Any] = {"max_num_batched_tokens": 64, "batch_window_ms": batch_window * 1000, **scheduler}
    config = EngineConfig(scheduler=SchedulerConfig(**settings))
    core = EngineCore(config, executor)
    process = ThreadAsProcess()
    loop = asyncio.get_running_loop()

    def run() -> None:
        socket = EngineSocket(address_in(folder))
        (hello,) = socket.receive(None)
        assert isinstance(hello[1], Hello)
        socket.broadcast(EngineReady(core.info))
        try:
            EngineProcess(core, socket, config.scheduler).run()
        except Exception as e:
            socket.broadcast(EngineFailed(type(e).__name__, str(e)))
        finally:
            socket.close()
            loop.call_soon_threadsafe(lambda: process.exited.done() or process.exited.set_result(0))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    client = EngineClient(process, folder)
    llm = await connected(client, config)

    def die() -> None:
        executor.submit = lambda step: threading.Event().wait()  # type: ignore[method-assign,assignment,return-value]
        process.exited.set_result(-9)

    try:
        yield Running(llm, core, executor, die, config, client)
    finally:
        if isinstance(executor, HeldExecutor):
            executor.release()
        await llm.stop()
        assert not folder.exists()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("what the test waits for has not come")


def num_open(running: Running) -> int:
    """Requests that the engine knows."""
    return running.core.scheduler.num_waiting + running.core.scheduler.num_running


async def until_idle(running: Running) -> None:
    await until(lambda: not running.core.has_work)
