"""A thousand streams of which a hundred are not read: the others get all they asked for, and in the end so do these."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.bench.client import raise_file_limit
from tests.integration.test_serve import Server, start

NUM_STREAMS, NUM_SLOW = 1000, 100
FAST_TOKENS, SLOW_TOKENS = 32, 1000


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    limit = raise_file_limit(NUM_STREAMS + 200)
    if limit is not None and limit < NUM_STREAMS + 200:
        pytest.skip(f"only {limit} files may be open")
    settings = ("--max-num-seqs", "1024", "--max-num-batched-tokens", "4096", "--log-level", "warning")
    running = start(tmp_path / "log", "--device", "sim", "--kv-cache-memory", "12", *settings)
    yield running
    running.process.terminate()
    assert running.process.wait(60) == 0


class Reader:
    """One streamed completion over a socket of its own, with a small window so that unread text stays at the server."""

    def __init__(self, port: int, num_tokens: int) -> None:
        self._port = port
        self._num_tokens = num_tokens
        self._sock = socket.socket()
        self._sock.setblocking(False)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._data = bytearray()

    async def ask(self) -> None:
        fields = {"prompt": "stones", "max_tokens": self._num_tokens, "stream": True, "ignore_eos": True}
        body = json.dumps({**fields, "stream_options": {"include_usage": True}}).encode()
        head = f"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self._sock, ("127.0.0.1", self._port))
        await loop.sock_sendall(self._sock, head.encode() + body)

    async def first_byte(self) -> None:
        """The stream has begun."""
        self._data += await asyncio.get_running_loop().sock_recv(self._sock, 1)
        assert self._data == b"H"

    async def rest(self) -> None:
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(self._sock, 2**16):
            self._data += data
        self._sock.close()

    def answer(self) -> tuple[str, int, int]:
        """Text, tokens by the server's count, chunks with text."""
        lines = bytes(self._data).split(b"\n")
        assert b"data: [DONE]" in lines
        chunks = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
        texts = [c["choices"][0]["text"] for c in chunks if c["choices"] and c["choices"][0]["text"]]
        return "".join(texts), chunks[-1]["usage"]["completion_tokens"], len(texts)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


async def test_readers_that_do_not_read_cost_nobody_a_token(server: Server) -> None:
    port = int(server.url.rpartition(":")[2])
    alone = [Reader(port, FAST_TOKENS), Reader(port, SLOW_TOKENS)]
    for reader in alone:
        await reader.ask()
        await reader.rest()
    fast_text, slow_text = (reader.answer()[0] for reader in alone)
    before = resident_bytes(server.process.pid)

    slow = [Reader(port, SLOW_TOKENS) for _ in range(NUM_SLOW)]
    await asyncio.gather(*(reader.ask() for reader in slow))
    await asyncio.gather(*(reader.first_byte() for reader in slow))
    fast = [Reader(port, FAST_TOKENS) for _ in range(NUM_STREAMS - NUM_SLOW)]
    await asyncio.gather(*(reader.ask() for reader in fast))
    await asyncio.gather(*(reader.rest() for reader in fast))
    # while nobody has read more than a byte of the slow ones
    assert {reader.answer()[:2] for reader in fast} == {(fast_text, FAST_TOKENS)}
    assert all(len(reader._data) == 1 for reader in slow)
    # at most 64 KiB in a socket's queue and a few kilobytes of text in a slot, for each
    assert resident_bytes(server.process.pid) - before < 150 * 2**20

    await asyncio.gather(*(reader.rest() for reader in slow))
    found = [reader.answer() for reader in slow]
    assert {answer[:2] for answer in found} == {(slow_text, SLOW_TOKENS)}
    # what they did not read in time came in fewer, larger chunks
    assert max(num_chunks for _, _, num_chunks in found) < SLOW_TOKENS / 2
