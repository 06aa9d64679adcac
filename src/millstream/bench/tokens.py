"""Counting tokens without knowing the model: by the server's POST /tokenize or a local tokenizer.json."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import msgspec
import tokenizers

from millstream.bench.client import BenchmarkError, http_error
from millstream.errors import ConfigError

MAX_OPEN_CALLS = 16


class TokenCounter(Protocol):
    """Turns texts into token ids, with the special tokens that the model's prompts begin (or end) with."""

    async def encode(self, texts: Sequence[str]) -> list[list[int]]: ...


class LocalTokenizer:
    """A tokenizer.json. Raises ConfigError if it can't be read."""

    def __init__(self, path: str) -> None:
        file = Path(path)
        if file.is_dir():
            file = file / "tokenizer.json"
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as e:  # the library raises plain Exception
            raise ConfigError(f"--tokenizer {path} can't be read as a tokenizer.json: {e}") from e
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    async def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in self._tokenizer.encode_batch(list(texts))]

    def count_pieces(self, texts: Sequence[str]) -> list[int]:
        """Tokens in each text taken for itself, without special tokens."""
        return [len(e.ids) for e in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]


class ServerTokenizer:
    """The server's POST /tokenize: `{model, prompt}` as millstream and vLLM take it, or llama.cpp's `{content}`."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str, *, model: str, field: str) -> None:
        self._session = session
        self._url = base_url + "/tokenize"
        self._model = model
        self._field = field
        self._gate = asyncio.Semaphore(MAX_OPEN_CALLS)

    async def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Raises BenchmarkError if the server refuses a text."""
        return list(await asyncio.gather(*(self._encode(t) for t in texts)))

    async def _encode(self, text: str) -> list[int]:
        body: dict[str, Any] = {self._field: text}
        if self._field == "content":
            body["add_special"] = True
        else:
            body["model"] = self._model
        try:
            async with self._gate, self._session.post(self._url, data=msgspec.json.encode(body)) as response:
                data = await response.read()
                if response.status != 200:
                    raise BenchmarkError(f"POST {self._url}: {http_error(response.status, data)}")
        except (aiohttp.ClientError, OSError) as e:
            raise BenchmarkError(f"POST {self._url}: {e}") from e
        try:
            return msgspec.json.decode(data, type=_Tokens).tokens
        except msgspec.MsgspecError as e:
            raise BenchmarkError(f"POST {self._url} answered without token ids: {e}") from e


class _Tokens(msgspec.Struct):
    tokens: list[int]


async def server_tokenizer(session: aiohttp.ClientSession, base_url: str, *, model: str) -> ServerTokenizer | None:
    """The server's tokenizer, or None if it offers none."""
    for field in ("prompt", "content"):
        tokenizer = ServerTokenizer(session, base_url, model=model, field=field)
        try:
            (ids,) = await tokenizer.encode(["The mill turns."])
        except BenchmarkError:
            continue
        if ids:
            return tokenizer
    return None


async def count_tokens(counter: TokenCounter | None, texts: Sequence[str]) -> list[int]:
    """Tokens in each text; without a counter an estimate, four tokens for three words."""
    if counter is None:
        return [max(1, round(len(t.split()) * 4 / 3)) for t in texts]
    return [len(ids) for ids in await counter.encode(texts)]
