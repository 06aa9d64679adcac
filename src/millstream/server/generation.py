"""Getting the answers of one HTTP request out of the engine, whatever may cut them short.

What may: the engine refuses (RequestError), the engine dies, the client goes away, the server is stopped. All of
them end in `aclose()`, which closes the engine's iterators, which aborts what still runs: one path, for streamed
and whole answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.requests import Request

from millstream.server.body import ClientGoneError
from millstream.server.errors import ServerStoppingError
from millstream.server.llm import Output, close

T = TypeVar("T")


class Generations:
    """The generations that run; `stop()` cuts them all off, each with an error to its client."""

    def __init__(self) -> None:
        self._running: set[Generation] = set()
        self.is_stopping = False

    def open(self, iterators: Sequence[AsyncIterator[Output]]) -> Generation:
        """A generation over the answers to one or more prompts. Its `aclose` must be called."""
        generation = Generation(iterators, self._running)
        self._running.add(generation)
        if self.is_stopping:
            generation.stop()
        return generation

    def stop(self) -> None:
        self.is_stopping = True
        for generation in list(self._running):
            generation.stop()

    def __len__(self) -> int:
        return len(self._running)


class Generation:
    """The deltas of one HTTP request: `start()`, then `outputs()` to the end, then `aclose()`."""

    def __init__(self, iterators: Sequence[AsyncIterator[Output]], registry: set[Generation]) -> None:
        self._registry = registry
        self._iterators = iterators
        self._only = iterators[0] if len(iterators) == 1 else None
        self._merged = _merge(iterators)
        self._first: asyncio.Task[tuple[int, Output] | None] | None = None
        self._waiter: asyncio.Task[Any] | None = None
        self._is_stopped = False
        # asking for it costs a system call each time
        self._loop = asyncio.get_running_loop()

    async def start(self, *, patience: float) -> None:
        """Wait for the first delta, so that a refusal can still be told by the HTTP status.

        After `patience` seconds without one it returns anyway: a request that waits long in the queue then gets its
        headers and pings, and an error comes as an event. Raises what the engine raises.
        """
        self._first = asyncio.create_task(self._pull())
        await asyncio.wait({self._first}, timeout=patience)
        if self._first.done():
            self._first.result()

    async def outputs(self) -> AsyncGenerator[tuple[int, Output], None]:
        """(number of the prompt, delta) as they come. Raises RequestError, EngineDeadError."""
        item = await (self._first if self._first is not None else self._pull())
        while item is not None:
            yield item
            item = await self._pull()

    def stop(self) -> None:
        """Make the task that waits for a delta raise ServerStoppingError, now or when it next waits."""
        self._is_stopped = True
        if self._waiter is not None:
            self._waiter.cancel()

    async def _pull(self) -> tuple[int, Output] | None:
        if self._is_stopped:
            raise ServerStoppingError("the server is being stopped")
        self._waiter = asyncio.current_task(self._loop)
        try:
            if self._only is None:
                return await anext(self._merged, None)
            output = await anext(self._only, None)
            return None if output is None else (0, output)
        except asyncio.CancelledError:
            # stop() cancels, and so do others (a client that went away): only the first is an error to tell
            if self._is_stopped and self._waiter is not None and self._waiter.uncancel() == 0:
                raise ServerStoppingError("the server is being stopped") from None
            raise
        finally:
            self._waiter = None

    async def aclose(self) -> None:
        """Abort what still runs. Safe to call again."""
        self._registry.discard(self)
        if self._first is not None and not self._first.done():
            self._first.cancel()
            await asyncio.wait({self._first})
        if self._first is not None and not self._first.cancelled():
            self._first.exception()  # told by now, or nobody is left to tell it to
        await self._merged.aclose()
        for iterator in self._iterators:
            await close(iterator)


async def _merge(iterators: Sequence[AsyncIterator[Output]]) -> AsyncGenerator[tuple[int, Output], None]:
    """The items of all `iterators`, each with its iterator's number. Holds one item of each at most."""

    async def pull(iterator: AsyncIterator[Output]) -> Output | None:
        return await anext(iterator, None)

    tasks = {asyncio.create_task(pull(it)): i for i, it in enumerate(iterators)}
    try:
        while tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # errors first: a prompt that is refused at once then has its HTTP status, however quick the others are
            for task in sorted(done, key=lambda task: (task.exception() is None, tasks[task])):
                output = task.result()
                i = tasks.pop(task)
                if output is not None:
                    tasks[asyncio.create_task(pull(iterators[i]))] = i
                    yield i, output
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away.

    The body must have been read. Raises ClientGoneError, or what `work` raises.
    """

    async def disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.create_task(work), asyncio.create_task(disconnect())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
