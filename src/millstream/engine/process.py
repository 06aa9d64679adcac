"""The engine process: `python -m millstream.engine.process`, started by EngineClient.

It reads its EngineStart from standard input, answers on a zmq socket, and ends when it is told to or when standard
input closes, which is how it learns that its parent is gone. While idle it blocks in `poll`.
"""

from __future__ import annotations

import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from millstream.config import EngineConfig, SchedulerConfig
from millstream.engine.busy_period import BusyPeriod
from millstream.engine.core import EngineCore
from millstream.engine.trace import Tracer
from millstream.errors import ConfigError, MillstreamError, OverloadedError, RequestError
from millstream.executor.base import Executor, WaitingExecutor, Wake, make_executor
from millstream.log import configure, log
from millstream.messages import (
    MAX_MESSAGE_BYTES,
    AbortRequests,
    ClientGone,
    EngineFailed,
    EngineOutputs,
    EngineProgress,
    EngineReady,
    EngineRequest,
    EngineStart,
    FromEngine,
    Hello,
    RequestRefused,
    Shutdown,
    ToEngine,
    TraceTo,
    decode_to_engine,
    encode,
)
from millstream.parallel.lifeline import follow_parent
from millstream.request import Request

_PROGRESS_SECONDS = 0.05


class EngineSocket:
    """The engine's end of the socket: knows which client asked for which request."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # never drop: what a slow client has not read yet waits here
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.bind(address)
        self._clients: dict[bytes, bool] = {}
        """By name; True for those that take outputs. The first of them gets the figures of steps."""
        self.owners: dict[str, bytes] = {}
        """Who asked for a request."""

    @property
    def wake(self) -> Wake:
        """Can be read when a client has sent something."""
        return self._socket

    def receive(self, timeout: float | None) -> list[tuple[bytes, ToEngine]]:
        """All messages that are there; waits up to `timeout` seconds (None: for ever) for the first."""
        messages: list[tuple[bytes, ToEngine]] = []
        if timeout != 0:
            self._socket.poll(None if timeout is None else max(0, int(timeout * 1000 + 0.5)))
        while True:
            try:
                client, data = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            message = decode_to_engine(data)
            if isinstance(message, Hello):
                self._clients[client] = message.takes_outputs
            messages.append((client, message))

    def send(self, client: bytes, message: FromEngine) -> None:
        self._socket.send_multipart((client, encode(message)))

    def broadcast(self, message: FromEngine) -> None:
        for client in self._clients:
            self.send(client, message)

    def knows(self, client: bytes) -> bool:
        """Whether this client has said Hello, and was not dropped."""
        return client in self._clients

    def drop(self, client: bytes) -> list[str]:
        """Forget a client that has ended, and take no more of it; the open requests that it asked for."""
        self._clients.pop(client, None)
        return [request_id for request_id, owner in self.owners.items() if owner == client]

    def send_outputs(self, outputs: EngineOutputs) -> None:
        """To each client what is new of its own requests, in one message."""
        for client, part in self._split(outputs):
            self.send(client, part)
        for request_id, reason in zip(outputs.request_ids, outputs.finish_reasons, strict=True):
            if reason is not None:
                self.owners.pop(request_id, None)

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def _split(self, outputs: EngineOutputs) -> list[tuple[bytes, EngineOutputs]]:
        takers = [client for client, takes_outputs in self._clients.items() if takes_outputs]
        if len(takers) == 1:
            return [(takers[0], outputs)]
        rows: dict[bytes, list[int]] = {client: [] for client in takers}
        for i, request_id in enumerate(outputs.request_ids):
            if (owned := rows.get(self.owners.get(request_id, b""))) is not None:
                owned.append(i)
        parts = []
        for client, own in rows.items():
            part = self._part(outputs, client, own)
            if client == takers[0]:
                # counters must be counted once
                part.stats = outputs.stats
            if own or part.progress or part.stats is not None:
                parts.append((client, part))
        return parts

    def _part(self, outputs: EngineOutputs, client: bytes, rows: list[int]) -> EngineOutputs:
        ids = [outputs.request_ids[i] for i in rows]
        return EngineOutputs(
            ids,
            [outputs.new_token_ids[i] for i in rows],
            [outputs.finish_reasons[i] for i in rows],
            [outputs.stop_reasons[i] for i in rows],
            [outputs.num_cached_tokens[i] for i in rows],
            logprobs={r: outputs.logprobs[r] for r in ids if r in outputs.logprobs},
            prompt_logprobs={r: outputs.prompt_logprobs[r] for r in ids if r in outputs.prompt_logprobs},
            progress={r: p for r, p in outputs.progress.items() if self.owners.get(r) == client},
        )


class EngineProcess:
    """Moves messages between the socket and an EngineCore."""

    def __init__(self, core: EngineCore, socket: EngineSocket, config: SchedulerConfig) -> None:
        self._core = core
        self._socket = socket
        self._batch_window = config.batch_window_ms / 1000
        self._max_num_open = config.max_num_open
        self._open: dict[str, tuple[Request, float]] = {}
        self._period: BusyPeriod | None = None
        self._stopping = False

    def run(self) -> None:
        """Serve until told to stop."""
        try:
            self._run()
        finally:
            if self._core.tracer is not None:
                self._core.tracer.close()

    def _run(self) -> None:
        while not self._stopping:
            self._receive()
            if self._stopping:
                break
            outputs = self._core.step(wake=self._socket.wake)
            if outputs is not None:
                self._settle(outputs)
            if not self._core.has_work:
                self._fall_idle()

    def _receive(self) -> None:
        """Take what clients sent. Idle, wait for it, then up to the batch window for more."""
        was_idle = not self._core.has_work
        if was_idle:
            self._core.wait_idle(self._socket.wake)
        self._take(self._socket.receive(None if was_idle else 0))
        if not (was_idle and self._batch_window and self._core.has_work):
            return
        deadline = time.monotonic() + self._batch_window
        scheduler = self._core.scheduler
        while (left := deadline - time.monotonic()) > 0 and not self._stopping:
            if scheduler.num_waiting >= scheduler.max_num_running:
                break
            self._take(self._socket.receive(left))

    def _take(self, messages: list[tuple[bytes, ToEngine]]) -> None:
        for client, message in messages:
            if not self._socket.knows(client):
                continue  # what a client that has ended sent before
            match message:
                case EngineRequest():
                    self._add(client, message)
                case AbortRequests():
                    self._abort(message)
                case TraceTo(path):
                    self._trace_to(path)
                case Hello():
                    self._socket.send(client, EngineReady(self._core.info))
                    self._socket.send(client, self._tracing())
                case ClientGone(name):
                    self._abort(AbortRequests(self._socket.drop(name.encode())))
                case Shutdown():
                    self._stopping = True

    def _add(self, client: bytes, message: EngineRequest) -> None:
        try:
            # each client looks at its own requests only, before it sends one
            if len(self._open) >= self._max_num_open:
                raise OverloadedError(f"{len(self._open)} requests are open (--max-num-seqs and --max-num-waiting)")
            request = self._core.add(message)
        except RequestError as e:
            self._socket.send(client, RequestRefused(message.request_id, type(e).__name__, e.message, e.param))
            return
        self._socket.owners[message.request_id] = client
        self._open[request.request_id] = (request, time.monotonic())
        if self._period is None:
            self._period = BusyPeriod()
        self._period.num_requests += 1
        log.info("Request %s with %d prompt tokens added", request.request_id, request.num_prompt_tokens)

    def _abort(self, message: AbortRequests) -> None:
        for request_id in message.request_ids:
            if self._core.abort(request_id, message.reason):
                self._log_finished(request_id)
                self._socket.owners.pop(request_id, None)
        # gauges must not keep showing what is gone
        self._socket.send_outputs(EngineOutputs([], [], [], [], [], stats=self._core.scheduler.take_stats()))

    def _trace_to(self, path: str | None) -> None:
        tracer = self._core.tracer
        if path is None and tracer is not None:
            tracer.close()
            self._core.tracer = None
        elif path is not None and tracer is None:
            try:
                self._core.tracer = Tracer(path)
            except ConfigError as e:
                log.warning("%s", e)
        self._socket.broadcast(self._tracing())

    def _tracing(self) -> TraceTo:
        return TraceTo(None if self._core.tracer is None else self._core.tracer.path)

    def _settle(self, outputs: EngineOutputs) -> None:
        step, stats = self._core.last_step, outputs.stats
        assert step is not None and stats is not None
        if self._period is not None:
            if self._period.num_prefill_tokens == 0:
                stats.num_first_step_requests = len(step.request_ids)
                log.info("First step: %d requests, %d tokens", len(step.request_ids), step.num_tokens)
            self._period.add_step(step, num_sampled=stats.num_generation_tokens, seconds=stats.step_seconds)
        for request_id, reason in zip(outputs.request_ids, outputs.finish_reasons, strict=True):
            if reason is not None:
                self._log_finished(request_id)
        self._socket.send_outputs(outputs)

    def _log_finished(self, request_id: str) -> None:
        request, started = self._open.pop(request_id)
        seconds = time.monotonic() - started
        count = request.num_output_tokens
        log.info(
            "Request %s finished (%s): %d tokens in %.2f seconds (%.1f tokens/s)",
            request_id,
            request.finish_reason,
            count,
            seconds,
            count / seconds if seconds > 0 else 0.0,
        )

    def _fall_idle(self) -> None:
        if self._period is not None:
            for line in self._period.lines():
                log.info("%s", line)
            self._period = None
        self._core.check_integrity()


def _start_core(config: EngineConfig, executor: Executor, socket: EngineSocket) -> EngineCore:
    """Load the model, telling clients how far it is."""
    last = 0.0

    def on_progress(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > _PROGRESS_SECONDS or done == total:
            last = now
            socket.broadcast(EngineProgress(done, total))

    return EngineCore(config, executor, on_progress=on_progress)


MakeExecutor = Callable[[EngineConfig, Path], Executor]
"""Given the settings and a folder that only this user can open."""


def main(make: MakeExecutor = lambda config, folder: make_executor(config, folder=folder, is_own_process=True)) -> int:
    """Run an engine process over the executor that `make` gives; its exit status."""
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineStart)
    configure(start.log_level)
    # Ctrl-C in the terminal reaches the whole process group; the parent decides when we end
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder = Path(start.address.removeprefix("ipc://")).parent
    executors: list[Executor] = []

    def on_lost() -> None:
        """The parent is gone: take along what it would have ended and removed."""
        for executor in executors:
            if isinstance(executor, WaitingExecutor):
                executor.kill()
        shutil.rmtree(folder, ignore_errors=True)

    follow_parent(on_lost)
    socket = EngineSocket(start.address)
    socket.receive(None)  # Hello
    trace = start.config.trace.trace
    try:
        # first, as a name that is wrong should be told of before a model is loaded
        tracer = None if trace is None else Tracer(trace)
        began = time.monotonic()
        executor = make(start.config, folder)
        import_seconds = time.monotonic() - began
        executors.append(executor)
        core = _start_core(start.config, executor, socket)
        core.tracer = tracer
        core.info.phases = {"import": import_seconds, **core.info.phases}
        socket.broadcast(EngineReady(core.info))
        EngineProcess(core, socket, start.config.scheduler).run()
    except MillstreamError as e:
        socket.broadcast(EngineFailed(type(e).__name__, str(e)))
        return 1
    except Exception as e:
        log.exception("The engine failed")
        socket.broadcast(EngineFailed(type(e).__name__, str(e)))
        return 1
    finally:
        for executor in executors:
            executor.shutdown()
        socket.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
