"""Several API processes on one port.

    client ── connects ──> supervisor ── hands the connection over, in turn ──> API process 0 .. N-1
                             │ starts, watches                                     │ zmq
                             └────────> engine process <───────────────────────────┘

The supervisor accepts, so connections spread evenly however they come, and those that wait are nobody's yet. It does
nothing else for a request. An API process that dies takes its own requests along: the engine is told and aborts them,
and another process takes the place. One that can't even start ends the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from millstream.config import EngineConfig, ServerConfig
from millstream.engine.client import EngineClient, error_of
from millstream.errors import MillstreamError
from millstream.log import log
from millstream.messages import ApiStart, ClientGone, EngineFailed, EngineProgress, EngineReady, WorkerInfo
from millstream.server.siblings import socket_path

LISTENING, READY = b"l", b"r"
"""What an API process tells: it can be given connections; it can run requests."""
MAX_ACCEPTS = 64
"""Connections accepted before other things get their turn."""
RETRY_SECONDS = 1.0
"""Until the next try to accept, where this process may not open another file."""
END_SECONDS = 10.0
"""Longer than an API process takes to end its streams."""


@dataclass
class _Api:
    """One API process, as seen from here."""

    name: str
    place: int
    process: asyncio.subprocess.Process
    channel: socket.socket
    is_listening: bool = False
    is_ready: bool = False


class Supervisor:
    """Starts API processes, gives them connections in turn, and replaces those that die.

    Args:
        client: of the engine process, without outputs.
        sock: the listening socket; closed at the end.
    """

    def __init__(self, client: EngineClient, engine: EngineConfig, server: ServerConfig, sock: socket.socket) -> None:
        self._client = client
        self._engine = engine
        self._server = server
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._apis: dict[int, _Api] = {}
        """By place."""
        self._on_ready: Callable[[WorkerInfo], None] | None = None
        self._next_place = 0
        self._num_started = 0
        self._is_accepting = False
        self._stopping = asyncio.Event()
        self._ready: asyncio.Future[WorkerInfo] = self._loop.create_future()
        """What the engine has told."""

    async def run(self, *, on_progress: Callable[[int, int], None], on_ready: Callable[[WorkerInfo], None]) -> None:
        """Serve until SIGINT or SIGTERM; a second one cuts answers off. Raises MillstreamError where that fails."""
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._stop)
        self._on_ready = on_ready
        watching = [asyncio.create_task(self._follow_engine(on_progress), name="engine-watch")]
        reason = "the server is shutting down"
        try:
            for place in range(self._server.api_processes):
                watching.append(asyncio.create_task(self._keep(place), name=f"api-{place}"))
            stop = asyncio.create_task(self._stopping.wait())
            await asyncio.wait({stop, *watching}, return_when=asyncio.FIRST_COMPLETED)
            for task in watching:
                if task.done():
                    await task
        except MillstreamError as e:
            reason = str(e)
            raise
        finally:
            self._pause()
            self._sock.close()
            await self._end(reason)
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)

    def _stop(self) -> None:
        self._stopping.set()
        self._pause()
        for api in self._apis.values():
            with contextlib.suppress(ProcessLookupError):
                api.process.terminate()

    async def _end(self, reason: str) -> None:
        """End all API processes: those that were not told to stop learn that there is no engine any more."""
        apis = list(self._apis.values())
        if not self._stopping.is_set():
            self._stopping.set()
            for api in apis:
                assert api.process.stdin is not None
                api.process.stdin.write(reason.encode() + b"\n")
                api.process.stdin.close()
        ends = [asyncio.ensure_future(api.process.wait()) for api in apis]
        if not ends:
            return
        _, late = await asyncio.wait(ends, timeout=END_SECONDS)
        for api, end in zip(apis, ends, strict=True):
            if end in late:
                log.warning("API process %d does not end: it is killed", api.place)
                api.process.kill()
            await end
            self._lose(api)

    async def _follow_engine(self, on_progress: Callable[[int, int], None]) -> None:
        """Raises EngineDeadError when the engine has died, ConfigError or ModelError where it can't start."""
        while True:
            for message in await self._client.receive():
                match message:
                    case EngineProgress(done, total):
                        on_progress(done, total)
                    case EngineFailed():
                        raise error_of(message)
                    case EngineReady(info):
                        self._ready.set_result(info)
                        self._tell_ready()

    def _tell_ready(self) -> None:
        """Once, when all are ready."""
        if self._on_ready is not None and self._ready.done() and all(api.is_ready for api in self._apis.values()):
            self._on_ready(self._ready.result())
            self._on_ready = None

    # -- API processes ------------------------------------------------------------------------------------------

    async def _keep(self, place: int) -> None:
        """Have a process at `place` at all times. Raises MillstreamError for one that ends before it was ready."""
        while True:
            api = await self._start(place)
            code = await api.process.wait()
            self._lose(api)
            if self._stopping.is_set():
                return
            told = f"signal {-code}" if code < 0 else f"exit code {code}"
            if not api.is_ready:
                raise MillstreamError(f"API process {place} has ended before it was ready ({told})")
            log.error(
                "API process %d has ended (%s): its requests are aborted, another one takes its place", place, told
            )

    async def _start(self, place: int) -> _Api:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        name = f"api-{self._num_started}"
        self._num_started += 1
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "millstream.server.api_process"),
            stdin=asyncio.subprocess.PIPE,
            pass_fds=(theirs.fileno(),),
        )
        api = self._apis[place] = _Api(name, place, process, ours)
        start = ApiStart(
            engine=self._engine,
            server=self._server,
            address=self._client.address,
            name=name,
            place=place,
            channel_fd=theirs.fileno(),
        )
        theirs.close()
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(start) + b"\n")
        self._loop.add_reader(ours.fileno(), self._hear, api)
        return api

    def _hear(self, api: _Api) -> None:
        try:
            told = api.channel.recv(16)
        except BlockingIOError:
            return
        except ConnectionError:
            told = b""
        if not told:
            self._loop.remove_reader(api.channel.fileno())
            return
        api.is_listening = True
        api.is_ready = api.is_ready or READY in told
        self._tell_ready()
        self._resume()

    def _lose(self, api: _Api) -> None:
        """Clean up after a process that has ended."""
        api.is_listening = False
        if api.channel.fileno() >= 0:
            self._loop.remove_reader(api.channel.fileno())
            api.channel.close()
        if not self._stopping.is_set():
            self._client.send(ClientGone(api.name))
        socket_path(self._client.folder, api.name).unlink(missing_ok=True)

    # -- connections --------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        if not self._is_accepting and not self._stopping.is_set():
            self._is_accepting = True
            self._loop.add_reader(self._sock.fileno(), self._accept)

    def _pause(self) -> None:
        if self._is_accepting:
            self._is_accepting = False
            self._loop.remove_reader(self._sock.fileno())

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTS):
            takers = self._takers()
            if not takers:
                # a process will tell when it listens; until then connections wait in the socket
                self._pause()
                return
            try:
                connection, _ = self._sock.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as e:
                log.error("Connections can't be accepted: %s", e.strerror)
                self._pause()
                self._loop.call_later(RETRY_SECONDS, self._resume)
                return
            with connection:
                self._hand_over(connection, takers)

    def _takers(self) -> list[_Api]:
        """Whom to give the next connection, in order of preference: in turn, and first those that can run requests."""
        places = [(self._next_place + i) % self._server.api_processes for i in range(self._server.api_processes)]
        listening = [api for place in places if (api := self._apis.get(place)) is not None and api.is_listening]
        return sorted(listening, key=lambda api: not api.is_ready)

    def _hand_over(self, connection: socket.socket, takers: list[_Api]) -> None:
        for api in takers:
            # one that has hung takes no more when its channel is full, one that has ended none at all
            with contextlib.suppress(BlockingIOError, ConnectionError):
                socket.send_fds(api.channel, [b"c"], [connection.fileno()])
                self._next_place = (api.place + 1) % self._server.api_processes
                return
        log.error("No API process takes a connection: it is closed")
