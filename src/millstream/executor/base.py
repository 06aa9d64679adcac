"""What carries steps to the workers.

An Executor starts its workers, takes steps in order and answers each with a Future. Steps may be submitted before
earlier ones are done; workers take them in the order of submission.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from millstream.config import EngineConfig
from millstream.messages import ModelRunnerOutput, SchedulerOutput, WorkerInfo
from millstream.parallel.context import let_openmp_sleep

OnProgress = Callable[[int, int], None]
"""Called with the bytes of weights loaded so far, and all bytes."""


class Executor(Protocol):
    """Runs steps. `depth` of them may usefully be in flight at once."""

    depth: int

    def start(self, on_progress: OnProgress) -> WorkerInfo:
        """Load the weights and allocate the KV cache. Raises ModelError or ConfigError."""
        ...

    def submit(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Queue a step."""
        ...

    def shutdown(self) -> None:
        """End the workers. Safe to call twice."""
        ...


def make_executor(config: EngineConfig) -> Executor:
    """The executor that the settings ask for. The only place where the engine reaches torch, and not before it must."""
    let_openmp_sleep()
    from millstream.executor.uniproc import UniprocExecutor

    return UniprocExecutor(config)
