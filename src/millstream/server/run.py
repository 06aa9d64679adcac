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
import sys
from collections.abc import Callable, Generator

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from millstream.config import ServerConfig
from millstream.errors import ConfigError
from millstream.log import log

GRACE_SECONDS = 3.0
CUT_OFF_SECONDS = 2
"""How long connections get to take their error event, before their tasks are cancelled."""

MAX_HEADER_BYTES = 64 * 1024
KEEP_ALIVE_SECONDS = 75
BACKLOG = 2048


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


def bind(config: ServerConfig) -> socket.socket:
    """The listening socket, bound and kept: nobody can take the port before the server uses it.

    Raises ConfigError, naming --host or --port.
    """
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as e:
        raise ConfigError(f"--host is {config.host!r}: it is no address of this machine ({e})") from e
    family, kind, proto, _, address = found[0]
    sock = socket.socket(family, kind, proto)
    try:
        if sys.platform != "win32":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as e:
        sock.close()
        raise ConfigError(
            f"--port is {config.port}: can't listen on {config.host}:{config.port} ({e.strerror}); "
            "choose another one, 0 takes any that is free"
        ) from e
    return sock


def url_of(sock: socket.socket) -> str:
    """Where a client on this machine finds the server."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(
    app: FastAPI,
    config: ServerConfig,
    on_listening: Callable[[str], None],
    *,
    sock: socket.socket | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve `app` until SIGINT, SIGTERM or `stop`; `on_listening` gets the URL once connections are taken.

    `sock` is a socket from `bind`, for those who want to know of a port in use before they load a model.
    Raises ConfigError where the port can't be used.
    """
    sock = sock or bind(config)
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
        stopper = asyncio.create_task(_stop(app, server, stop, cut_off))
        listener = asyncio.create_task(_tell(server, lambda: on_listening(url_of(sock))))
        try:
            await server.serve(sockets=[sock])
        finally:
            stopper.cancel()
            listener.cancel()
            await asyncio.gather(stopper, listener, return_exceptions=True)
            sock.close()


async def _tell(server: uvicorn.Server, on_listening: Callable[[], None]) -> None:
    while not server.started:
        await asyncio.sleep(0.005)
    on_listening()


async def _stop(app: FastAPI, server: uvicorn.Server, stop: asyncio.Event, cut_off: asyncio.Event) -> None:
    await stop.wait()
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
