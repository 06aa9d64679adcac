"""One worker, in the engine process."""

from __future__ import annotations

from concurrent.futures import Future

from millstream.config import EngineConfig
from millstream.executor.base import OnProgress
from millstream.messages import ModelRunnerOutput, SchedulerOutput, WorkerInfo
from millstream.worker.worker import Worker


class UniprocExecutor:
    """Runs each step at once, in the caller's thread."""

    depth = 1

    def __init__(self, config: EngineConfig) -> None:
        self._worker = Worker(config)

    def start(self, on_progress: OnProgress) -> WorkerInfo:
        return self._worker.start(on_progress)

    def submit(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        future: Future[ModelRunnerOutput] = Future()
        try:
            output = self._worker.execute(step)
            assert output is not None, "a model in one piece has a last stage"
            future.set_result(output)
        except Exception as e:
            future.set_exception(e)
        return future

    def shutdown(self) -> None:
        self._worker.shutdown()
