"""The engine's loop body: keep the deque of steps in flight full, settle the oldest.

    schedule -> submit -> [ newest ... oldest ] -> update -> EngineOutputs

Filling the deque comes before waiting for results. How deep it is, is the executor's to say: one step for one worker,
P for a pipeline of P stages, one more when scheduling runs ahead.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from millstream.config import EngineConfig
from millstream.engine.progress import ProgressReporter
from millstream.engine.trace import Tracer
from millstream.errors import InvalidRequestError
from millstream.executor.base import Executor, OnProgress, WaitingExecutor, Wake
from millstream.messages import EngineOutputs, EngineRequest, ModelRunnerOutput, SchedulerOutput, WorkerInfo
from millstream.request import FinishReason, Request, check_fits
from millstream.sched.factory import make_scheduler


class EngineCore:
    """A scheduler and the executor that it drives. Synchronous, single-threaded, knows no sockets."""

    info: WorkerInfo
    """What the workers told when they had started."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        *,
        on_progress: OnProgress = lambda done, total: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor = executor
        self._waiting = executor if isinstance(executor, WaitingExecutor) else None
        self._clock = clock
        self.info = executor.start(on_progress)
        self.scheduler = make_scheduler(
            config.scheduler,
            self.info,
            enable_prefix_caching=config.cache.enable_prefix_caching,
            depth=executor.depth,
        )
        self._in_flight: deque[tuple[SchedulerOutput, Future[ModelRunnerOutput], float]] = deque()
        self._last_landed = 0.0
        self._progress = ProgressReporter()
        self.tracer: Tracer | None = None
        """Told of every step that lands."""
        self.last_step: SchedulerOutput | None = None
        """The step that `step` settled last."""

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._in_flight)

    def add(self, message: EngineRequest) -> Request:
        """Queue a request. Raises RequestError where it can't be run."""
        params = message.sampling_params
        if not message.prompt_token_ids:
            raise InvalidRequestError("The prompt is empty", param="prompt")
        if message.request_id in self.scheduler.requests:
            raise InvalidRequestError(f"A request called {message.request_id} is running already", param="request_id")
        check_fits(len(message.prompt_token_ids), params.max_tokens, max_model_len=self.info.max_model_len)
        for token_id in message.prompt_token_ids:
            if not 0 <= token_id < self.info.vocab_size:
                raise InvalidRequestError(
                    f"prompt has token id {token_id}: ids of this model go from 0 to {self.info.vocab_size - 1}",
                    param="prompt",
                )
        params.check_vocab(self.info.vocab_size)
        eos = () if params.ignore_eos else self.info.eos_token_ids
        request = Request(
            request_id=message.request_id,
            prompt_token_ids=message.prompt_token_ids,
            sampling_params=params,
            stop_token_ids=frozenset((*params.stop_token_ids, *eos)),
            max_model_len=self.info.max_model_len,
            priority=message.priority,
            cache_salt=message.cache_salt,
            arrival_time=self._clock(),
        )
        self.scheduler.add(request)
        if message.has_progress:
            self._progress.add(request)
        return request

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request; whether it was still open."""
        return self.scheduler.abort(request_id, reason)

    def step(self, *, wake: Wake | None = None) -> EngineOutputs | None:
        """Fill the deque, then settle its oldest step; None if nothing was ready to run, or if `wake` could be read
        before a result was there (a newcomer may have its place in the deque)."""
        while len(self._in_flight) < self._executor.depth:
            step = self.scheduler.schedule()
            if step is None:
                break
            started = self._clock()
            self._in_flight.appendleft((step, self._executor.submit(step), started))
        if not self._in_flight:
            return None
        if wake is not None and self._waiting is not None and not self._in_flight[-1][1].done():
            self._waiting.wait(wake)
            if not self._in_flight[-1][1].done():
                return None
        self.last_step, future, started = self._in_flight.pop()
        result = future.result()
        outputs = self.scheduler.update(result)
        outputs.progress = self._progress.report()
        if outputs.stats is not None:
            now = self._clock()
            # time that it shared with the step before is the other's
            outputs.stats.step_seconds = now - max(started, self._last_landed)
            self._last_landed = now
            outputs.stats.stage_seconds = result.stage_seconds
            outputs.stats.predicted_seconds = self.scheduler.predicted_seconds
            if self.tracer is not None:
                self.tracer.step(self.last_step, result, submitted=started, landed=now)
        return outputs

    def wait_idle(self, wake: Wake) -> None:
        """With nothing to run, wait until `wake` can be read. Raises EngineDeadError where a worker is gone meanwhile.

        Returns at once where there are no worker processes to watch.
        """
        if self._waiting is not None:
            self._waiting.wait(wake)

    def check_integrity(self) -> None:
        """Assert the scheduler's invariants; to be called when there is no work."""
        self.scheduler.check_integrity()

    def shutdown(self) -> None:
        self._executor.shutdown()
