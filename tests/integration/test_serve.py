"""`millstream serve` as a user meets it: a process, a port, signals, the official client."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

ROOT = Path(__file__).parents[2]
START_LIMIT = 120


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str
    log_path: Path

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def children(self) -> list[int]:
        text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in text.split()]


def start(log_path: Path, *args: str) -> Server:
    command = [sys.executable, "-m", "millstream.cli", "serve", "--port", "0", "--kv-cache-memory", "0.25", *args]
    with log_path.open("w") as log:
        process = subprocess.Popen(command, stderr=log, text=True)
    deadline = time.monotonic() + START_LIMIT
    while time.monotonic() < deadline:
        found = re.search(r"Serving \S+ on (http://\S+) ", log_path.read_text())
        if found:
            return Server(process, found[1], log_path)
        assert process.poll() is None, log_path.read_text()
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"not ready in {START_LIMIT} s: {log_path.read_text()}")


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = start(tmp_path_factory.mktemp("serve") / "log", "--max-num-batched-tokens", "256", "--dtype", "float32")
    yield running
    running.process.terminate()
    assert running.process.wait(60) == 0


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def test_the_default_model_knows_paris(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0)  # type: ignore[arg-type]
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    # the rendered template begins with <|im_start|> and has no second begin-of-text
    assert answer.usage.prompt_tokens == 37


@pytest.mark.parametrize(
    "text", ["Repeat: 🙂🙃🎉👩‍👩‍👧 日本語 e\u0301 ñ नमस्ते", "Write three emoji and their Chinese names."]
)
def test_streamed_text_joined_is_the_whole_text(client: openai.OpenAI, text: str) -> None:
    body = {"model": "smollm2", "messages": [{"role": "user", "content": text}], "seed": 3, "max_tokens": 60}
    whole = client.chat.completions.create(**body)  # type: ignore[call-overload]
    streamed = client.chat.completions.create(**body, stream=True)  # type: ignore[call-overload]
    pieces = [c.choices[0].delta.content or "" for c in streamed if c.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len(pieces) > 5


async def test_many_at_once_answer_as_alone(server: Server) -> None:
    client = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)

    async def ask(i: int) -> str:
        stream = await client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": f"Tell me about the number {i % 4}."}],
            seed=i % 4,
            max_tokens=24,
            stream=True,
        )
        return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

    together = await asyncio.gather(*(ask(i) for i in range(12)))
    assert together[:4] == together[4:8] == together[8:]
    assert len(set(together)) == 4
    await client.close()


def test_logprobs_of_a_scored_prompt(client: openai.OpenAI) -> None:
    """Echo: the log-probabilities of a prompt add up to what greedy decoding said of the same text."""
    answer = client.completions.create(
        model="smollm2", prompt="The capital of France is", max_tokens=5, temperature=0, logprobs=1
    )
    said = answer.choices[0].logprobs
    assert said is not None and said.token_logprobs is not None
    echoed = client.completions.create(
        model="smollm2",
        prompt="The capital of France is" + answer.choices[0].text,
        max_tokens=0,
        echo=True,
        logprobs=1,
    )
    scored = echoed.choices[0].logprobs
    assert scored is not None and scored.token_logprobs is not None
    assert scored.token_logprobs[0] is None
    assert scored.token_logprobs[-5:] == pytest.approx(said.token_logprobs, abs=0.05)


def test_metrics_and_bad_requests(server: Server, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="smollm2", messages=QUESTION, max_tokens=9000)  # type: ignore[arg-type]
    assert caught.value.code == "context_length_exceeded"
    assert "9037 in all" in str(caught.value)
    text = urllib.request.urlopen(server.url + "/metrics").read().decode()
    assert 'millstream:num_requests_running{model_name="smollm2"} 0.0' in text
    assert "millstream:step_batch_size_count" in text


def test_a_client_that_leaves_is_aborted(server: Server, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Count."}],
        max_tokens=4000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    stream.close()
    for _ in range(1200):
        if re.search(r"finished \(abort\)", server.log):
            break
        time.sleep(0.05)
    assert re.search(r"finished \(abort\): \d{1,3} tokens", server.log)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything(tmp_path: Path, number: int) -> None:
    running = start(tmp_path / "log")
    children = running.children()
    assert len(children) == 1
    running.process.send_signal(number)
    assert running.process.wait(60) == 0
    assert not any(is_alive(pid) for pid in children)
    assert "Traceback" not in running.log


def test_a_dead_engine_ends_the_server(tmp_path: Path) -> None:
    running = start(tmp_path / "log")
    os.kill(running.children()[0], signal.SIGKILL)
    assert running.process.wait(60) == 1
    assert "The engine process has ended (signal 9)" in running.log


def test_the_engine_ends_with_its_parent(tmp_path: Path) -> None:
    running = start(tmp_path / "log")
    children = running.children()
    running.process.kill()
    running.process.wait(60)
    for _ in range(1200):
        if not any(is_alive(pid) for pid in children):
            break
        time.sleep(0.05)
    assert not any(is_alive(pid) for pid in children)


def run_cli(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "millstream.cli", *args], capture_output=True, text=True, timeout=120, check=False
    )


def test_a_start_that_fails_says_why(server: Server) -> None:
    port = server.url.rsplit(":", 1)[1]
    taken = run_cli("serve", "--port", port)
    assert taken.returncode == 2
    assert f"--port is {port}" in taken.stderr
    too_long = run_cli("serve", "--port", "0", "--max-model-len", "9000")
    assert too_long.returncode == 2
    assert "--max-model-len is 9000: this model's context holds 8192" in too_long.stderr
    too_small = run_cli("serve", "--port", "0", "--kv-cache-memory", "0.01", "--max-model-len", "4096")
    assert too_small.returncode == 2
    assert "Set --kv-cache-memory to" in too_small.stderr
    missing = run_cli("serve", "no-such-model")
    assert missing.returncode == 2
    assert "there is no model 'no-such-model'" in missing.stderr
    for failed in (taken, too_long, too_small, missing):
        assert "Traceback" not in failed.stderr


def test_check_shows_the_plan() -> None:
    found = run_cli("check", "smollm2", "--kv-cache-memory", "1")
    assert found.returncode == 0
    assert "134.5 M" in found.stdout
    assert "0.30 GiB in bfloat16" in found.stdout
    # 1 GiB / (30 layers * 2 * 3 heads * 64 * 2 bytes * 32 tokens) = 1456 blocks
    assert "46,592 tokens in 1,456 blocks of 32" in found.stdout
    assert re.search(r"8 │\s+5,824", found.stdout)
    assert re.search(r"Chat template\s+found", found.stdout)
    assert re.search(r"Kernels\s+(native, \w+|torch: \w+)", found.stdout)
