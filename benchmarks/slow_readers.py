"""What readers that do not keep up cost the others: their inter-token latency with and without them.

    python benchmarks/slow_readers.py --streams 256 --slow 64 --tokens 200 --step-ms 20

Starts `millstream serve --device sim` with steps of a fixed time and loads it three times: with `--streams` readers
that read what comes, with `--slow` more of these, and with `--slow` that read one byte a second in their place. Prints
mean and P99 of the gaps between chunks of those that keep up, and the ratios to the first load. The client is this
process, so its own time is in the gaps.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from millstream.bench.client import raise_file_limit
from millstream.sim.hardware import load_hardware


@contextlib.contextmanager
def serving(step_ms: float, extra: Sequence[str]) -> Iterator[int]:
    """A server whose steps take `step_ms`; its port."""
    with tempfile.TemporaryDirectory() as folder:
        profile = msgspec.to_builtins(load_hardware("instant")) | {"name": "steps", "step_us": step_ms * 1000}
        path = Path(folder, "steps.json")
        path.write_text(json.dumps(profile))
        command = [sys.executable, "-m", "millstream.cli", "serve", "--port", "0", "--device", "sim"]
        settings = ["--hardware", str(path), "--kv-cache-memory", "16", "--max-num-seqs", "2048"]
        with Path(folder, "log").open("w+") as log:
            process = subprocess.Popen([*command, *settings, "--log-level", "warning", *extra], stderr=log)
            try:
                while not (found := re.search(r"Serving \S+ on http://\S+:(\d+) ", Path(log.name).read_text())):
                    if process.poll() is not None:
                        raise SystemExit(Path(log.name).read_text())
                    time.sleep(0.1)
                yield int(found[1])
            finally:
                process.terminate()
                process.wait()


async def ask(port: int, num_tokens: int, *, window: int | None = None) -> socket.socket:
    """A socket on which a stream of so many tokens has been asked for; `window` bounds what the kernel holds."""
    sock = socket.socket()
    sock.setblocking(False)
    if window is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    fields = {"prompt": "stones", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", port))
    await loop.sock_sendall(sock, head.encode() + body)
    return sock


async def read(port: int, num_tokens: int) -> list[float]:
    """Read a stream to its end; the gaps between its chunks, in ms."""
    sock = await ask(port, num_tokens)
    loop, times = asyncio.get_running_loop(), []
    while data := await loop.sock_recv(sock, 2**16):
        times += [time.perf_counter()] * data.count(b'"text":')
    sock.close()
    return [1000 * (later - earlier) for earlier, later in itertools.pairwise(times)]


async def crawl(port: int, num_tokens: int) -> None:
    """Read a stream at one byte a second, until cancelled."""
    sock = await ask(port, num_tokens, window=4096)
    try:
        while await asyncio.get_running_loop().sock_recv(sock, 1):
            await asyncio.sleep(1)
    finally:
        sock.close()


async def measure(port: int, streams: int, slow: int, num_tokens: int) -> tuple[float, float]:
    """Mean and P99 of the gaps of `streams` readers, in ms."""
    crawling = [asyncio.create_task(crawl(port, 2 * num_tokens)) for _ in range(slow)]
    await asyncio.sleep(1 if slow else 0)
    gaps = np.concatenate(await asyncio.gather(*(read(port, num_tokens) for _ in range(streams))))
    for task in crawling:
        task.cancel()
    await asyncio.gather(*crawling, return_exceptions=True)
    return float(gaps.mean()), float(np.percentile(gaps, 99))


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256, help="readers that keep up (default: %(default)s)")
    parser.add_argument("--slow", type=int, default=64, help="readers of one byte a second (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=200, help="of each stream (default: %(default)s)")
    parser.add_argument("--step-ms", type=float, default=20.0, help="time of a step (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="(default: %(default)s)")
    args, extra = parser.parse_known_args()
    raise_file_limit(args.streams + args.slow + 100)
    with serving(args.step_ms, extra) as port:
        await measure(port, args.streams, 0, 10)
        print(f"{'':28}{'ITL mean, ms':>14}{'P99, ms':>10}{'ratios':>18}")
        for _ in range(args.rounds):
            alone = await measure(port, args.streams, 0, args.tokens)
            more = await measure(port, args.streams + args.slow, 0, args.tokens)
            beside = await measure(port, args.streams, args.slow, args.tokens)
            loads = (("", alone), (f" and {args.slow} more", more), (f" and {args.slow} slow", beside))
            for name, (mean, p99) in loads:
                ratios = f"{mean / alone[0]:9.3f}{p99 / alone[1]:9.3f}"
                print(f"{f'{args.streams} streams' + name:28}{mean:14.2f}{p99:10.2f}{ratios}")


if __name__ == "__main__":
    asyncio.run(main())
