"""From a body's fields to SamplingParams: OpenAI's defaults, aliases, and a seed for every request."""

from __future__ import annotations

import hashlib
import itertools
import secrets
from dataclasses import dataclass
from typing import Any

from millstream.config import ServerConfig
from millstream.errors import InvalidRequestError
from millstream.request import MAX_LOGIT_BIAS, MAX_LOGPROBS, SamplingParams
from millstream.server.errors import shown
from millstream.server.schema import ChatRequest, CompletionRequest, SamplingBody, StreamOptions

COMPLETION_MAX_TOKENS = 16
MAX_CACHE_SALT_LEN = 128
MAX_PRIORITY = 2**31 - 1
SEED_BITS = 62
"""One less than a seed may have: the n answers to a prompt count up from its seed."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a request says besides its prompt, checked."""

    params: SamplingParams
    has_seed: bool
    """Whether the client chose the seed; prompts of one request then share it."""
    priority: int
    cache_salt: str
    skip_special_tokens: bool
    stream: bool
    include_usage: bool
    include_progress: bool
    echo: bool = False
    is_scoring: bool = False
    """Only the prompt is asked for (`max_tokens` 0): one token is made and dropped."""


class Seeds:
    """Seeds for requests that bring none: drawn, or from --seed and a counter so that a run can be repeated."""

    def __init__(self, base: int | None) -> None:
        self._base = base
        self._counter = itertools.count()

    def next(self) -> int:
        """A seed from 0 to 2**62 - 1."""
        if self._base is None:
            return secrets.randbits(SEED_BITS)
        # hashed, so that servers started with neighbouring bases don't share seeds
        digest = hashlib.blake2b(f"{self._base}:{next(self._counter)}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> (64 - SEED_BITS)


class OptionsBuilder:
    """Makes the Options of requests; holds the server's defaults."""

    def __init__(self, config: ServerConfig) -> None:
        self.seeds = Seeds(config.seed)
        self._repeat_last_n = config.repeat_last_n

    def chat(self, body: ChatRequest, *, vocab_size: int) -> Options:
        """Raises InvalidRequestError."""
        logprobs = None
        if body.logprobs:
            logprobs = body.top_logprobs or 0
        elif body.top_logprobs:
            raise InvalidRequestError(
                f"top_logprobs is {shown(body.top_logprobs)}: it needs logprobs to be true", param="top_logprobs"
            )
        if logprobs is not None and not 0 <= logprobs <= MAX_LOGPROBS:
            raise InvalidRequestError(
                f"top_logprobs is {shown(logprobs)}: it must be from 0 to {MAX_LOGPROBS}", param="top_logprobs"
            )
        return self._build(body, vocab_size=vocab_size, max_tokens=_max_tokens(body), logprobs=logprobs)

    def completion(self, body: CompletionRequest, *, vocab_size: int) -> Options:
        """Raises InvalidRequestError."""
        n = 1 if body.n is None else body.n
        if body.best_of not in (None, 1, n):
            raise InvalidRequestError(
                f"best_of is {shown(body.best_of)}: only 1 or n ({shown(n)}) is supported", param="best_of"
            )
        max_tokens = _max_tokens(body)
        if max_tokens is None:
            max_tokens = COMPLETION_MAX_TOKENS
        echo, is_scoring = bool(body.echo), False
        if echo and max_tokens == 0:
            if body.min_tokens:
                raise InvalidRequestError(
                    f"min_tokens is {shown(body.min_tokens)}: it can't be over max_tokens (0)", param="min_tokens"
                )
            max_tokens, is_scoring = 1, True
        return self._build(
            body,
            vocab_size=vocab_size,
            max_tokens=max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if echo else None,
            echo=echo,
            is_scoring=is_scoring,
        )

    def _build(
        self,
        body: SamplingBody,
        *,
        vocab_size: int,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
        echo: bool = False,
        is_scoring: bool = False,
    ) -> Options:
        given = {
            "temperature": body.temperature,
            "top_k": body.top_k,
            "top_p": body.top_p,
            "min_p": body.min_p,
            "presence_penalty": body.presence_penalty,
            "frequency_penalty": body.frequency_penalty,
            "repetition_penalty": body.repetition_penalty,
            "min_tokens": body.min_tokens,
            "ignore_eos": body.ignore_eos,
            "n": body.n,
        }
        fields: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if max_tokens is not None and max_tokens < 1:
            name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
            raise InvalidRequestError(f"{name} is {shown(max_tokens)}: it must be at least 1", param=name)
        params = SamplingParams(
            max_tokens=max_tokens,
            repeat_last_n=self._repeat_last_n if body.repeat_last_n is None else body.repeat_last_n,
            logit_bias=_logit_bias(body.logit_bias),
            seed=self.seeds.next() if body.seed is None else body.seed,
            stop=_stop(body.stop),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            **fields,
        )
        params.check_vocab(vocab_size)
        stream_options = _stream_options(body)
        return Options(
            params=params,
            has_seed=body.seed is not None,
            priority=_priority(body.priority),
            cache_salt=_cache_salt(body.cache_salt),
            skip_special_tokens=body.skip_special_tokens is not False,
            stream=bool(body.stream),
            include_usage=bool(stream_options.include_usage),
            include_progress=bool(stream_options.include_progress),
            echo=echo,
            is_scoring=is_scoring,
        )


def _max_tokens(body: SamplingBody) -> int | None:
    a, b = body.max_tokens, body.max_completion_tokens
    if a is not None and b is not None and a != b:
        raise InvalidRequestError(
            f"max_tokens is {shown(a)} and max_completion_tokens is {shown(b)}: they mean the same, give one",
            param="max_completion_tokens",
        )
    return a if b is None else b


def _stop(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not all(isinstance(s, str) for s in value):
        raise InvalidRequestError(
            f"stop is {shown(value)}: it must be a string or a list of strings", param="stop", code="invalid_type"
        )
    return tuple(value)


def _logit_bias(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise InvalidRequestError(
            f"logit_bias is {shown(value)}: it must be an object", param="logit_bias", code="invalid_type"
        )
    if len(value) > MAX_LOGIT_BIAS:
        raise InvalidRequestError(
            f"logit_bias has {len(value)} entries: at most {MAX_LOGIT_BIAS} are taken", param="logit_bias"
        )
    bias: dict[int, float] = {}
    for key, number in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidRequestError(
                f"logit_bias has the key {shown(key)}: keys must be token ids", param="logit_bias"
            )
        if type(number) not in (int, float):
            raise InvalidRequestError(
                f"logit_bias[{key}] is {shown(number)}: it must be a number", param="logit_bias", code="invalid_type"
            )
        if not -100 <= number <= 100:  # before float(), which a huge integer overflows
            raise InvalidRequestError(
                f"logit_bias[{key}] is {shown(number)}: it must be from -100 to 100", param="logit_bias"
            )
        bias[int(key)] = float(number)
    return bias


def _priority(value: int | None) -> int:
    if value is not None and not -MAX_PRIORITY <= value <= MAX_PRIORITY:
        raise InvalidRequestError(
            f"priority is {shown(value)}: it must be from {-MAX_PRIORITY} to {MAX_PRIORITY}", param="priority"
        )
    return value or 0


def _cache_salt(value: str | None) -> str:
    if value is not None and not 0 < len(value) <= MAX_CACHE_SALT_LEN:
        raise InvalidRequestError(
            f"cache_salt has {len(value)} characters: it must have 1 to {MAX_CACHE_SALT_LEN}", param="cache_salt"
        )
    return value or ""


def _stream_options(body: SamplingBody) -> StreamOptions:
    options = body.stream_options
    if options is None:
        return StreamOptions()
    if not body.stream:
        raise InvalidRequestError(
            "stream_options is given, but stream is not true: it needs a stream", param="stream_options"
        )
    for name, value in (options.model_extra or {}).items():
        if value not in (None, False):
            raise InvalidRequestError(
                f"stream_options.{name[:64]} is {shown(value)}: only include_usage and include_progress are supported",
                param="stream_options",
                code="unsupported_parameter",
            )
    return options
