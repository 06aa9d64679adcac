"""What carries steps to the workers.

An Executor starts its workers, takes steps and answers each with Futures: one for the step, and one for each that
follows from it. Steps may be submitted before earlier ones are done; workers begin with them in the order in which they
were submitted.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol, runtime_checkable

import zmq

from millstream.config import EngineConfig
from millstream.messages import ModelRunnerOutput, SchedulerOutput, WorkerInfo
from millstream.parallel.context import let_openmp_sleep
from millstream.parallel.lean_torch import load_lean_torch

OnProgress = Callable[[int, int], None]
"""Called with the bytes of weights loaded so far, and all bytes."""

Wake = zmq.Socket[bytes]
"""A socket to wake up for."""


class Executor(Protocol):
    """Runs steps. `depth` of them are computed at once, each by another stage."""

    depth: int

    def start(self, on_progress: OnProgress) -> WorkerInfo:
        """Load the weights and allocate the KV cache. Raises ModelError or ConfigError."""
        ...

    def submit(self, step: SchedulerOutput) -> list[Future[ModelRunnerOutput]]:
        """Queue a step: `step.num_steps` results, in order."""
        ...

    def shutdown(self) -> None:
        """End the workers. Safe to call twice."""
        ...


@runtime_checkable
class WaitingExecutor(Executor, Protocol):
    """An Executor whose results come from other processes or threads."""

    def wait(self, wake: Wake | None = None) -> None:
        """Wait until a step has landed, or `wake` can be read. Raises EngineDeadError where a worker is gone."""
        ...

    def kill(self) -> None:
        """End the workers at once, from any thread: this process is about to end."""
        ...


def make_executor(config: EngineConfig, *, folder: Path | None = None, is_own_process: bool = False) -> Executor:
    """The executor that the settings ask for; `folder` (0700) is for its sockets, by default one of its own.

    The only place where the engine reaches torch, and not before it must. `is_own_process`: nobody else uses torch in
    this process, so what only others want is left out.
    """
    if config.parallel.pipeline_parallel_size > 1:
        from millstream.executor.multiproc import MultiprocExecutor

        return MultiprocExecutor(config, folder=folder)
    let_openmp_sleep()
    if is_own_process:
        load_lean_torch()
    from millstream.executor.uniproc import UniprocExecutor

    return UniprocExecutor(config)
