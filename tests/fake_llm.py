"""An AsyncLLM without an engine: it really tokenizes, and streams texts that the test scripts.

Tokens are bytes (ids 0-255), BOS is 256, EOS is 257; a character of several bytes is several tokens, so its text comes
with its last one. Without a script the answer to a prompt is its echo in upper case.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from millstream.config import ServerConfig
from millstream.errors import ContextLengthError, EngineDeadError, InvalidRequestError, OverloadedError
from millstream.messages import PromptProgress, TokenLogprobs, WorkerInfo
from millstream.request import FinishReason, SamplingParams
from millstream.server.app import create_app
from millstream.server.run import serve

BOS, EOS, VOCAB_SIZE = 256, 257, 258


class FakeTokenizer:
    vocab_size = VOCAB_SIZE

    def __init__(self) -> None:
        self.chat_template: object | None = object()
        self.rendered: list[dict[str, Any]] = []
        self.on_encode: Callable[[str], None] = lambda text: None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.on_encode(text)
        return ([BOS] if add_special_tokens else []) + list(text.encode())

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        raw = b"".join(self.token_bytes(i) for i in ids if i < 256 or not skip_special_tokens)
        return raw.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return {BOS: b"<s>", EOS: b"</s>"}.get(token_id) or bytes([token_id])

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        for name in template_kwargs or {}:
            if name != "enable_thinking":
                raise InvalidRequestError(
                    f"chat_template_kwargs: the template reads no {name!r}", param="chat_template_kwargs"
                )
        self.rendered.append(
            {
                "messages": [dict(m) for m in messages],
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": continue_final_message,
                "template_kwargs": dict(template_kwargs or {}),
            }
        )
        text = "".join(f"<{m['role']}>{_text(m['content'])}" for m in messages)
        return self.encode(text + ("<assistant>" if add_generation_prompt else ""), add_special_tokens=False)


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


class FakeMetrics:
    content_type = "text/plain; version=0.0.4"

    def render(self) -> bytes:
        return b"millstream_fake 1\n"


@dataclass
class FakeOutput:
    request_id: str
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    progress: PromptProgress | None = None


@dataclass
class Call:
    prompt_token_ids: list[int]
    params: SamplingParams
    request_id: str
    priority: int
    cache_salt: str
    skip_special_tokens: bool
    interval: int
    is_aborted: bool = False
    is_ended: bool = False
    num_steps: int = 0


Script = Callable[[str, int], str]


class FakeLLM:
    """`script` gives the text of answer `index` to a prompt. `gate`, where set, lets one step pass per release."""

    def __init__(self, script: Script = lambda prompt, index: prompt.upper()) -> None:
        self.tokenizer = FakeTokenizer()
        self.metrics = FakeMetrics()
        self.info = WorkerInfo(
            num_blocks=10,
            block_size=32,
            max_model_len=1000,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=[EOS],
            weight_bytes=0,
            kv_cache_bytes=0,
            dtype="float32",
            phases={},
        )
        self.is_ready = True
        self.is_dead = False
        self.is_full = False
        self.is_traced = False
        self.script = script
        self.gate: asyncio.Semaphore | None = None
        self.fail_after: tuple[int, Exception] | None = None
        """After this many steps of a request, raise this."""
        self.end_with: FinishReason | None = None
        """The reason of every end, in place of the right one."""
        self.lowest = -math.inf
        self.progress: list[PromptProgress] = []
        """What requests that ask for it are told before their first delta."""
        self.calls: list[Call] = []
        self.aborted = asyncio.Event()

    async def start_trace(self) -> str:
        if self.is_traced:
            raise InvalidRequestError("A trace is being written already, to somewhere")
        self.is_traced = True
        return "somewhere"

    async def stop_trace(self) -> str:
        if not self.is_traced:
            raise InvalidRequestError("No trace is being written")
        self.is_traced = False
        return "somewhere"

    async def generate(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        skip_special_tokens: bool = True,
        has_progress: bool = False,
        interval: int = 1,
    ) -> AsyncIterator[FakeOutput]:
        call = Call(prompt_token_ids, params, request_id, priority, cache_salt, skip_special_tokens, interval)
        self.calls.append(call)
        if self.is_dead:
            raise EngineDeadError("the engine's process 4711 was killed")
        if self.is_full:
            raise OverloadedError("the queue is full: 4096 requests wait")
        if len(prompt_token_ids) + 1 > self.info.max_model_len:
            raise ContextLengthError(
                f"the prompt has {len(prompt_token_ids)} tokens: the context has {self.info.max_model_len}",
                param="messages",
            )
        prompt = self.tokenizer.decode([i for i in prompt_token_ids if i != BOS])
        answers = [self._answer(call, prompt, i) for i in range(params.n)]
        try:
            for progress in self.progress if has_progress else ():
                await asyncio.sleep(0)
                yield FakeOutput(request_id, 0, progress=progress)
            while answers:
                for answer in list(answers):
                    await (self.gate.acquire() if self.gate else asyncio.sleep(0))
                    if self.fail_after is not None and call.num_steps >= self.fail_after[0]:
                        raise self.fail_after[1]
                    call.num_steps += 1
                    output = next(answer)
                    if output.finish_reason is not None:
                        answers.remove(answer)
                    yield output
            call.is_ended = True
        finally:
            call.is_aborted = not call.is_ended
            if call.is_aborted:
                self.aborted.set()

    def _answer(self, call: Call, prompt: str, index: int):  # type: ignore[no-untyped-def]
        params = call.params
        ids = [*self.script(prompt, index).encode(), EOS]
        room = self.info.max_model_len - len(call.prompt_token_ids)
        limit = min(params.max_tokens or room, room)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for k, token_id in enumerate(ids[:limit]):
            is_stop = token_id == EOS
            reason = FinishReason.STOP if is_stop else FinishReason.LENGTH if k + 1 == limit else None
            if reason is not None and self.end_with is not None:
                reason = self.end_with
            raw = b"" if is_stop else bytes([token_id])
            first = index == 0 and k == 0 and params.prompt_logprobs is not None
            yield FakeOutput(
                request_id=call.request_id,
                index=index,
                text=decoder.decode(raw, final=reason is not None),
                token_ids=[token_id],
                logprobs=[] if params.logprobs is None else [self._logprobs(token_id, params.logprobs)],
                prompt_logprobs=[self._logprobs(i, params.prompt_logprobs or 0) for i in call.prompt_token_ids[1:]]
                if first
                else None,
                finish_reason=reason,
                stop_reason=EOS if is_stop else None,
                num_prompt_tokens=len(call.prompt_token_ids),
                num_output_tokens=k + 1,
                num_cached_tokens=len(call.prompt_token_ids) // 2,
            )

    def _logprobs(self, token_id: int, k: int) -> TokenLogprobs:
        """The token at -0.5, then itself as the likeliest, then others of which the last has no probability."""
        others = [token_id, 65, 66, 67, 68][:k]
        probs = [-0.5, -1.0, -2.0, -3.0, self.lowest][: len(others)]
        return TokenLogprobs(token_ids=[token_id, *others], logprobs=[-0.5, *probs], rank=1)


MODEL = "fake/model"


@asynccontextmanager
async def served(llm: FakeLLM, **settings: Any) -> AsyncIterator[str]:
    """A real server over `llm` on a free port; its URL, without a slash at the end."""
    config = ServerConfig(port=0, **settings)
    stop, url = asyncio.Event(), asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(create_app(llm, config, MODEL), config, url.set_result, stop=stop))
    try:
        yield await url
    finally:
        stop.set()
        await task


async def until(condition: Callable[[], bool], *, seconds: float = 60) -> None:
    """Wait until `condition` is true; raises TimeoutError where it never is."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        [[name, error]] = self.json.items()
        assert name == "error"
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert error["type"]
        return dict(error)

    @property
    def events(self) -> list[Any]:
        """The data of server-sent events; "[DONE]" stays a string."""
        lines = [line[6:] for line in self.body.decode().split("\n") if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def call(
    app: Any, path: str, body: Any = None, *, method: str = "POST", headers: Mapping[str, str] | None = None
) -> Reply:
    """One request straight into an ASGI application. `body` is sent as it is if bytes, else as JSON."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    sent: list[Any] = []
    messages = [{"type": "http.request", "body": data, "more_body": False}]
    forever = asyncio.Event()

    async def receive() -> Any:
        if not messages:
            await forever.wait()
        return messages.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    given = {"content-type": "application/json", **(headers or {})}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(k.encode(), v.encode("utf-8")) for k, v in given.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    await app(scope, receive, send)
    start, *bodies = sent
    return Reply(
        start["status"],
        {k.decode(): v.decode() for k, v in start["headers"]},
        b"".join(m["body"] for m in bodies),
    )


def app_of(llm: FakeLLM, **settings: Any) -> Any:
    return create_app(llm, ServerConfig(**settings), MODEL)
