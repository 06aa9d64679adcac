"""`millstream bench serve` from flags to table and file, against a small server in a thread."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from millstream.bench import serve
from millstream.bench.options import from_args
from millstream.errors import ConfigError


class FakeServer:
    """Answers in the chunks of `script`, each (text, tokens); `fail` names what goes wrong for every third request."""

    def __init__(self) -> None:
        self.script = [("one ", 1), ("two ", 1), ("three", 1)]
        self.fail: str | None = None
        self.piece_len: int | None = None
        self.has_tokenize = True
        self.api_key: str | None = None
        self.bodies: list[dict[str, Any]] = []
        self.num_open = 0
        self.max_open = 0
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> FakeServer:
        self._thread.start()
        assert self._started.wait(60)
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_post("/v1/chat/completions", self.complete)
        app.router.add_post("/garbage", self.garbage)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def models(self, request: web.Request) -> web.Response:
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": {"message": "wrong key"}}, status=401)
        return web.json_response({"data": [{"id": "mill-1"}, {"id": "mill-2"}]})

    async def tokenize(self, request: web.Request) -> web.Response:
        if not self.has_tokenize:
            return web.json_response({"detail": "Not Found"}, status=404)
        words = (await request.json())["prompt"].split()
        return web.json_response({"tokens": [1] + [100 + len(w) for w in words], "count": len(words) + 1})

    async def garbage(self, request: web.Request) -> web.Response:
        return web.Response(body=b"data: {oops\n\ndata: [DONE]\n\n")

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        fails = self.fail if len(self.bodies) % 3 == 0 else None
        if fails == "busy":
            return web.json_response(
                {"error": {"message": "the queue is full", "type": "overloaded_error"}}, status=429
            )
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        try:
            return await self._answer(request, body, fails)
        finally:
            self.num_open -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any], fails: str | None) -> web.StreamResponse:
        is_chat = request.path.endswith("chat/completions")
        usage = {"prompt_tokens": 7, "completion_tokens": sum(n for _, n in self.script)}
        if not body.get("stream"):
            text = "".join(t for t, _ in self.script)
            choice = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
            return web.json_response({"choices": [{**choice, "finish_reason": "length"}], "usage": usage})
        name = f"cmpl-{len(self.bodies)}"
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(data: Any) -> None:
            event = b"data: " + (data if isinstance(data, bytes) else json.dumps(data, ensure_ascii=False).encode())
            event += b"\r\n\r\n" if self.piece_len else b"\n\n"
            step = self.piece_len or len(event)
            for i in range(0, len(event), step):
                await response.write(event[i : i + step])
                await asyncio.sleep(0)

        if is_chat:
            await send({"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": None})
        await response.write(b": ping\n\n")
        for i, (text, _) in enumerate(self.script):
            if i == 1 and fails == "error":
                await send({"error": {"message": "the engine died"}})
                return response
            if i == 1 and fails == "cut":
                return response
            await send({"id": name, "choices": [{"delta": {"content": text}} if is_chat else {"text": text}]})
        end: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
        await send({"choices": [{**end, "finish_reason": "length"}]})
        if body.get("stream_options", {}).get("include_usage"):
            await send({"id": name, "choices": [], "usage": usage})
        await send(b"[DONE]")
        return response


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as fake:
        yield fake


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args(list(flags))


def run(server: FakeServer, *flags: str) -> int:
    return serve.run(parse("--base-url", server.url, "--no-progress", *flags))


def saved(tmp_path: Path, *flags: str) -> list[str]:
    return ["--save-result", "--result-dir", str(tmp_path / "new"), "--result-filename", "r.json", *flags]


def load(tmp_path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((tmp_path / "new" / "r.json").read_bytes())
    return result


def value(out: str, label: str) -> str:
    return next(line for line in out.splitlines() if line.startswith(label + ":")).rsplit(" ", 1)[0].split()[-1]


def test_random_prompts_go_to_completions(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-prompts", "6", "--random-input-len", "20", "--random-output-len", "3", "--ignore-eos"]
    assert run(server, *flags, "--extra-body", '{"top_k": 5, "stream_options": null}') == 0
    out = capsys.readouterr().out
    assert value(out, "Successful requests") == "6"
    assert len(server.bodies) == 6
    body = server.bodies[0]
    prompt = body.pop("prompt")
    assert len(prompt.split()) == 19  # and the tokenizer's own token in front
    assert body == {
        "model": "mill-1", "max_tokens": 3, "temperature": 0.0, "stream": True, "ignore_eos": True, "top_k": 5,
    }  # fmt: skip
    # No usage was asked for, so the prompt's length is the dataset's and the answer's the tokenizer's: 3 words + 1.
    assert value(out, "Total input tokens") == "120"
    assert value(out, "Total generated tokens") == "24"
    assert "6 answers came without usage: their tokens are counted by the tokenizer." in out


def test_chat_prompts_with_usage_and_result_file(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.txt").write_text("Hello there.\nHow are you?\n")
    flags = ["--dataset-name", "chat", "--dataset-path", str(tmp_path / "p.txt"), "--num-prompts", "5"]
    flags += ["--model", "mill-2", "--num-warmups", "2", "--max-concurrency", "2", "--metric-percentiles", "50,99.9"]
    flags += [
        "--request-rate",
        "200",
        "--burstiness",
        "2",
        "--goodput",
        "ttft:60000",
        "e2el:60000",
        "--output-len",
        "3",
    ]
    assert run(server, *flags, *saved(tmp_path, "--save-detailed")) == 0
    out = capsys.readouterr().out
    assert (value(out, "Successful requests"), value(out, "Total input tokens")) == ("5", "35")
    assert value(out, "Total generated tokens") == "15"
    assert len(server.bodies) == 7
    assert server.max_open <= 2
    assert server.bodies[0]["messages"][0]["role"] == "user"
    assert {b["model"] for b in server.bodies} == {"mill-2"}
    assert "P99.9 ITL (ms):" in out
    result = load(tmp_path)
    assert (result["completed"], result["failed"], result["request_rate"]) == (5, 0, 200)
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert result["output_throughput"] == pytest.approx(15 / result["duration"])
    assert result["tokens_per_chunk"] == 1.0
    assert {"mean_ttft_ms", "median_tpot_ms", "std_itl_ms", "p99.9_e2el_ms", "p50_ptg_ms"} <= result.keys()
    detail = result["requests"][0]
    assert (detail["text"], detail["input_len"], detail["output_len"]) == ("one two three", 7, 3)
    assert len(detail["itls"]) == 2
    assert detail["finish_reason"] == "length"
    assert detail["ttft"] + sum(detail["itls"]) == pytest.approx(detail["e2el"])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("busy", "HTTP 429: the queue is full"),
        ("error", "the engine died"),
        ("cut", "the stream ended before the answer did"),
    ],
)
def test_failures_are_counted_and_told(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, message: str
) -> None:
    server.fail = kind
    assert run(server, "--num-prompts", "9", "--random-input-len", "8", *saved(tmp_path)) == 1
    out = capsys.readouterr().out
    assert value(out, "Successful requests") == "6"
    assert value(out, "Total generated tokens") == "18"
    assert f"Failed requests: 3\nFirst error: {message}" in out
    result = load(tmp_path)
    assert (result["completed"], result["failed"], result["errors"]) == (6, 3, [message])
    assert "requests" not in result


def test_several_tokens_in_a_chunk(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.script = [("a", 1), ("bbbb", 4), ("cccc", 4)]
    flags = ["--num-prompts", "2", "--random-input-len", "8", "--random-output-len", "9"]
    assert run(server, *flags, *saved(tmp_path, "--save-detailed")) == 0
    result = load(tmp_path)
    assert [r["chunk_tokens"] for r in result["requests"]] == [[1, 4, 4]] * 2
    assert result["tokens_per_chunk"] == 3.0
    assert result["mean_ptg_ms"] == pytest.approx(result["mean_itl_ms"] / 4)
    assert "the tokens of 2 answers are spread over their chunks by characters" in capsys.readouterr().out


def test_events_cut_anywhere_and_tokens_without_text(server: FakeServer, tmp_path: Path) -> None:
    server.script = [("", 1), ("naïve ", 1), ("日本語 🌊", 1)]
    server.piece_len = 3
    flags = ["--num-prompts", "4", "--random-input-len", "8", "--backend", "openai-chat"]
    assert run(server, *flags, *saved(tmp_path, "--save-detailed")) == 0
    for detail in load(tmp_path)["requests"]:
        assert detail["text"] == "naïve 日本語 🌊"
        # The opening role is no token; the token that shows nothing is one.
        assert detail["chunk_tokens"] == [1, 1, 1]


def test_a_stream_that_is_no_json(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(server, "--num-prompts", "1", "--random-input-len", "5", "--endpoint", "/garbage") == 1
    assert "First error: the server sent what is not a completion" in capsys.readouterr().out


def test_without_tokenize_token_ids_are_sent(server: FakeServer) -> None:
    server.has_tokenize = False
    flags = ["--num-prompts", "2", "--random-input-len", "30", "--random-output-len", "3"]
    assert run(server, *flags) == 0
    assert [len(b["prompt"]) for b in server.bodies] == [30, 30]
    assert all(isinstance(i, int) for b in server.bodies for i in b["prompt"])


def test_random_chat_without_tokenize_is_refused(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.has_tokenize = False
    assert run(server, "--num-prompts", "2", "--backend", "openai-chat") == 1
    assert "give --tokenizer" in capsys.readouterr().err
    assert server.bodies == []


def test_whole_answers(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(server, "--no-stream", "--num-prompts", "3", "--random-input-len", "5") == 0
    out = capsys.readouterr().out
    assert value(out, "Total generated tokens") == "9"
    assert "E2EL" in out
    assert "TTFT" not in out
    assert "stream" not in server.bodies[0]


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.run(parse("--base-url", "http://127.0.0.1:1", "--no-progress")) == 1
    assert "--base-url http://127.0.0.1:1: the server can't be reached" in capsys.readouterr().err


def test_api_key(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.api_key = "sesame"
    assert run(server, "--num-prompts", "1") == 1
    assert "HTTP 401: wrong key (is --api-key right?)" in capsys.readouterr().err
    flags = ["--api-key", "sesame", "--num-prompts", "1", "--random-input-len", "5"]
    assert run(server, *flags, *saved(tmp_path, "--save-detailed")) == 0
    assert "sesame" not in (tmp_path / "new" / "r.json").read_text()


def test_a_failed_warm_up_ends_the_run(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.fail = "busy"
    assert run(server, "--num-prompts", "5", "--num-warmups", "3", "--random-input-len", "5") == 1
    assert "a warm-up request failed: HTTP 429" in capsys.readouterr().err
    assert len(server.bodies) == 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dataset-name", "chat"], "--dataset-path is not given"),
        (["--dataset-path", "x"], "--dataset-path is given"),
        (["--no-stream", "--goodput", "ttft:5"], "ttft can't be measured with --no-stream"),
        (["--no-stream", "--percentile-metrics", "itl"], "itl can't be measured with --no-stream"),
        (["--base-url", "localhost:8000"], "--base-url is 'localhost:8000'"),
    ],
)
def test_flags_that_contradict_each_other(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_args(parse(*flags))


@pytest.mark.parametrize(
    "flags",
    [
        ["--request-rate", "0"],
        ["--burstiness", "-1"],
        ["--num-prompts", "0"],
        ["--random-range-ratio", "1"],
        ["--metric-percentiles", "101"],
        ["--percentile-metrics", "speed"],
        ["--goodput", "itl:5"],
        ["--goodput", "ttft"],
        ["--extra-body", "[1]"],
        ["--temperature", "nan"],
    ],
)
def test_bad_values_are_refused_by_name(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse(*flags)
    assert exit_info.value.code == 2
    assert flags[0] in capsys.readouterr().err


def test_defaults_follow_the_dataset() -> None:
    assert from_args(parse()).url == "http://127.0.0.1:8000/v1/completions"
    chat = from_args(parse("--dataset-name", "chat", "--dataset-path", "p.txt", "--base-url", "http://host:1/v1/"))
    assert chat.url == "http://host:1/v1/chat/completions"
    assert chat.percentile_metrics == ("ttft", "tpot", "itl", "e2el")
    assert from_args(parse("--endpoint", "v2/complete")).url == "http://127.0.0.1:8000/v2/complete"


def test_help_tells_the_definitions() -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    text = parser.format_help()
    assert "(E2EL - TTFT) / (output tokens - 1)" in text
    for word in ("TTFT", "ITL", "per-token gap", "E2EL", "goodput", "linear interpolation"):
        assert f"\n  {word}" in text or word in text.split("What is measured")[1]


def example(server: FakeServer, *flags: str) -> subprocess.CompletedProcess[str]:
    script = Path(__file__).parents[2] / "examples" / "benchmark.py"
    command = [sys.executable, str(script), "--base-url", server.url, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_demo_of_sixteen_questions(server: FakeServer) -> None:
    done = example(server, "--max-tokens", "9")
    assert done.returncode == 0, done.stderr
    finished = re.findall(r"^Request (cmpl-\d+) decoding finished in \d+\.\d seconds$", done.stdout, re.MULTILINE)
    assert len(set(finished)) == 16
    assert done.stdout.count("one two three") == 16
    prefill, decode = [line for line in done.stdout.splitlines() if line.startswith("[16 requests]")]
    assert re.fullmatch(r"\[16 requests\] Prefilling: 112 prompt tokens processed in [\d.]+ seconds", prefill)
    assert re.fullmatch(r"\[16 requests\] Decoding: 48 tokens processed in [\d.]+ seconds \(\d+ tokens/s\)", decode)
    questions = [b["messages"][0]["content"] for b in server.bodies]
    assert len(set(questions)) == 8
    assert all(questions.count(q) == 2 for q in questions)
    assert {b["max_tokens"] for b in server.bodies} == {9}


def test_the_demo_tells_failures(server: FakeServer) -> None:
    server.fail = "busy"
    done = example(server, "--batch", "4")
    assert done.returncode == 1
    assert "was not answered: Error code: 429" in done.stderr
    assert "[3 requests] Decoding: 9 tokens" in done.stdout
