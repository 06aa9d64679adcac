"""The API process's hold on the engine process: starts it, talks with it, notices its death, ends it."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import tempfile
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from millstream.config import EngineConfig
from millstream.engine.process import MAX_MESSAGE_BYTES
from millstream.errors import EngineDeadError
from millstream.messages import (
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
_LAST_WORDS_SECONDS = 0.2


class EngineClient:
    """One engine process and the socket to it."""

    def __init__(self, process: asyncio.subprocess.Process, socket: zmq.asyncio.Socket, folder: Path) -> None:
        self._process = process
        self._socket = socket
        self._folder = folder
        self._exited = asyncio.ensure_future(process.wait())

    @classmethod
    async def start(cls, config: EngineConfig, *, log_level: str | None = None) -> EngineClient:
        """Start an engine process; it tells by messages how its start goes."""
        # mkdtemp makes it 0700: nobody else can connect
        folder = Path(tempfile.mkdtemp(prefix="millstream-"))
        address = f"ipc://{folder / 'engine'}"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", _MODULES[config.parallel.device], stdin=asyncio.subprocess.PIPE
        )
        assert process.stdin is not None
        start = EngineStart(config=config, address=address, log_level=log_level)
        process.stdin.write(msgspec.json.encode(start) + b"\n")
        await process.stdin.drain()
        socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        client = cls(process, socket, folder)
        await client.send(Hello())
        return client

    async def send(self, message: ToEngine) -> None:
        await self._socket.send(encode(message))

    async def receive(self) -> FromEngine:
        """The engine's next message. Raises EngineDeadError once its process has ended and all it sent was read."""
        received = asyncio.ensure_future(self._socket.recv())
        try:
            await asyncio.wait({received, self._exited}, return_when=asyncio.FIRST_COMPLETED)
            if not received.done():
                # its last words may still be on their way
                await asyncio.wait({received}, timeout=_LAST_WORDS_SECONDS)
            if received.done():
                return decode_from_engine(received.result())
        finally:
            received.cancel()
        raise EngineDeadError(f"The engine process has ended ({_describe(self._exited.result())})")

    async def stop(self) -> None:
        """End the engine process: ask, then insist. Safe to call twice."""
        if not self._exited.done():
            await self.send(Shutdown())
            done, _ = await asyncio.wait({self._exited}, timeout=_STOP_SECONDS)
            if not done:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._exited
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _describe(returncode: int) -> str:
    return f"signal {-returncode}" if returncode < 0 else f"exit code {returncode}"
