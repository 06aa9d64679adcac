"""A worker process, one stage of a pipeline: `python -m millstream.worker.process`, started by MultiprocExecutor.

It reads its WorkerStart from standard input, talks with the executor over a zmq socket and with its neighbours over
inherited rings, and ends when standard input closes. SIGUSR1 makes it write its stack to standard error.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from millstream.log import configure
from millstream.messages import (
    MAX_MESSAGE_BYTES,
    FromWorker,
    KVCacheSize,
    Ping,
    Pong,
    SchedulerOutput,
    StageFailed,
    StagePlan,
    StageProgress,
    StageReady,
    WorkerStart,
    decode_to_worker,
    encode,
)
from millstream.parallel.context import ParallelContext, let_openmp_sleep
from millstream.parallel.lean_torch import load_lean_torch
from millstream.parallel.lifeline import follow_parent
from millstream.parallel.ring import Board, NeighbourGoneError
from millstream.worker.step_queue import StepQueue

if TYPE_CHECKING:
    from millstream.worker.worker import Worker

_PROGRESS_SECONDS = 0.05


class WorkerSocket:
    """The worker's end of the socket to the executor."""

    def __init__(self, address: str, rank: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, b"%d" % rank)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.connect(address)

    def send(self, message: FromWorker) -> None:
        self._socket.send(encode(message))

    def has_message(self) -> bool:
        """Whether `receive` would not wait."""
        return bool(self._socket.poll(0))

    def receive(self) -> KVCacheSize | SchedulerOutput | Ping:
        """The next message; waits for it."""
        return decode_to_worker(self._socket.recv())

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def run_stage(start: WorkerStart, socket: WorkerSocket) -> None:
    """Load the stage, then run steps until the process is ended. Raises what the stage raises."""
    began = time.monotonic()
    # it takes a second or two and must find its cores chosen
    load_lean_torch()
    from millstream.worker.links import linked_ends
    from millstream.worker.worker import Worker

    import_seconds = time.monotonic() - began
    context = ParallelContext(start.rank, len(start.layer_split), tuple(start.layer_split))
    worker = Worker(start.config, context=context, make_ends=linked_ends(start))
    _load(worker, start.rank, socket, import_seconds)
    board = Board(start.board_fd, len(start.layer_split))
    queue = StepQueue()
    while True:
        while not queue or socket.has_message():
            _take(socket, start.rank, queue)
        # known before the stage before has computed it, a step's tables are made meanwhile
        known = queue.certain_step_id()
        step_id = worker.next_step_id() if known is None else known
        while step_id is not None and step_id not in queue:
            _take(socket, start.rank, queue)
        output = worker.execute(queue.take(step_id))
        board.count(start.rank)
        if output is not None:
            socket.send(output)


def _take(socket: WorkerSocket, rank: int, queue: StepQueue) -> None:
    """Wait for a message and deal with it."""
    match socket.receive():
        case SchedulerOutput() as step:
            queue.put(step)
        case Ping():
            socket.send(Pong(rank))
        case KVCacheSize():
            raise AssertionError("the KV cache is allocated already")


def _load(worker: Worker, rank: int, socket: WorkerSocket, import_seconds: float) -> None:
    """Agree on the number of blocks, load, and say so."""
    plan = worker.plan()
    socket.send(StagePlan(rank, plan.num_blocks, plan.max_model_len))
    size = socket.receive()
    assert isinstance(size, KVCacheSize), "the size of the KV cache comes first"
    last = 0.0

    def on_progress(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > _PROGRESS_SECONDS or done == total:
            last = now
            socket.send(StageProgress(rank, done, total))

    info = worker.load(plan.resized(size.num_blocks, size.max_model_len), on_progress)
    info.phases = {"import": import_seconds, **info.phases}
    socket.send(StageReady(rank, info))


def main() -> int:
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerStart)
    configure(start.log_level)
    # Ctrl-C in the terminal reaches the whole process group; the parent decides when we end
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # the engine takes its folder along; should it have been killed, nobody else does
    folder = Path(start.address.removeprefix("ipc://")).parent
    follow_parent(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.sched_setaffinity(0, start.cpus)
    let_openmp_sleep()
    socket = WorkerSocket(start.address, start.rank)
    try:
        run_stage(start, socket)
    except NeighbourGoneError:
        # the executor learns of that death by itself and ends us
        threading.Event().wait()
    except Exception as e:
        socket.send(StageFailed(start.rank, type(e).__name__, str(e), traceback.format_exc()))
        # the executor names the stage and its stack, then ends us
        threading.Event().wait()
    return 1


if __name__ == "__main__":
    sys.exit(main())
