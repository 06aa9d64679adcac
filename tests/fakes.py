"""Stand-ins for the parts that need a model.

`FakeWorker` computes nothing but keeps what a real worker keeps: a memory of blocks into which each step writes the
tokens it was given, and from which it reads a request's whole context back. A block given to two requests, a token
skipped or computed twice, a prefix published too early: all of them make it fail or answer differently.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import chain
from typing import NamedTuple

from millstream.config import CacheConfig, EngineConfig, SchedulerConfig
from millstream.engine.core import EngineCore
from millstream.executor.base import OnProgress
from millstream.messages import ModelRunnerOutput, SchedulerOutput, WorkerInfo
from millstream.request import Request, SamplingParams
from millstream.sched.cost_model import StepLoad
from millstream.sched.scheduler import Scheduler
from millstream.sim.executor import Pipe, StepTimes
from millstream.worker.step_queue import StepQueue

VOCAB = 1000
EOS = 999


def next_token(context: list[int]) -> int:
    """The fake model: a token that depends on the whole context; never the end of text by itself."""
    digest = hashlib.sha256(repr(context).encode()).digest()
    return int.from_bytes(digest[:4], "little") % (VOCAB - 1)


def expected_tokens(prompt: list[int], count: int) -> list[int]:
    """What the fake model answers."""
    context = list(prompt)
    for _ in range(count):
        context.append(next_token(context))
    return context[len(prompt) :]


def worker_info(num_blocks: int, block_size: int, *, max_model_len: int = 100_000) -> WorkerInfo:
    """What a worker of the fake model tells."""
    return WorkerInfo(
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        vocab_size=VOCAB,
        eos_token_ids=[EOS],
        weight_bytes=0,
        kv_cache_bytes=0,
        dtype="float32",
        phases={},
    )


class _Known:
    def __init__(self, token_ids: list[int], block_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.block_ids = block_ids


class FakeWorker:
    """A worker without a model; see the module's text."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.memory: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.known: dict[str, _Known] = {}
        self.steps: list[SchedulerOutput] = []

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self.steps.append(step)
        for request_id in step.forget_ids:
            self.known.pop(request_id, None)
        for new in step.new_requests:
            assert new.request_id not in self.known
            self.known[new.request_id] = _Known(list(new.token_ids), list(new.block_ids))
        for request_id, block_ids in zip(step.request_ids, step.new_block_ids, strict=True):
            self.known[request_id].block_ids += block_ids
        rows = list(
            zip(
                step.request_ids,
                step.num_computed_tokens,
                step.num_scheduled_tokens,
                step.num_sampled_tokens,
                strict=True,
            )
        )
        # first all writes, then all reads, as every real worker does
        for request_id, start, count, _ in rows:
            known = self.known[request_id]
            assert count > 0
            assert start + count <= len(known.token_ids), "tokens that nobody knows yet"
            for position in range(start, start + count):
                block = self.memory[known.block_ids[position // self.block_size]]
                block[position % self.block_size] = known.token_ids[position]
        output = ModelRunnerOutput(step.step_id, [], [])
        for request_id, start, count, num_wanted in rows:
            known = self.known[request_id]
            context = [
                self.memory[known.block_ids[p // self.block_size]][p % self.block_size] for p in range(start + count)
            ]
            assert context == known.token_ids[: start + count], f"{request_id} reads what is not its own"
            assert (num_wanted > 0) == (start + count == len(known.token_ids))
            if num_wanted:
                token = next_token(known.token_ids)
                known.token_ids.append(token)
                output.request_ids.append(request_id)
                output.new_token_ids.append([token])
        return output


class FakeExecutor:
    """Runs a FakeWorker's steps in order, each only when its result is asked for (or later steps' are).

    `depth` decisions may be in flight, and one more where scheduling runs ahead (`is_ahead`).
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 200,
        depth: int = 1,
        is_ahead: bool = True,
    ) -> None:
        self.depth = depth
        self.worker = FakeWorker(num_blocks=num_blocks, block_size=block_size)
        self.info = worker_info(num_blocks, block_size, max_model_len=min(max_model_len, num_blocks * block_size))
        self.queue = StepQueue()
        self.submitted: list[SchedulerOutput] = []
        self.awaited: dict[int, deque[Future[ModelRunnerOutput]]] = {}
        self._max_in_flight = depth + is_ahead

    def start(self, on_progress: OnProgress) -> WorkerInfo:
        on_progress(1, 1)
        return self.info

    def submit(self, step: SchedulerOutput) -> list[Future[ModelRunnerOutput]]:
        futures = [self._future() for _ in range(step.num_steps)]
        self.queue.put(step)
        self.submitted.append(step)
        self.awaited[step.step_id] = deque(futures)
        assert len(self.awaited) <= self._max_in_flight, "more steps in flight than the executor is deep"
        return futures

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Let the worker run a step."""
        return self.worker.execute(step)

    def run_next(self) -> None:
        """Run the step whose turn it is."""
        step = self.queue.take()
        self.awaited[step.step_id].popleft().set_result(self.execute(step))
        if not self.awaited[step.step_id]:
            del self.awaited[step.step_id]

    def _future(self) -> Future[ModelRunnerOutput]:
        future: Future[ModelRunnerOutput] = Future()
        result = future.result

        def run_until_done(timeout: float | None = None) -> ModelRunnerOutput:
            while future in chain.from_iterable(self.awaited.values()):
                self.run_next()
            return result(timeout)

        future.result = run_until_done  # type: ignore[method-assign]
        return future

    def shutdown(self) -> None:
        """Nothing runs."""


def make_core(
    executor: FakeExecutor,
    *,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 16,
    chunk_policy: str | None = None,
    chunk_pipelining: bool = True,
    async_scheduling: bool = False,
    num_scheduler_steps: int = 1,
    adaptive_steps: bool = True,
    **cache: object,
) -> EngineCore:
    """An EngineCore over a fake executor, with a clock that counts calls; scheduling does not run ahead."""
    ticks = iter(range(10**9))
    config = EngineConfig(
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            chunk_policy=chunk_policy,
            chunk_pipelining=chunk_pipelining,
            async_scheduling=async_scheduling,
            num_scheduler_steps=num_scheduler_steps,
            adaptive_steps=adaptive_steps,
        ),
        cache=CacheConfig(**cache),  # type: ignore[arg-type]
    )
    return EngineCore(config, executor, clock=lambda: float(next(ticks)))


def params(max_tokens: int = 8, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=0, **more)  # type: ignore[arg-type]


def make_request(
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int = 8,
    *,
    priority: int = 0,
    arrival_time: float = 0.0,
    max_model_len: int = 100_000,
    stop_token_ids: Sequence[int] = (),
) -> Request:
    """A request as the scheduler gets it."""
    return Request(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling_params=params(max_tokens),
        stop_token_ids=frozenset(stop_token_ids),
        max_model_len=max_model_len,
        priority=priority,
        arrival_time=arrival_time,
    )


def load_of(step: SchedulerOutput) -> StepLoad:
    """A step's load, told from its columns: a row of one sampled token counts as a decode."""
    load = StepLoad()
    for start, count, sampled in zip(
        step.num_computed_tokens, step.num_scheduled_tokens, step.num_sampled_tokens, strict=True
    ):
        if count == 1 and sampled:
            load.num_decodes += 1
            load.decode_context += start + 1
        else:
            load.add_chunk(start, count)
    return load


class TimedStep(NamedTuple):
    """A step that went through a FakePipeline."""

    output: SchedulerOutput
    load: StepLoad
    seconds: float
    """On each stage."""
    predicted: float
    submitted: float
    landed: float

    def chunk(self, request_id: str) -> int:
        """Tokens of one request in the step."""
        shares = dict(zip(self.output.request_ids, self.output.num_scheduled_tokens, strict=True))
        return shares.get(request_id, 0)


class FakePipeline:
    """Stages in a row that do nothing but take time, in a time of their own; every answer is the same token.

    A stage takes one step at a time, `seconds` of its load, and hands it to the next stage; the first one waits for the
    tokens that it needs. The loop is that of EngineCore: fill the deque, wait for its oldest step.
    """

    def __init__(self, scheduler: Scheduler, *, num_stages: int, seconds: Callable[[StepLoad], float]) -> None:
        self.scheduler = scheduler
        self.now = 0.0
        self.steps: list[TimedStep] = []
        self.token_times: dict[str, list[float]] = {}
        self._seconds = seconds
        self._num_stages = num_stages
        self._depth = num_stages + scheduler.async_scheduling
        self._pipe = Pipe(num_stages)
        self._in_flight: deque[TimedStep] = deque()

    def run(self, arrivals: Sequence[Request], *, until: float = float("inf")) -> None:
        """Serve these requests, each from its arrival time on, until none is open or the time has come."""
        coming = deque(sorted(arrivals, key=lambda r: r.arrival_time))
        while self.now < until and (coming or self._in_flight or self.scheduler.has_work):
            while coming and coming[0].arrival_time <= self.now:
                self.scheduler.add(coming.popleft())
            self._fill()
            if self._in_flight:
                self._land()
            else:
                assert coming, "requests are stuck"
                self.now = coming[0].arrival_time

    def _fill(self) -> None:
        while len(self._in_flight) < self._depth and (step := self.scheduler.schedule()) is not None:
            assert step.num_steps == 1
            load = load_of(step)
            seconds = self._seconds(load)
            times = StepTimes(host=0.0, stages=[seconds] * self._num_stages, send=0.0, back=0.0)
            landed = self._pipe.push(step, times, self.now)
            predicted = self.scheduler.cost_model.predict(load)
            self._in_flight.append(TimedStep(step, load, seconds, predicted, self.now, landed))

    def _land(self) -> None:
        step = self._in_flight.popleft()
        self.steps.append(step)
        self.now = max(self.now, step.landed)
        output = step.output
        ids = [i for i, wanted in zip(output.request_ids, output.num_sampled_tokens, strict=True) if wanted]
        result = ModelRunnerOutput(
            output.step_id, ids, [[7]] * len(ids), stage_seconds=[step.seconds] * self._num_stages
        )
        news = self.scheduler.update(result)
        for request_id in news.request_ids:
            self.token_times.setdefault(request_id, []).append(self.now)

    def gaps(self, request_id: str) -> list[float]:
        """Seconds between its tokens."""
        return [b - a for a, b in itertools.pairwise(self.token_times[request_id])]
