"""Several API processes on one port: who gets which connection, what they tell together, and how they end."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millstream.sim.hardware import load_hardware
from tests.integration.test_serve import Server, is_alive, start

SETTINGS = ("--device", "sim", "--api-processes", "2")
WAIT_SECONDS = 60


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = start(tmp_path_factory.mktemp("api") / "log", *SETTINGS, "--enable-debug")
    yield running
    running.process.terminate()
    assert running.process.wait(WAIT_SECONDS) == 0
    assert "Traceback" not in running.log


class Connection(http.client.HTTPConnection):
    """One to the server, kept open."""

    def __init__(self, server: Server) -> None:
        super().__init__("127.0.0.1", int(server.url.rpartition(":")[2]), timeout=WAIT_SECONDS)
        self._server = server
        self.connect()

    def ask(self, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        self.request(method, path, body and json.dumps(body), {"content-type": "application/json"})
        return self.getresponse()

    def complete(self, **fields: Any) -> http.client.HTTPResponse:
        return self.ask("POST", "/v1/completions", {"prompt": "stones", "ignore_eos": True, **fields})

    @property
    def pid(self) -> int:
        """The process at the other end; it must have answered by now."""
        mine, theirs = (f"0100007F:{port:04X}" for port in (self.sock.getsockname()[1], self.port))
        lines = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
        (inode,) = (fields[9] for fields in lines if fields[1:3] == [theirs, mine])
        (pid,) = (pid for pid in self._server.children() if f"socket:[{inode}]" in open_files(pid))
        return pid


def open_files(pid: int) -> set[str]:
    return {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def figures(connection: Connection) -> dict[str, float]:
    """/metrics by name and labels, without the model's name."""
    text = connection.ask("GET", "/metrics").read().decode()
    found = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {re.sub(r',?model_name="\w+",?', "", name): float(value) for name, value in found}


def two(server: Server) -> tuple[Connection, Connection]:
    """Connections to different processes."""
    pair = Connection(server), Connection(server)
    for connection in pair:
        assert connection.ask("GET", "/ready").read() == b'{"status":"ready"}'
    assert pair[0].pid != pair[1].pid
    return pair


def test_connections_are_spread_evenly(server: Server) -> None:
    connections = [Connection(server) for _ in range(20)]
    for connection in connections:
        assert connection.ask("GET", "/health").read() == b'{"status":"ok"}'
    assert sorted(Counter(c.pid for c in connections).values()) == [10, 10]


def test_figures_are_those_of_all_processes(server: Server) -> None:
    one, other = two(server)
    before = figures(one)
    for connection, num_tokens in ((one, 5), (other, 7), (other, 3)):
        assert json.load(connection.complete(max_tokens=num_tokens))["usage"]["completion_tokens"] == num_tokens
    after = figures(one)

    def grown(name: str) -> float:
        return after[name] - before[name]

    assert grown("millstream:generation_tokens_total{}") == 15
    assert grown('millstream:request_success_total{finished_reason="length"}') == 3
    assert grown("millstream:time_to_first_token_seconds_count{}") == 3
    assert grown('millstream:time_to_first_token_seconds_bucket{le="+Inf"}') == 3
    assert after["millstream:num_requests_running{}"] == 0
    assert figures(other) == after


def test_a_trace_is_everybodys(server: Server) -> None:
    one, other = two(server)
    path = json.load(one.ask("POST", "/debug/trace/start"))["file"]
    until(lambda: other.ask("POST", "/debug/trace/start").read().find(path.encode()) > 0)
    one.complete(max_tokens=3).read()
    assert json.load(other.ask("POST", "/debug/trace/stop")) == {"file": path}
    until(lambda: Path(path).read_text().endswith("]\n"))
    events = json.loads(Path(path).read_text())
    assert any(event["ph"] == "X" for event in events)
    Path(path).unlink()


def start_slow(folder: Path) -> Server:
    """One whose streams are under way for seconds."""
    profile = msgspec.to_builtins(load_hardware("instant")) | {"name": "slow", "step_us": 5000.0}
    (folder / "slow.json").write_text(json.dumps(profile))
    return start(folder / "log", *SETTINGS, "--hardware", str(folder / "slow.json"))


def test_a_process_that_dies_takes_only_its_own_requests_along(tmp_path: Path) -> None:
    server = start_slow(tmp_path)
    try:
        cut, whole = two(server)
        cut_stream = cut.complete(max_tokens=5000, stream=True)
        whole_stream = whole.complete(max_tokens=300, stream=True, stream_options={"include_usage": True})
        assert cut_stream.readline().startswith(b"data: ")
        assert whole_stream.readline().startswith(b"data: ")
        dead = cut.pid
        os.kill(dead, signal.SIGKILL)
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            cut_stream.read()
        rest = whole_stream.read()
        assert rest.endswith(b"data: [DONE]\n\n")
        assert b'"completion_tokens":300' in rest
        # the engine has heard of it, and the place is filled
        until(lambda: "finished (abort)" in server.log)
        assert re.search(r"API process \d has ended \(signal 9\)", server.log)
        until(lambda: len(server.children()) == 3 and dead not in server.children())

        def is_spread() -> bool:
            connections = [Connection(server) for _ in range(2)]
            assert all(c.complete(max_tokens=2).read() for c in connections)
            return len({c.pid for c in connections}) == 2

        until(is_spread)
    finally:
        server.process.terminate()
        assert server.process.wait(WAIT_SECONDS) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    server = start(tmp_path / "log", *SETTINGS)
    children = server.children()
    assert len(children) == 3
    server.process.send_signal(number)
    assert server.process.wait(WAIT_SECONDS) == 0
    assert not any(is_alive(pid) for pid in children)
    assert [path.name for path in tmp_path.iterdir()] == ["log"]
    assert "Traceback" not in server.log


def test_a_dead_engine_ends_all_with_an_error_event(tmp_path: Path) -> None:
    server = start_slow(tmp_path)
    children = server.children()
    connection, _ = two(server)
    stream = connection.complete(max_tokens=5000, stream=True)
    assert stream.readline().startswith(b"data: ")
    (engine,) = (pid for pid in children if b"sim.process" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(engine, signal.SIGKILL)
    assert b'"code":"engine_dead"' in stream.read()
    assert server.process.wait(WAIT_SECONDS) == 1
    assert "The engine process has ended (signal 9)" in server.log
    assert not any(is_alive(pid) for pid in children)


def test_all_end_with_the_supervisor(tmp_path: Path) -> None:
    server = start(tmp_path / "log", *SETTINGS)
    children = server.children()
    server.process.kill()
    server.process.wait(WAIT_SECONDS)
    until(lambda: not any(is_alive(pid) for pid in children))


def test_a_process_that_cannot_start_ends_the_server(tmp_path: Path) -> None:
    (tmp_path / "bad.jinja").write_text("{% if %}")
    with pytest.raises(AssertionError, match=r"API process \d has ended before it was ready"):
        start(tmp_path / "log", *SETTINGS, "--chat-template", str(tmp_path / "bad.jinja"))
