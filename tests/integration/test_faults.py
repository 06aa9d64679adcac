"""`millstream serve --pipeline-parallel-size 2` when a stage dies or hangs: everybody is told, nothing stays."""

from __future__ import annotations

import os
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.test_serve import QUESTION, Server, is_alive, run_cli, start

PIPELINE = ("--pipeline-parallel-size", "2", "--max-num-batched-tokens", "64")
EXIT_LIMIT = 60
CLIENT_MESSAGE = "the engine has ended and can't answer"


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Pipeline:
    """A server of two stages."""

    def __init__(self, server: Server) -> None:
        self.server = server
        (self.engine,) = server.children()
        self.stages = sorted(children_of(self.engine))
        assert len(self.stages) == 2
        self.client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60)

    def stream(self) -> Any:
        """The rest of a long streamed answer that has begun."""
        stream = self.client.chat.completions.create(
            model="smollm2",
            messages=QUESTION,  # type: ignore[arg-type]
            max_tokens=4000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        chunks = iter(stream)
        for _ in range(3):
            next(chunks)
        return chunks

    def complete(self) -> None:
        self.client.completions.create(model="smollm2", prompt="Once", max_tokens=4000, extra_body={"ignore_eos": True})

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.server.url + "/ready") as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError):  # 503, or nobody listens any more
            return False

    def assert_gone(self, folder: Path) -> None:
        deadline = time.monotonic() + EXIT_LIMIT
        while any(map(is_alive, [self.engine, *self.stages])) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(is_alive, [self.engine, *self.stages]))
        assert list(folder.glob("millstream-*")) == []


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where servers put their temporary files."""
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setenv("TMPDIR", str(path))
    shared = set(os.listdir("/dev/shm"))
    yield path
    assert set(os.listdir("/dev/shm")) == shared


@pytest.mark.parametrize(
    ("number", "rank", "args", "message"),
    [
        (signal.SIGKILL, 1, (), r"Stage 1 \(layers 15 to 29\) has ended \(signal 9\)"),
        (signal.SIGTERM, 0, (), r"Stage 0 \(layers 0 to 14\) has ended \(signal 15\)"),
        (signal.SIGSTOP, 1, ("--watchdog-timeout", "4"), r"Stage 1 \(layers 15 to 29\) hangs: no answer for 4 s"),
    ],
    ids=["killed", "terminated", "stopped"],
)
def test_a_lost_stage_ends_the_server(
    tmp_path: Path, folder: Path, number: int, rank: int, args: tuple[str, ...], message: str
) -> None:
    pipeline = Pipeline(start(tmp_path / "log", *PIPELINE, *args))
    assert pipeline.is_ready()
    stream = pipeline.stream()
    with ThreadPoolExecutor(1) as pool:
        unstreamed = pool.submit(pipeline.complete)
        next(stream)
        while pipeline.server.log.count("prompt tokens added") < 2:
            next(stream)
        os.kill(pipeline.stages[rank], number)
        with pytest.raises(openai.APIError, match=CLIENT_MESSAGE):
            list(stream)
        assert not pipeline.is_ready()
        with pytest.raises(openai.APIStatusError, match=CLIENT_MESSAGE) as refused:
            unstreamed.result()
        assert refused.value.status_code == 503
    assert pipeline.server.process.wait(EXIT_LIMIT) == 1
    log = pipeline.server.log
    assert re.search(message, log)
    if number == signal.SIGSTOP:
        assert re.search(r"most recent call first.*worker/process\.py\", line \d+ in run_stage", log, re.DOTALL)
    pipeline.assert_gone(folder)


def test_a_stage_that_dies_while_nothing_runs(tmp_path: Path, folder: Path) -> None:
    pipeline = Pipeline(start(tmp_path / "log", *PIPELINE))
    os.kill(pipeline.stages[0], signal.SIGKILL)
    assert pipeline.server.process.wait(EXIT_LIMIT) == 1
    assert "Stage 0 (layers 0 to 14) has ended (signal 9)" in pipeline.server.log
    pipeline.assert_gone(folder)


@pytest.mark.parametrize("victim", ["engine", "server"])
def test_stages_end_with_their_parents(tmp_path: Path, folder: Path, victim: str) -> None:
    pipeline = Pipeline(start(tmp_path / "log", *PIPELINE))
    pipeline.stream()
    os.kill(pipeline.engine if victim == "engine" else pipeline.server.process.pid, signal.SIGKILL)
    assert pipeline.server.process.wait(EXIT_LIMIT) == (1 if victim == "engine" else -signal.SIGKILL)
    pipeline.assert_gone(folder)


def test_two_servers_at_once_answer_alike_and_end_cleanly(tmp_path: Path, folder: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        servers = list(pool.map(lambda i: start(tmp_path / f"log{i}", *PIPELINE), range(2)))
    pipelines = [Pipeline(server) for server in servers]
    answers = set()
    for pipeline in pipelines:
        found = pipeline.client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0)  # type: ignore[arg-type]
        answers.add(found.choices[0].message.content)
    assert len(answers) == 1 and "Paris" in str(answers)
    for pipeline, number in zip(pipelines, (signal.SIGINT, signal.SIGTERM), strict=True):
        pipeline.server.process.send_signal(number)
    for pipeline in pipelines:
        assert pipeline.server.process.wait(60) == 0
        assert "Traceback" not in pipeline.server.log
        pipeline.assert_gone(folder)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ("--pipeline-parallel-size", "2", "--pipeline-layer-split", "20,11"),
            "--pipeline-layer-split is 20,11, 31 layers: this model has 30",
        ),
        (
            ("--pipeline-parallel-size", "2", "--kv-cache-memory", "0.01", "--max-model-len", "4096"),
            "Set --kv-cache-memory to",
        ),
    ],
)
def test_a_start_that_fails_says_why(folder: Path, args: tuple[str, ...], message: str) -> None:
    failed = run_cli("serve", "--port", "0", *args)
    assert failed.returncode == 2
    assert message in failed.stderr
    assert "Traceback" not in failed.stderr
    assert list(folder.glob("millstream-*")) == []
