"""One of several API processes: `python -m millstream.server.api_process`, started by the supervisor.

It serves the connections that its parent hands over, as `serve` does with one process, but for the engine, which is the
parent's. It ends on SIGTERM, as that does, and when the parent closes its standard input.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import socket
import sys
from pathlib import Path

import msgspec

from millstream.engine.async_llm import AsyncLLM
from millstream.engine.client import EngineConnection
from millstream.errors import MillstreamError
from millstream.hub.files import resolve
from millstream.log import configure, log
from millstream.messages import ApiStart
from millstream.server.app import create_app
from millstream.server.launch import loop_factory, warn_without_template
from millstream.server.run import HandedConnections, serve
from millstream.server.siblings import Siblings
from millstream.server.supervisor import LISTENING, READY
from millstream.tokenizer.tokenizer import Tokenizer


async def run(start: ApiStart) -> int:
    """Serve until told to stop; the exit status."""
    server = start.server
    if server.seed is not None:
        # two processes must not count up from the same number
        server = dataclasses.replace(server, seed=server.seed * server.api_processes + start.place)
    files = resolve(start.engine.model.model, cache_dir=start.engine.model.cache_dir)
    tokenizer = Tokenizer.load(files, chat_template=start.engine.model.chat_template)
    name = server.served_model_name or files.name
    if start.place == 0:
        warn_without_template(tokenizer, name)
    connection = EngineConnection(start.address, _parents_last_word(), name=start.name)
    llm = AsyncLLM(connection, config=start.engine, tokenizer=tokenizer, model_name=name)
    siblings = Siblings(Path(start.address.removeprefix("ipc://")).parent, start.name, llm.metrics)
    channel = socket.socket(fileno=start.channel_fd)
    handed = HandedConnections(channel)
    stop, listening = asyncio.Event(), asyncio.Event()
    app = create_app(llm, server, name, siblings=siblings)
    telling = await siblings.start()
    serving = asyncio.create_task(serve(app, server, lambda url: listening.set(), handed=handed, stop=stop))

    async def live() -> None:
        await listening.wait()
        channel.send(LISTENING)
        await llm.start()
        channel.send(READY)
        raise await llm.wait_dead()

    living = asyncio.create_task(live())
    try:
        await asyncio.wait({serving, living}, return_when=asyncio.FIRST_COMPLETED)
        if living.done():
            await living
        return 0
    finally:
        living.cancel()
        # streams that are still open get an error event
        stop.set()
        await llm.stop()
        await asyncio.wait({serving})
        telling.close()


def _parents_last_word() -> asyncio.Future[str]:
    """Done when the parent says why the engine has ended, or ends itself."""
    loop = asyncio.get_running_loop()
    word: asyncio.Future[str] = loop.create_future()
    descriptor = sys.stdin.fileno()

    def read() -> None:
        text = os.read(descriptor, 4096).decode().strip()
        loop.remove_reader(descriptor)
        word.set_result(text or "its parent is gone")

    loop.add_reader(descriptor, read)
    return word


def main() -> int:
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=ApiStart)
    configure(start.server.log_level)
    # Ctrl-C in the terminal reaches the whole process group; the parent decides when we end
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(run(start))
    except MillstreamError as e:
        log.error("%s", e)
        return 1


if __name__ == "__main__":
    sys.exit(main())
