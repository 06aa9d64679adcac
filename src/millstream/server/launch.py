"""`millstream serve`: start the engine process and the HTTP server, say what runs, end both together.

The engine process starts first and loads its weights while this process imports the web framework, reads the
tokenizer and begins to listen: /health answers at once, /ready when the model is there. With --api-processes over 1
this process is the supervisor (`supervisor.py`), which starts those that answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

from millstream.config import EngineConfig, ServerConfig
from millstream.engine.client import EngineClient
from millstream.hub.files import ModelFiles, resolve
from millstream.log import log
from millstream.messages import WorkerInfo

try:
    import resource
except ImportError:  # Windows has no such limit
    resource = None  # type: ignore[assignment]

# what this process alone needs is imported while the engine process is loading: it takes a good part of a second
if TYPE_CHECKING:
    from millstream.engine.async_llm import AsyncLLM
    from millstream.tokenizer.tokenizer import Tokenizer

GIB = 2**30


def launch(engine: EngineConfig, server: ServerConfig) -> int:
    """Serve until a signal, or until the engine dies; the exit status.

    Raises ConfigError or ModelError where the start fails for a reason that the user can mend, EngineDeadError where
    the engine died.
    """
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_launch(engine, server))


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes the event loop of an API process; None: the library's own."""
    if sys.platform == "win32":
        return None
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _raise_file_limit() -> None:
    """Let all processes have as many connections as the system allows: most shells allow 1,024 files."""
    if resource is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _launch(engine: EngineConfig, server: ServerConfig) -> int:
    started = time.monotonic()
    _raise_file_limit()
    files = await asyncio.to_thread(resolve, engine.model.model, cache_dir=engine.model.cache_dir)
    log.info("Loading %s (%s)", files.name, files.path)
    is_only = server.api_processes == 1
    client = await EngineClient.start(engine, log_level=server.log_level, takes_outputs=is_only)
    try:
        if not is_only:
            return await _supervise(client, engine, server, files, started)
        return await _serve(client, engine, server, files, started)
    finally:
        await client.stop()


async def _serve(
    client: EngineClient, engine: EngineConfig, server: ServerConfig, files: ModelFiles, started: float
) -> int:
    from millstream.engine.async_llm import AsyncLLM
    from millstream.server.app import create_app
    from millstream.server.listen import bind
    from millstream.server.run import serve
    from millstream.tokenizer.tokenizer import Tokenizer

    sock = bind(server)
    tokenizer = await asyncio.to_thread(Tokenizer.load, files, chat_template=engine.model.chat_template)
    name = server.served_model_name or files.name
    llm = AsyncLLM(client, config=engine, tokenizer=tokenizer, model_name=name)
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    app = create_app(llm, server, name)
    serving = asyncio.create_task(serve(app, server, url.set_result, sock=sock, stop=stop), name="http")
    loading = asyncio.create_task(_load(llm), name="loading")
    try:
        await asyncio.wait({serving, loading}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            loading.cancel()
            await serving
            return 0
        info = await loading
        _announce(info, await url, name, engine, server, time.monotonic() - started)
        warn_without_template(tokenizer, name)
        dying = asyncio.create_task(llm.wait_dead(), name="engine-watch")
        await asyncio.wait({serving, dying}, return_when=asyncio.FIRST_COMPLETED)
        if dying.done():
            raise dying.result()
        dying.cancel()
        await serving
        log.info("Goodbye")
        return 0
    finally:
        # streams that are still open get an error event, then the listener closes
        stop.set()
        await llm.stop()
        await asyncio.wait({serving})


async def _supervise(
    client: EngineClient, engine: EngineConfig, server: ServerConfig, files: ModelFiles, started: float
) -> int:
    from millstream.server.listen import bind, url_of
    from millstream.server.supervisor import Supervisor

    name = server.served_model_name or files.name
    sock = bind(server)
    url = url_of(sock)

    def on_ready(info: WorkerInfo) -> None:
        _announce(info, url, name, engine, server, time.monotonic() - started)

    with _progress_bar() as on_progress:
        await Supervisor(client, engine, server, sock).run(on_progress=on_progress, on_ready=on_ready)
    log.info("Goodbye")
    return 0


async def _load(llm: AsyncLLM) -> WorkerInfo:
    with _progress_bar() as on_progress:
        return await llm.start(on_progress=on_progress)


@contextlib.contextmanager
def _progress_bar() -> Generator[Callable[[int, int], None], None, None]:
    """Something to tell the bytes of weights loaded, and all; shown on a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("Loading weights"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("weights", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def warn_without_template(tokenizer: Tokenizer, name: str) -> None:
    """Say so where the model called `name` has no chat template."""
    if tokenizer.chat_template is None:
        log.warning("%s has no chat template: chat needs --chat-template FILE; completions work", name)


def _announce(
    info: WorkerInfo, url: str, name: str, engine: EngineConfig, server: ServerConfig, seconds: float
) -> None:
    """What a person wants to know at the start, the last thing a command to copy."""
    capacity = info.num_blocks * info.block_size
    phases = ", ".join(f"{phase} {duration:.2f} s" for phase, duration in info.phases.items())
    log.info("Weights: %.2f GiB in %s", info.weight_bytes / GIB, engine.model.quantization or info.dtype)
    log.info(
        "KV cache: %.2f GiB, %d tokens in %d blocks: %.1f requests of full length (%d tokens)",
        info.kv_cache_bytes / GIB,
        capacity,
        info.num_blocks,
        capacity / info.max_model_len,
        info.max_model_len,
    )
    log.info("Ready in %.2f s (%s)", seconds, phases)
    if server.host not in ("127.0.0.1", "localhost", "::1") and server.api_key is None:
        log.warning("Everybody who reaches %s can use this server: set --api-key", server.host)
    key = " -H 'Authorization: Bearer YOUR-KEY'" if server.api_key else ""
    print(
        f"\nServing {name} on {url} (documentation: {url}/docs). Try:\n\n"
        f"  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' \\\n"
        f'    -d \'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}\'\n',
        file=sys.stderr,
        flush=True,
    )
