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
from typing import NamedTuple

from millstream.config import CacheConfig, EngineConfig, SchedulerConfig
from millstream.engine.core import EngineCore
from millstream.executor.base import OnProgress
from millstream.messages import ModelRunnerOutput, SchedulerOutput, WorkerInfo
from millstream.request import Request, SamplingParams
from millstream.sched.cost_model import StepLoad
from millstream.sched.scheduler import Scheduler

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
            zip(step.request_ids, step.num_computed_tokens, step.num_scheduled_tokens, step.is_sampled, strict=True)
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
        for request_id, start, count, is_sampled in rows:
            known = self.known[request_id]
            context = [
                self.memory[known.block_ids[p // self.block_size]][p % self.block_size] for p in range(start + count)
            ]
            assert context == known.token_ids[: start + count], f"{request_id} reads what is not its own"
            assert is_sampled == (start + count == len(known.token_ids))
            if is_sampled:
                token = next_token(known.token_ids)
                known.token_ids.append(token)
                output.request_ids.append(request_id)
                output.new_token_ids.append([token])
        return output


class FakeExecutor:
    """Runs a FakeWorker's steps in order, each only when its result is asked for (or later steps' are)."""

    def __init__(self, *, num_blocks: int = 64, block_size: int = 4, max_model_len: int = 200, depth: int = 1) -> None:
        self.depth = depth
        self.worker = FakeWorker(num_blocks=num_blocks, block_size=block_size)
        self.info = worker_info(num_blocks, block_size, max_model_len=min(max_model_len, num_blocks * block_size))
        self.queue: deque[tuple[SchedulerOutput, Future[ModelRunnerOutput]]] = deque()

    def start(self, on_progress: OnProgress) -> WorkerInfo:
        on_progress(1, 1)
        return self.info

    def submit(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        future: Future[ModelRunnerOutput] = Future()
        result = future.result

        def run_until_done(timeout: float | None = None) -> ModelRunnerOutput:
            while not future.done():
                next_step, next_future = self.queue.popleft()
                next_future.set_result(self.worker.execute(next_step))
            return result(timeout)

        future.result = run_until_done  # type: ignore[method-assign]
        self.queue.append((step, future))
        assert len(self.queue) <= self.depth, "more steps in flight than the executor is deep"
        return future

    def shutdown(self) -> None:
        self.queue.clear()


def make_core(
    executor: FakeExecutor,
    *,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 16,
    chunk_policy: str | None = None,
    chunk_pipelining: bool = True,
    **cache: object,
) -> EngineCore:
    """An EngineCore over a fake executor, with a clock that counts calls."""
    ticks = iter(range(10**9))
    config = EngineConfig(
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            chunk_policy=chunk_policy,
            chunk_pipelining=chunk_pipelining,
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
) -> Request:
    """A request as the scheduler gets it."""
    return Request(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling_params=params(max_tokens),
        stop_token_ids=frozenset(),
        max_model_len=max_model_len,
        priority=priority,
        arrival_time=arrival_time,
    )


def load_of(step: SchedulerOutput) -> StepLoad:
    """A step's load, told from its columns: a row of one sampled token counts as a decode."""
    load = StepLoad()
    for start, count, sampled in zip(step.num_computed_tokens, step.num_scheduled_tokens, step.is_sampled, strict=True):
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

    A stage takes one step at a time, `seconds` of its load, and hands it to the next stage. The loop is that of
    EngineCore: fill the deque, wait for its oldest step.
    """

    def __init__(self, scheduler: Scheduler, *, num_stages: int, seconds: Callable[[StepLoad], float]) -> None:
        self.scheduler = scheduler
        self.now = 0.0
        self.steps: list[TimedStep] = []
        self.token_times: dict[str, list[float]] = {}
        self._seconds = seconds
        self._num_stages = num_stages
        self._stage_free = [0.0] * num_stages
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
        while len(self._in_flight) < self._num_stages and (step := self.scheduler.schedule()) is not None:
            load = load_of(step)
            seconds = self._seconds(load)
            done = self.now
            for stage, free in enumerate(self._stage_free):
                done = self._stage_free[stage] = max(done, free) + seconds
            predicted = self.scheduler.cost_model.predict(load)
            self._in_flight.append(TimedStep(step, load, seconds, predicted, self.now, done))

    def _land(self) -> None:
        step = self._in_flight.popleft()
        self.steps.append(step)
        self.now = max(self.now, step.landed)
        output = step.output
        ids = [i for i, wanted in zip(output.request_ids, output.is_sampled, strict=True) if wanted]
        result = ModelRunnerOutput(
            output.step_id, ids, [[7]] * len(ids), stage_seconds=[step.seconds] * self._num_stages
        )
        news = self.scheduler.update(result)
        for request_id in news.request_ids:
            self.token_times.setdefault(request_id, []).append(self.now)

    def gaps(self, request_id: str) -> list[float]:
        """Seconds between its tokens."""
        return [b - a for a, b in itertools.pairwise(self.token_times[request_id])]
