"""One worker, in a thread of the engine process.

    engine's thread:   submit ──step──> queue            wait <──a wake-up──┐
    worker's thread:                    queue ──> execute ──> the step's Future

While the kernels run, the engine schedules the next step and deals with the last one: they hold no interpreter lock.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import zmq

from millstream.config import EngineConfig
from millstream.executor.base import OnProgress, Wake
from millstream.messages import ModelRunnerOutput, SchedulerOutput, WorkerInfo
from millstream.worker.step_queue import StepQueue
from millstream.worker.worker import Worker

_SWITCH_SECONDS = 0.0002
"""How long one thread may keep the other waiting for the interpreter; Python's own choice is 5 ms, a whole step."""
_MANY_BYTES = 65536

_Futures = list[Future[ModelRunnerOutput]]


class UniprocExecutor:
    """Runs steps one by one."""

    depth = 1

    def __init__(self, config: EngineConfig) -> None:
        self._worker = Worker(config)
        self._inbox: SimpleQueue[tuple[SchedulerOutput, _Futures] | None] = SimpleQueue()
        self._landed, self._tell_landed = os.pipe()
        for fd in (self._landed, self._tell_landed):
            os.set_blocking(fd, False)
        self._thread: threading.Thread | None = None
        self._undelivered: tuple[Future[ModelRunnerOutput], ModelRunnerOutput] | None = None

    def start(self, on_progress: OnProgress) -> WorkerInfo:
        """Load in the worker's thread, as some of what is set up belongs to the thread that computes."""
        started: Future[WorkerInfo] = Future()
        self._thread = threading.Thread(target=self._run, args=(on_progress, started), name="worker", daemon=True)
        self._thread.start()
        info = started.result()
        sys.setswitchinterval(_SWITCH_SECONDS)
        return info

    def submit(self, step: SchedulerOutput) -> _Futures:
        futures: _Futures = [Future() for _ in range(step.num_steps)]
        self._inbox.put((step, futures))
        return futures

    def wait(self, wake: Wake | None = None) -> None:
        """Wait until a step has landed since the last call, or `wake` can be read."""
        watched: list[Any] = [self._landed] if wake is None else [self._landed, wake]
        ready = dict(zmq.zmq_poll([(w, zmq.POLLIN) for w in watched], -1))
        if self._landed in ready:
            os.read(self._landed, _MANY_BYTES)

    def shutdown(self) -> None:
        if self._thread is not None:
            self._inbox.put(None)
            self._thread.join()
            self._thread = None
            os.close(self._landed)
            os.close(self._tell_landed)
        self._worker.shutdown()

    def kill(self) -> None:
        """There is no process to end."""

    # -- the worker's thread -------------------------------------------------------------------------------------

    def _run(self, on_progress: OnProgress, started: Future[WorkerInfo]) -> None:
        try:
            started.set_result(self._worker.start(on_progress))
        except BaseException as e:
            started.set_exception(e)
            return
        queue = StepQueue()
        awaited: dict[int, deque[Future[ModelRunnerOutput]]] = {}
        while True:
            while not queue or not self._inbox.empty():
                if self._inbox.empty():
                    self._deliver()
                item = self._inbox.get()
                if item is None:
                    return
                step, futures = item
                queue.put(step)
                awaited[step.step_id] = deque(futures)
            step = queue.take()
            futures_left = awaited[step.step_id]
            future = futures_left.popleft()
            if not futures_left:
                del awaited[step.step_id]
            try:
                output = self._worker.execute(step, on_compute=self._deliver)
                assert output is not None, "a model in one piece has a last stage"
                self._undelivered = future, output
            except Exception as e:
                self._deliver()
                future.set_exception(e)
                self._tell()

    def _deliver(self) -> None:
        """Hand over the last result. Best while the kernels of the next step run: it sets the engine to work, and
        two threads that both want the interpreter hinder each other."""
        if self._undelivered is not None:
            future, output = self._undelivered
            self._undelivered = None
            future.set_result(output)
            self._tell()

    def _tell(self) -> None:
        # a pipe that is full wakes up as well
        with contextlib.suppress(BlockingIOError):
            os.write(self._tell_landed, b"\0")
