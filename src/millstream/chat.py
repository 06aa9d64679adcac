"""The terminal client behind `millstream chat`: talks to a running server, its answers streamed.

On a terminal it has a prompt, line editing and a little colour; with its input piped it answers one prompt a line.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, TextIO

import aiohttp
from rich.console import Console

from millstream.errors import MillstreamError

CONNECT_SECONDS = 10
MAX_LINE_BYTES = 2**20

HELP = """\
/clear          forget the conversation
/system TEXT    set the system message (and forget the conversation); without TEXT: show it
/exit           leave, as Ctrl-D does
Ctrl-C          stop the answer"""


class ChatError(MillstreamError):
    """The server can't be talked to, or refuses."""


def printable(text: str) -> str:
    """`text` without control characters, which could move the cursor or worse; line ends and tabs stay."""
    return "".join(c for c in text if c in "\n\t" or (ord(c) >= 32 and not 127 <= ord(c) < 160))


class ChatClient:
    """A conversation with one server."""

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        system: str | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
    ) -> None:
        base_url = base_url.rstrip("/")
        self.base_url = base_url if base_url.endswith("/v1") else base_url + "/v1"
        self.model = model
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._settings = {
            name: value
            for name, value in (("temperature", temperature), ("max_tokens", max_tokens))
            if value is not None
        }
        self.messages: list[dict[str, str]] = []
        self.num_tokens = 0
        """Of the last answer, where the server told."""
        self._system = system
        self.clear()

    @property
    def system(self) -> str | None:
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        self._system = text
        self.clear()

    def clear(self) -> None:
        """Forget the conversation; the system message stays."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    async def connect(self) -> str:
        """The model that will be talked to: the one asked for, or the server's first. Raises ChatError."""
        async with self._session() as session, self._request(session, "GET", "/models") as response:
            served = [str(card["id"]) for card in (await response.json())["data"]]
        if self.model is None and not served:
            raise ChatError(f"the server at {self.base_url} serves no model")
        if self.model is not None and self.model not in served:
            raise ChatError(f"--model is {self.model!r}: the server at {self.base_url} has {', '.join(served)}")
        self.model = self.model or served[0]
        return self.model

    async def ask(self, prompt: str) -> AsyncIterator[str]:
        """The pieces of the answer to `prompt`. Raises ChatError.

        The conversation grows by both; by what came of the answer if this is closed or cancelled; not at all if
        nothing came.
        """
        messages = [*self.messages, {"role": "user", "content": prompt}]
        body = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._settings,
        }
        answer: list[str] = []
        self.num_tokens = 0
        try:
            # a session of its own: closing it closes the connection, by which the server knows to stop
            async with (
                self._session() as session,
                self._request(session, "POST", "/chat/completions", body) as response,
            ):
                async for event in _events(response):
                    if event.get("error"):
                        raise ChatError(f"the server broke off: {event['error'].get('message')}")
                    if event.get("usage"):
                        self.num_tokens = event["usage"]["completion_tokens"]
                    for choice in event.get("choices", []):
                        text = choice["delta"].get("content")
                        if text:
                            answer.append(text)
                            yield text
        finally:
            if answer:
                self.messages = [*messages, {"role": "assistant", "content": "".join(answer)}]

    def _session(self) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        return aiohttp.ClientSession(headers=self._headers, timeout=timeout, read_bufsize=MAX_LINE_BYTES)

    def _request(
        self, session: aiohttp.ClientSession, method: str, path: str, body: dict[str, Any] | None = None
    ) -> _Request:
        return _Request(self.base_url, session, method, path, body)


class _Request:
    """One request as a context, its failures as ChatErrors that say what to do."""

    def __init__(
        self, base_url: str, session: aiohttp.ClientSession, method: str, path: str, body: dict[str, Any] | None
    ) -> None:
        self._base_url = base_url
        self._context = session.request(method, base_url + path, json=body)

    async def __aenter__(self) -> aiohttp.ClientResponse:
        try:
            response = await self._context.__aenter__()
        except aiohttp.InvalidURL as e:
            raise ChatError(f"--base-url is {self._base_url!r}: it is no URL") from e
        except (aiohttp.ClientConnectorError, TimeoutError) as e:
            raise ChatError(f"no server answers at {self._base_url}; start one with: millstream serve") from e
        except aiohttp.ClientError as e:
            raise ChatError(f"what answers at {self._base_url} is no such server: {e}") from e
        if response.status != 200:
            text = await response.text()
            await self._context.__aexit__(None, None, None)
            raise ChatError(f"the server says {response.status}: {_message(text)}")
        return response

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        await self._context.__aexit__(kind, error, trace)
        if isinstance(error, aiohttp.ClientError):
            raise ChatError(f"the connection to {self._base_url} broke: {error}") from error


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:500]


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            yield json.loads(data)


class Terminal:
    """Reads prompts and commands, writes answers."""

    def __init__(self, client: ChatClient, *, stdin: TextIO, stdout: TextIO) -> None:
        self._client = client
        self._stdin = stdin
        self._stdout = stdout
        self._is_interactive = stdin.isatty() and stdout.isatty()
        self._console = Console(file=stdout, highlight=False, soft_wrap=True)
        self._runner = asyncio.Runner()

    def run(self) -> int:
        """Talk until the input ends; returns the exit code: 1 if the server could not be reached or refused."""
        code = 0
        with self._runner as runner:
            try:
                model = runner.run(self._client.connect())
            except ChatError as e:
                self._console.print(str(e), style="red", markup=False)
                return 1
            if self._is_interactive:
                self._load_line_editing()
                self._console.print(f"{model} at {self._client.base_url}; /help lists the commands", markup=False)
            while (line := self._read()) is not None:
                line = line.strip()
                if line in ("/exit", "/quit"):
                    break
                if line.startswith("/"):
                    self._command(line)
                elif line:
                    code = self._answer(line)
        return code

    def _read(self) -> str | None:
        """The next line, None at the end of the input."""
        if not self._is_interactive:
            return self._stdin.readline() or None
        while True:
            try:
                return input("> ")
            except KeyboardInterrupt:
                self._console.print("\n(Ctrl-D or /exit leaves)", style="dim")
            except EOFError:
                self._console.print()
                return None

    def _answer(self, prompt: str) -> int:
        begin = time.perf_counter()
        try:
            self._runner.run(self._show(prompt))
        except KeyboardInterrupt:
            self._console.print("\n(stopped)", style="dim")
            return 0
        except ChatError as e:
            self._console.print(str(e), style="red", markup=False)
            return 1
        if self._is_interactive and self._client.num_tokens:
            took = time.perf_counter() - begin
            count = self._client.num_tokens
            self._console.print(f"({count} tokens, {count / took:.1f} tokens/s)", style="dim")
        return 0

    async def _show(self, prompt: str) -> None:
        async for text in self._client.ask(prompt):
            self._stdout.write(printable(text))
            self._stdout.flush()
        self._stdout.write("\n")
        self._stdout.flush()

    def _command(self, line: str) -> None:
        name, _, text = line.partition(" ")
        commands: dict[str, Callable[[str], str]] = {
            "/clear": self._clear,
            "/system": self._set_system,
            "/help": lambda _: HELP,
        }
        command = commands.get(name)
        said = command(text.strip()) if command else f"there is no command {name}; /help lists them"
        self._console.print(said, style="dim", markup=False)

    def _clear(self, _: str) -> str:
        self._client.clear()
        return "(the conversation is forgotten)"

    def _set_system(self, text: str) -> str:
        if text:
            self._client.system = text
            return "(the system message is set, the conversation forgotten)"
        return f"system message: {self._client.system or '(none)'}"

    @staticmethod
    def _load_line_editing() -> None:
        try:
            import readline  # noqa: F401  input() then has editing and history
        except ImportError:  # not on every system
            return


def run_chat(
    base_url: str,
    model: str | None = None,
    api_key: str | None = None,
    system: str | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
) -> int:
    """Chat with the server at `base_url` on this terminal; returns the exit code."""
    client = ChatClient(
        base_url, model=model, api_key=api_key, system=system, temperature=temperature, max_tokens=max_tokens
    )
    return Terminal(client, stdin=sys.stdin, stdout=sys.stdout).run()
