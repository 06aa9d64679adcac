"""The engine's loop body: keep the deque of steps in flight full, settle the oldest.

    schedule -> submit -> [ newest ... oldest ] -> update -> EngineOutputs

Filling the deque comes before waiting for results. It is as deep as the executor has stages: one step for one worker,
P for a pipeline of P; and one more where scheduling runs ahead, so that a worker finds its next step when it is done
with one. A decision for several steps counts once, and brings results as many times.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from millstream.config import EngineConfig
from millstream.engine.progress import ProgressReporter
from millstream.engine.trace import Tracer
from millstream.errors import InvalidRequestError
from millstream.executor.base import Executor, OnProgress, WaitingExecutor, Wake
from millstream.messages import EngineOutputs, EngineRequest, ModelRunnerOutput, SchedulerOutput, WorkerInfo
from millstream.request import FinishReason, Request, check_fits
from millstream.sched.factory import make_scheduler


@dataclass(frozen=True, slots=True, eq=False)
class _InFlight:
    """A step that a worker computes, or will."""

    step: SchedulerOutput
    result: Future[ModelRunnerOutput]
    submitted: float


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
        self._depth = executor.depth + config.scheduler.async_scheduling
        self._in_flight: deque[_InFlight] = deque()
        """The oldest decision's steps come last, each before those that follow from it."""
        self._num_decisions = 0
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
        """Fill the deque, then settle the oldest step that has landed; None if nothing was ready to run, or if `wake`
        could be read before a result was there (a newcomer may have its place in the deque)."""
        while self._num_decisions < self._depth and self._submit():
            pass
        if not self._in_flight:
            return None
        if wake is not None and self._waiting is not None and self._landed() is None:
            self._waiting.wait(wake)
            if self._landed() is None:
                return None
        landed = self._landed() or self._in_flight[-1]
        result = landed.result.result()
        self._in_flight.remove(landed)
        self.last_step, submitted = landed.step, landed.submitted
        self._num_decisions -= self.last_step.num_steps == 1
        outputs = self.scheduler.update(result)
        outputs.progress = self._progress.report()
        if outputs.stats is not None:
            now = self._clock()
            # time that it shared with the step before is the other's
            outputs.stats.step_seconds = now - max(submitted, self._last_landed)
            self._last_landed = now
            outputs.stats.stage_seconds = result.stage_seconds
            outputs.stats.predicted_seconds = self.scheduler.predicted_seconds
            if self.tracer is not None:
                self.tracer.step(self.last_step, result, submitted=submitted, landed=now)
        return outputs

    def _submit(self) -> bool:
        """Schedule a step, with those that follow from it, and hand it to the workers; False if nothing is ready."""
        step = self.scheduler.schedule()
        if step is None:
            return False
        submitted = self._clock()
        following: SchedulerOutput | None = step
        for result in self._executor.submit(step):
            assert following is not None
            self._in_flight.appendleft(_InFlight(following, result, submitted))
            following = following.next_step()
        self._num_decisions += 1
        return True

    def _landed(self) -> _InFlight | None:
        """The oldest step whose result is there."""
        oldest = None
        # beginning with the newest: while we look more may land, and a request's steps must be settled in order
        for part in self._in_flight:
            if part.result.done():
                oldest = part
        return oldest

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
