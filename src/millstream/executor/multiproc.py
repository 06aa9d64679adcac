"""One worker process for each pipeline stage, on this host.

    engine process: submit ──SchedulerOutput, the same bytes──> every stage          <──ModelRunnerOutput── last stage
    stages:         0 ──hidden states──> 1 ──> ... ──> P-1          P-1 ──sampled token ids──> 0

P steps are computed at once: stage k works on step i while stage k + 1 works on step i - 1. Results are awaited by
whoever asks for one, without a thread: `wait` also wakes for the engine's clients. It is here that a stage's end
is noticed (its standard output closes) and its silence (the watchdog); both end the executor. Imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import chain
from pathlib import Path
from typing import Any

import zmq

from millstream import errors
from millstream.config import EngineConfig
from millstream.errors import ConfigError, EngineDeadError, MillstreamError, ModelError
from millstream.executor.base import OnProgress, Wake
from millstream.executor.stage_process import StageProcess
from millstream.executor.start_watch import StartWatch
from millstream.hub.files import resolve
from millstream.log import log
from millstream.messages import (
    MAX_MESSAGE_BYTES,
    FromWorker,
    KVCacheSize,
    ModelRunnerOutput,
    Ping,
    Pong,
    SchedulerOutput,
    StageFailed,
    StagePlan,
    StageProgress,
    StageReady,
    WorkerInfo,
    WorkerStart,
    decode_from_worker,
    encode,
)
from millstream.models.arch import DTYPE_BYTES, ModelArch
from millstream.parallel.context import share_cores
from millstream.parallel.layout import hidden_slot_bytes, token_slot_bytes
from millstream.parallel.ring import Board, Ring, fds_of
from millstream.parallel.stage import stages_of
from millstream.worker.stage_cost import choose_layer_split

_STOP_SECONDS = 2.0
_OVERSLEPT_SECONDS = 1.0


class MultiprocExecutor:
    """P stages as processes. `folder` (0700) is for its socket; by default one is made and removed again."""

    def __init__(self, config: EngineConfig, *, folder: Path | None = None) -> None:
        self.depth = config.parallel.pipeline_parallel_size
        self._config = config
        self._own_folder = Path(tempfile.mkdtemp(prefix="millstream-")) if folder is None else None
        self._address = f"ipc://{(folder or self._own_folder or Path()) / 'stages'}"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._stages: list[StageProcess] = []
        self._board: Board | None = None
        self._in_flight: dict[int, deque[_StepFuture]] = {}
        self._watch = _Watch(config.parallel.watchdog_timeout)
        self._silent: set[int] = set()
        """Stages that have not answered the last ping."""
        self._death: MillstreamError | None = None

    # -- start ---------------------------------------------------------------------------------------------------

    def start(self, on_progress: OnProgress) -> WorkerInfo:
        """Start the stages and wait until all are ready. Raises ModelError, ConfigError, or EngineDeadError, with
        nothing left running."""
        try:
            return self._start(on_progress)
        except BaseException:
            self.shutdown()
            raise

    def _start(self, on_progress: OnProgress) -> WorkerInfo:
        config = self._config
        arch = ModelArch.from_files(resolve(config.model.model, cache_dir=config.model.cache_dir))
        split = choose_layer_split(arch, config.parallel)
        self._socket.bind(self._address)
        self._spawn(arch, split)
        plans: dict[int, StagePlan] = {}
        infos: dict[int, WorkerInfo] = {}
        progress: dict[int, StageProgress] = {}
        watch = StartWatch(self._stages, config.parallel.watchdog_timeout)
        while len(infos) < len(self._stages):
            for message in self._receive(None, watch.interval):
                watch.hear(message)
                match message:
                    case StagePlan():
                        plans[message.rank] = message
                        if len(plans) == len(self._stages):
                            self._broadcast(_least(plans))
                    case StageProgress():
                        progress[message.rank] = message
                        done = sum(p.done_bytes for p in progress.values())
                        on_progress(done, sum(p.total_bytes for p in progress.values()))
                    case StageReady():
                        infos[message.rank] = message.info
                    case _:
                        raise AssertionError(f"{type(message).__name__} from a stage that is starting")
            if (hung := watch.find_hung()) is not None:
                self._fail_hung(self._stages[hung])
        self._watch.restart()
        return _sum_up([infos[rank] for rank in range(len(infos))])

    def _spawn(self, arch: ModelArch, split: tuple[int, ...]) -> None:
        num_stages, scheduler = len(split), self._config.scheduler
        cpus = share_cores(sorted(os.sched_getaffinity(0)), num_stages)
        log.info("Pipeline of %d stages with %s layers", num_stages, ", ".join(map(str, split)))
        # one more than can be in flight (scheduling runs one ahead), so that nobody ever waits for a free slot
        num_slots = self.depth + 2
        hidden_bytes = hidden_slot_bytes(
            max_tokens=scheduler.max_num_batched_tokens,
            width=arch.hidden_size,
            itemsize=DTYPE_BYTES[arch.compute_dtype(self._config.model.dtype)],
            num_stages=num_stages,
        )
        with contextlib.ExitStack() as stack:
            board_fd = Board.create(num_stages)
            stack.callback(os.close, board_fd)
            self._board = Board(board_fd, num_stages)
            hidden = [_ring(stack, num_slots, hidden_bytes) for _ in range(num_stages - 1)]
            tokens = _ring(stack, num_slots, token_slot_bytes(max_rows=scheduler.max_num_seqs))
            for rank, stage in enumerate(stages_of(split)):
                start = WorkerStart(
                    config=self._stage_config(num_stages, len(cpus[rank])),
                    rank=rank,
                    layer_split=list(split),
                    cpus=cpus[rank],
                    address=self._address,
                    board_fd=board_fd,
                    hidden_in=hidden[rank - 1].reader if rank > 0 else None,
                    hidden_out=hidden[rank].writer if rank < num_stages - 1 else None,
                    tokens_in=tokens.reader if rank == 0 else None,
                    tokens_out=tokens.writer if rank == num_stages - 1 else None,
                    log_level=logging.getLevelName(log.level).lower(),
                )
                ends = (start.hidden_in, start.hidden_out, start.tokens_in, start.tokens_out)
                inherited = [board_fd, *itertools.chain(*map(fds_of, ends))]
                self._stages.append(StageProcess(start, stage, inherited=inherited))

    def _stage_config(self, num_stages: int, num_cpus: int) -> EngineConfig:
        """The settings with a stage's share of the threads."""
        parallel = self._config.parallel
        threads = num_cpus if parallel.threads is None else max(1, parallel.threads // num_stages)
        return dataclasses.replace(self._config, parallel=dataclasses.replace(parallel, threads=threads))

    # -- steps ---------------------------------------------------------------------------------------------------

    def submit(self, step: SchedulerOutput) -> list[Future[ModelRunnerOutput]]:
        """Queue a step. Raises EngineDeadError where a stage is gone."""
        self._raise_if_dead()
        if not self._in_flight:
            self._watch.restart()
        futures = [_StepFuture(self) for _ in range(step.num_steps)]
        self._in_flight[step.step_id] = deque(futures)
        self._broadcast(step)
        return list(futures)

    def wait(self, wake: Wake | None = None) -> None:
        """Wait until a step has landed or `wake` can be read. Raises EngineDeadError where a stage has ended, failed
        or not answered in time."""
        self._raise_if_dead()
        is_done = False
        while not is_done:
            seconds = self._watch.seconds_left(is_idle=not self._in_flight and not self._silent)
            before = time.monotonic()
            ready = self._poll(wake, seconds)
            if not ready:
                # who sleeps for longer than asked was stopped itself, and the stages likely too
                if time.monotonic() - before > seconds + _OVERSLEPT_SECONDS:
                    self._watch.restart()
                else:
                    self._on_silence()
            for message in self._take(ready):
                is_done |= self._land(message)
            is_done |= wake in ready

    def shutdown(self) -> None:
        """End the stages and leave nothing behind. Safe to call twice, at any time."""
        self._death = self._death or EngineDeadError("The executor was shut down")
        for stage in self._stages:
            stage.ask_to_end()
        deadline = time.monotonic() + _STOP_SECONDS
        for stage in self._stages:
            stage.end(max(0.0, deadline - time.monotonic()))
        self._stages.clear()
        self._socket.close()
        self._context.term()
        if self._board is not None:
            self._board.close()
        if self._own_folder is not None:
            shutil.rmtree(self._own_folder, ignore_errors=True)

    def kill(self) -> None:
        """End the stages at once, from any thread: this process is about to end."""
        for stage in self._stages:
            stage.kill()

    # -- messages ------------------------------------------------------------------------------------------------

    def _broadcast(self, message: KVCacheSize | SchedulerOutput | Ping) -> None:
        data = encode(message)
        for stage in self._stages:
            self._socket.send_multipart((b"%d" % stage.rank, data))

    def _poll(self, wake: Wake | None, seconds: float | None) -> set[Any]:
        """What can be read; waits for something."""
        watched: list[Any] = [self._socket, *(stage.output_fd for stage in self._stages)]
        if wake is not None:
            watched.append(wake)
        # rounded up, so that it is not called again and again just before the end
        timeout = -1 if seconds is None else int(seconds * 1000) + 1
        return {found for found, _ in zmq.zmq_poll([(w, zmq.POLLIN) for w in watched], timeout)}

    def _receive(self, wake: Wake | None, seconds: float | None) -> Iterator[FromWorker]:
        return self._take(self._poll(wake, seconds))

    def _take(self, ready: set[Any]) -> Iterator[FromWorker]:
        """The stages' messages. Raises the error of a stage that has failed or ended."""
        while True:
            try:
                _, data = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            message = decode_from_worker(data)
            if isinstance(message, StageFailed):
                self._fail(self._error_of(message))
            yield message
        # last words come first
        for stage in self._stages:
            if stage.output_fd in ready and stage.has_ended():
                self._fail(EngineDeadError(f"{stage} has ended ({stage.describe_end()})"))

    def _land(self, message: FromWorker) -> bool:
        """Settle what a stage sent; whether it was a step's result."""
        self._watch.restart()
        match message:
            case ModelRunnerOutput():
                futures = self._in_flight[message.step_id]
                futures.popleft().set_result(message)
                if not futures:
                    del self._in_flight[message.step_id]
                return True
            case Pong():
                self._silent.discard(message.rank)
                return False
            case _:
                raise AssertionError(f"{type(message).__name__} from a stage that has started")

    # -- failure -------------------------------------------------------------------------------------------------

    def _on_silence(self) -> None:
        """Nothing came for as long as the watchdog allows: idle stages are asked, others count as hung."""
        if not self._in_flight and not self._silent:
            self._silent = {stage.rank for stage in self._stages}
            self._broadcast(Ping())
            self._watch.restart()
            return
        self._fail_hung(self._hung_stage())

    def _fail_hung(self, stage: StageProcess) -> None:
        """Show where it is, then fail."""
        log.error("%s does not answer; where it is:", stage)
        stage.dump_stack()
        limit = self._config.parallel.watchdog_timeout
        self._fail(EngineDeadError(f"{stage} hangs: no answer for {limit:g} s (--watchdog-timeout)"))

    def _hung_stage(self) -> StageProcess:
        """The first of the stages that have done the fewest steps: those after it only wait for it."""
        assert self._board is not None
        if not self._in_flight:
            return self._stages[min(self._silent)]
        num_done = [self._board.num_done(stage.rank) for stage in self._stages]
        return self._stages[num_done.index(min(num_done))]

    def _error_of(self, failed: StageFailed) -> MillstreamError:
        """The stage's own error where it is a user's to mend, else EngineDeadError; logs its stack."""
        cls = getattr(errors, failed.error, None)
        if isinstance(cls, type) and issubclass(cls, (ConfigError, ModelError)):
            return cls(failed.message)
        stage = self._stages[failed.rank]
        for line in (f"{stage} failed:", *failed.trace.rstrip().splitlines()):
            log.error("%s", line)
        return EngineDeadError(f"{stage} failed: {failed.error}: {failed.message}")

    def _fail(self, death: MillstreamError) -> None:
        self._death = death
        for future in chain.from_iterable(self._in_flight.values()):
            future.set_exception(death)
        self._in_flight.clear()
        raise death

    def _raise_if_dead(self) -> None:
        if self._death is not None:
            raise self._death


class _StepFuture(Future[ModelRunnerOutput]):
    """A step in flight: asking for its result moves messages until it is there."""

    def __init__(self, executor: MultiprocExecutor) -> None:
        super().__init__()
        self._executor = executor

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        while not self.done():
            self._executor.wait()
        return super().result(timeout)


class _Watch:
    """When the stages have to be heard of: in `limit` seconds; idle ones are asked after half of it and have the other
    half to answer."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._since = time.monotonic()

    def restart(self) -> None:
        self._since = time.monotonic()

    def seconds_left(self, *, is_idle: bool) -> float:
        limit = self._limit / 2 if is_idle else self._limit
        return max(0.0, self._since + limit - time.monotonic())


def _ring(stack: contextlib.ExitStack, num_slots: int, slot_bytes: int) -> Ring:
    ring = Ring(num_slots=num_slots, slot_bytes=slot_bytes)
    stack.callback(ring.close)
    return ring


def _least(plans: dict[int, StagePlan]) -> KVCacheSize:
    return KVCacheSize(min(p.num_blocks for p in plans.values()), min(p.max_model_len for p in plans.values()))


def _sum_up(infos: list[WorkerInfo]) -> WorkerInfo:
    """What the stages together are: bytes add up, and of each phase the longest counts."""
    phases = {name: max(info.phases.get(name, 0.0) for info in infos) for name in infos[0].phases}
    first = infos[0]
    return WorkerInfo(
        num_blocks=first.num_blocks,
        block_size=first.block_size,
        max_model_len=first.max_model_len,
        vocab_size=first.vocab_size,
        eos_token_ids=first.eos_token_ids,
        weight_bytes=sum(info.weight_bytes for info in infos),
        kv_cache_bytes=sum(info.kv_cache_bytes for info in infos),
        dtype=first.dtype,
        phases=phases,
    )
