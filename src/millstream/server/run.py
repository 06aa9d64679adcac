"""Running the application: the socket, the signals, the end.

signal ──> no new connections ──> answers go on for GRACE_SECONDS ──> the rest is cut off, each with an error
           │                                                          event; all connections end
           └── a second signal cuts off at once
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Generator

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from millstream.config import ServerConfig
from millstream.log import log
from millstream.server.listen import BACKLOG, bind, url_of

GRACE_SECONDS = 3.0
CUT_OFF_SECONDS = 2
"""How long connections get to take their error event, before their tasks are cancelled."""

MAX_HEADER_BYTES = 64 * 1024
KEEP_ALIVE_SECONDS = 75


class BoundedProtocol(HttpToolsProtocol):
    """httptools gathers request headers of any size; this stops at MAX_HEADER_BYTES."""

    _num_header_bytes = 0
    _is_in_headers = True

    def on_message_begin(self) -> None:
        self._num_header_bytes, self._is_in_headers = 0, True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_headers = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # counted after parsing: one read may hold the end of the headers and a large part of the body
        if self._is_in_headers:
            self._num_header_bytes += len(data)
            if self._num_header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
                self.send_400_response(f"The request's headers are larger than {MAX_HEADER_BYTES} bytes.")


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, which raise the signal again at the end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def take(self, connection: socket.socket) -> None:
        """Serve a connection that another process has accepted."""

        def protocol() -> BoundedProtocol:
            return BoundedProtocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

        with contextlib.suppress(OSError):  # it may be gone by now
            await asyncio.get_running_loop().connect_accepted_socket(protocol, connection)


class HandedConnections:
    """Connections that the parent process has accepted, each sent with one byte over a socket."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._channel.setblocking(False)
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, server: _Server) -> None:
        """Give `server` all that come, from now on."""
        asyncio.get_running_loop().add_reader(self._channel.fileno(), self.take_all, server)

    def take_all(self, server: _Server) -> None:
        """Give `server` those that are there."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while True:
                byte, fds, _, _ = socket.recv_fds(self._channel, 1, 1)
                if not byte:
                    # the parent is gone, of which this process hears elsewhere
                    self.close()
                    return
                if not fds:
                    log.error("A connection is lost: this process may open no more files")
                    continue
                task = asyncio.ensure_future(server.take(socket.socket(fileno=fds[0])))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._channel.fileno())


async def serve(
    app: FastAPI,
    config: ServerConfig,
    on_listening: Callable[[str], None],
    *,
    sock: socket.socket | None = None,
    handed: HandedConnections | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve `app` until SIGINT, SIGTERM or `stop`; `on_listening` gets the URL once connections are taken.

    `sock` is a socket from `bind`, for those who want to know of a port in use before they load a model. With `handed`
    connections come from there, and the URL is empty. Raises ConfigError where the port can't be used.
    """
    sockets = [] if handed is not None else [sock or bind(config)]
    server = _Server(
        uvicorn.Config(
            app,
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=int(GRACE_SECONDS) + CUT_OFF_SECONDS,
        )
    )
    stop = stop or asyncio.Event()
    cut_off = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            cut_off.set()
        else:
            log.info("stopping: running answers have %.0f seconds, a second signal ends them now", GRACE_SECONDS)
        stop.set()

    with _signals(on_signal):
        stopper = asyncio.create_task(_stop(app, server, handed, stop, cut_off))
        listener = asyncio.create_task(
            _listen(server, handed, lambda: on_listening(url_of(sockets[0]) if sockets else ""))
        )
        try:
            await server.serve(sockets=sockets)
        finally:
            stopper.cancel()
            listener.cancel()
            await asyncio.gather(stopper, listener, return_exceptions=True)
            for each in sockets:
                each.close()
            if handed is not None:
                handed.close()


async def _listen(server: _Server, handed: HandedConnections | None, on_listening: Callable[[], None]) -> None:
    while not server.started:
        await asyncio.sleep(0.005)
    if handed is not None:
        handed.open(server)
    on_listening()


async def _stop(
    app: FastAPI, server: _Server, handed: HandedConnections | None, stop: asyncio.Event, cut_off: asyncio.Event
) -> None:
    await stop.wait()
    if handed is not None and server.started:
        # what was accepted is answered, if only with the news that the server stops
        handed.take_all(server)
    server.should_exit = True
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(cut_off.wait(), GRACE_SECONDS)
    app.state.generations.stop()


@contextlib.contextmanager
def _signals(handler: Callable[[], None]) -> Generator[None, None, None]:
    loop = asyncio.get_running_loop()
    handled = []
    for number in (signal.SIGINT, signal.SIGTERM):
        before = signal.getsignal(number)
        # not in a thread other than the main one (tests), nor on Windows
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(number, handler)
            handled.append((number, before))
    try:
        yield
    finally:
        for number, before in handled:
            loop.remove_signal_handler(number)  # leaves the default one, not the one before
            signal.signal(number, before)
