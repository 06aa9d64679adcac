"""The HTTP side: one cheap streaming client for any OpenAI-compatible server.

The client must not be what limits the run. Bodies are encoded before the clock starts, chunks are decoded by
msgspec into the few fields that are needed, and what can wait (joining text, statistics) waits until the end.
"""

from __future__ import annotations

import time
from typing import Any

import aiohttp
import msgspec

from millstream.bench.metrics import RequestRecord
from millstream.errors import MillstreamError

try:
    import resource
except ImportError:  # Windows has no such limit
    resource = None  # type: ignore[assignment]

READ_BUFFER_BYTES = 8 * 2**20
"""aiohttp stops reading at 64 KiB by default, which shows as stalls that the server never had."""
MAX_ERROR_LEN = 500


class BenchmarkError(MillstreamError):
    """The benchmark can't be run: the server can't be reached, or can't do what the run needs."""


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Output(msgspec.Struct):
    """A chat choice's `delta` or `message`."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    delta: _Output | None = None
    message: _Output | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Chunk)


def _text_of(choice: _Choice) -> str | None:
    """The output in a choice; None if it brings none (the opening role, the closing finish_reason)."""
    if choice.text is not None:
        return choice.text if choice.text or choice.finish_reason is None else None
    output = choice.delta or choice.message
    if output is None:
        return None
    parts = [output.reasoning_content or output.reasoning or "", output.content or ""]
    if output.tool_calls:
        parts.append(msgspec.json.encode(output.tool_calls).decode())
    text = "".join(parts)
    if text:
        return text
    # A token may decode to nothing visible: an empty content is output unless the chunk is there for something else.
    is_token = output.content == "" and output.role is None and choice.finish_reason is None
    return "" if is_token else None


def error_text(error: Any) -> str:
    """The message in an OpenAI error object, or the thing itself as text."""
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or error)[:MAX_ERROR_LEN]


def http_error(status: int, body: bytes) -> str:
    """One line for an answer that is not 200."""
    try:
        found = msgspec.json.decode(body)
        detail = error_text(found.get("error", found)) if isinstance(found, dict) else str(found)
    except msgspec.DecodeError:
        detail = body.decode(errors="replace").strip()
    return f"HTTP {status}: {detail[:MAX_ERROR_LEN] or 'no text'}"


def open_session(api_key: str | None = None) -> aiohttp.ClientSession:
    """A session without a limit of connections, each used once: a server that closes idle ones can't fail a request."""
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True, ttl_dns_cache=3600),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=120),
        read_bufsize=READ_BUFFER_BYTES,
        headers=headers,
    )


def raise_file_limit(wanted: int) -> int | None:
    """Raise this process's limit of open files towards `wanted`; returns what it is now (None: no limit known)."""
    if resource is None:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


async def first_model(session: aiohttp.ClientSession, base_url: str, *, model: str | None) -> str:
    """`model`, or the first of the server's. Raises BenchmarkError if the server can't be reached or names none."""
    url = base_url + "/v1/models"
    try:
        async with session.get(url) as response:
            body = await response.read()
            status = response.status
    except (aiohttp.ClientError, OSError) as e:
        raise BenchmarkError(f"--base-url {base_url}: the server can't be reached: {e}") from e
    if status in (401, 403):
        raise BenchmarkError(f"{url} answered {http_error(status, body)} (is --api-key right?)")
    if model is not None:
        return model
    try:
        return str(msgspec.json.decode(body)["data"][0]["id"])
    except (msgspec.DecodeError, KeyError, IndexError, TypeError) as e:
        raise BenchmarkError(f"{url} names no model (HTTP {status}): give --model") from e


class CompletionClient:
    """Posts requests to one URL and fills their records."""

    def __init__(self, session: aiohttp.ClientSession, url: str, *, stream: bool = True) -> None:
        self._session = session
        self._url = url
        self._stream = stream

    async def send(self, body: bytes, record: RequestRecord) -> None:
        """Post `body` and read the answer to its end. Never raises for what the server does: see `record.error`."""
        record.start = time.perf_counter()
        try:
            async with self._session.post(self._url, data=body) as response:
                if response.status != 200:
                    record.error = http_error(response.status, await response.read())
                elif self._stream:
                    await self._read_stream(response, record)
                else:
                    await self._read_whole(response, record)
        except (aiohttp.ClientError, OSError, TimeoutError) as e:
            record.error = f"{type(e).__name__}: {e}"[:MAX_ERROR_LEN]
        except (msgspec.MsgspecError, ValueError) as e:
            record.error = f"the server sent what is not a completion: {e}"[:MAX_ERROR_LEN]
        if record.error is not None or record.end == 0.0:
            record.end = time.perf_counter()
        if not record.has_usage:
            record.output_len = len(record.chunk_times)

    async def _read_stream(self, response: aiohttp.ClientResponse, record: RequestRecord) -> None:
        rest = b""
        is_done = False
        async for data in response.content.iter_any():
            now = time.perf_counter()
            lines = (rest + data).split(b"\n") if rest else data.split(b"\n")
            rest = lines.pop()
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                payload = line[5:].strip()
                if payload == b"[DONE]":
                    is_done = True
                elif payload:
                    self._take(_decoder.decode(payload), record, now)
        if record.error is None and not is_done and record.finish_reason is None:
            record.error = "the stream ended before the answer did"
        if record.end == 0.0:
            record.end = time.perf_counter()

    async def _read_whole(self, response: aiohttp.ClientResponse, record: RequestRecord) -> None:
        body = await response.read()
        now = time.perf_counter()
        self._take(_decoder.decode(body), record, now)
        record.end = now

    def _take(self, chunk: _Chunk, record: RequestRecord, now: float) -> None:
        """Add what a chunk (or a whole answer) brings to the record."""
        if chunk.error:
            record.error = error_text(chunk.error)
            return
        text: str | None = None
        for choice in chunk.choices or ():
            part = _text_of(choice)
            if part is not None:
                text = part if text is None else text + part
            if choice.finish_reason is not None:
                record.finish_reason = choice.finish_reason
        usage = chunk.usage
        if text is not None:
            record.chunk_times.append(now)
            record.chunk_texts.append(text)
            record.end = now
            if usage is not None and usage.completion_tokens is not None:
                record.chunk_totals.append(usage.completion_tokens)
        if usage is not None and usage.completion_tokens is not None:
            record.output_len = usage.completion_tokens
            record.has_usage = True
            if usage.prompt_tokens is not None:
                record.prompt_len = usage.prompt_tokens
