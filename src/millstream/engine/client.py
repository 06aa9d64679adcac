"""The API process's hold on the engine process: starts it, talks with it, notices its death, ends it."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from millstream import errors
from millstream.config import EngineConfig
from millstream.errors import ConfigError, EngineDeadError, MillstreamError, ModelError
from millstream.messages import (
    MAX_MESSAGE_BYTES,
    EngineFailed,
    EngineStart,
    FromEngine,
    Hello,
    Shutdown,
    ToEngine,
    decode_from_engine,
    encode,
)

# by name, since the simulated device lies above the engine
_MODULES = {"cpu": "millstream.engine.process", "sim": "millstream.sim.process"}
_STOP_SECONDS = 5.0
# as plain numbers: arithmetic on pyzmq's enumerations is slow
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
_LAST_WORDS_SECONDS = 0.2


class EngineConnection:
    """A socket to an engine process that somebody else has started.

    Args:
        address: where the engine listens.
        name: of this client, different from all that the engine has seen; empty: any.
        gone: done when the engine process has ended; its result says how.
        takes_outputs: False for who asks for nothing: it hears of the engine's start and death only.
    """

    def __init__(self, address: str, gone: asyncio.Future[str], *, name: str = "", takes_outputs: bool = True) -> None:
        self.address = address
        self._gone = gone
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.LINGER, 0)
        if name:
            self._socket.setsockopt(zmq.ROUTING_ID, name.encode())
        self._socket.connect(address)
        self._readable = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._readable.set)
        gone.add_done_callback(lambda _: self._readable.set())
        self.send(Hello(takes_outputs))

    def send(self, message: ToEngine) -> None:
        """Hand a message over; never waits."""
        self._socket.send(encode(message), zmq.NOBLOCK)
        # the descriptor tells of changes only, and sending may have taken note of one
        self._readable.set()

    async def receive(self) -> list[FromEngine]:
        """The engine's next messages, all that are there; others run before it returns.

        Who is slow thus gets many at once, and can take them together. Raises EngineDeadError once the engine's process
        has ended and all it sent was read.
        """
        await asyncio.sleep(0)
        while not (messages := self._take()):
            if self._gone.done():
                # its last words may still be on their way
                await asyncio.sleep(_LAST_WORDS_SECONDS)
                if messages := self._take():
                    break
                raise EngineDeadError(f"The engine process has ended ({self._gone.result()})")
            await self._readable.wait()
            self._readable.clear()
        return messages

    def _take(self) -> list[FromEngine]:
        messages: list[FromEngine] = []
        # asked for, since to try and fail costs as much as three messages
        while int(self._socket.get(_EVENTS)) & _POLLIN:
            messages.append(decode_from_engine(self._socket.recv(zmq.NOBLOCK)))
        return messages

    async def stop(self) -> None:
        """Close the socket. Safe to call twice."""
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close()


class Process(Protocol):
    """What is needed of an `asyncio.subprocess.Process`."""

    async def wait(self) -> int: ...

    def kill(self) -> None: ...


class EngineClient(EngineConnection):
    """One engine process, started by this one, and the socket to it."""

    def __init__(self, process: Process, folder: Path, *, takes_outputs: bool = True) -> None:
        self._process = process
        self.folder = folder
        """Only this user can open it; goes with the engine."""
        self._exited = asyncio.ensure_future(_ended(process))
        super().__init__(address_in(folder), self._exited, takes_outputs=takes_outputs)

    @classmethod
    async def start(
        cls, config: EngineConfig, *, log_level: str | None = None, takes_outputs: bool = True
    ) -> EngineClient:
        """Start an engine process; it tells by messages how its start goes."""
        # mkdtemp makes it 0700: nobody else can connect
        folder = Path(tempfile.mkdtemp(prefix="millstream-"))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", _MODULES[config.parallel.device], stdin=asyncio.subprocess.PIPE
        )
        assert process.stdin is not None
        start = EngineStart(config=config, address=address_in(folder), log_level=log_level)
        process.stdin.write(msgspec.json.encode(start) + b"\n")
        await process.stdin.drain()
        return cls(process, folder, takes_outputs=takes_outputs)

    async def stop(self) -> None:
        """End the engine process: ask, then insist. Safe to call twice."""
        if not self._exited.done():
            self.send(Shutdown())
            done, _ = await asyncio.wait({self._exited}, timeout=_STOP_SECONDS)
            if not done:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._exited
        await super().stop()
        shutil.rmtree(self.folder, ignore_errors=True)


def address_in(folder: Path) -> str:
    """Where the engine listens whose folder this is."""
    return f"ipc://{folder / 'engine'}"


def error_of(failed: EngineFailed) -> MillstreamError:
    """The engine's own error class where it is a user's to mend, else EngineDeadError."""
    cls = getattr(errors, failed.error, None)
    if isinstance(cls, type) and issubclass(cls, (ConfigError, ModelError)):
        return cls(failed.message)
    return EngineDeadError(f"The engine failed: {failed.error}: {failed.message}")


async def _ended(process: Process) -> str:
    code = await process.wait()
    return f"signal {-code}" if code < 0 else f"exit code {code}"
