"""What the server needs of the engine: the shape of `engine.AsyncLLM`, and nothing of how it works.

The server is written against these protocols, so that its tests run over a fake that streams scripted text.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from millstream.messages import PromptProgress, TokenLogprobs, WorkerInfo
from millstream.request import FinishReason, SamplingParams


class ServedTokenizer(Protocol):
    """The part of `tokenizer.Tokenizer` that the server uses."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def chat_template(self) -> object | None:
        """None if the model has no template for chats; `encode_chat` then has nothing to render with."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int, /) -> bytes: ...

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The tokens of a rendered chat. Raises InvalidRequestError where the template refuses or fails."""
        ...


class Output(Protocol):
    """One delta of one answer: the shape of `engine.RequestOutput`."""

    @property
    def index(self) -> int:
        """Which of the n answers."""
        ...

    @property
    def text(self) -> str:
        """New text since the last delta of this answer; may be empty."""
        ...

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def logprobs(self) -> Sequence[TokenLogprobs]:
        """One for each new token where asked for, else empty."""
        ...

    @property
    def prompt_logprobs(self) -> Sequence[TokenLogprobs] | None:
        """On the first delta of answer 0 where asked for: for the prompt's tokens 1 to its end."""
        ...

    @property
    def finish_reason(self) -> FinishReason | None: ...

    @property
    def stop_reason(self) -> int | str | None: ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_output_tokens(self) -> int:
        """Of this answer, so far."""
        ...

    @property
    def num_cached_tokens(self) -> int: ...

    @property
    def progress(self) -> PromptProgress | None:
        """How far the prompt is, on what comes before the first delta where that was asked for; it has no tokens."""
        ...


class ServedMetrics(Protocol):
    """The figures behind /metrics."""

    @property
    def content_type(self) -> str: ...

    def render(self) -> bytes: ...


class ServedLLM(Protocol):
    """The part of `engine.AsyncLLM` that the server uses."""

    @property
    def tokenizer(self) -> ServedTokenizer: ...

    @property
    def info(self) -> WorkerInfo:
        """Valid once `is_ready`."""
        ...

    @property
    def is_ready(self) -> bool: ...

    @property
    def is_dead(self) -> bool: ...

    async def start_trace(self) -> str:
        """Write what every stage does to a new file; its path. Raises InvalidRequestError where a trace is being
        written already."""
        ...

    async def stop_trace(self) -> str:
        """End the trace; the path of its file. Raises InvalidRequestError where none is being written."""
        ...

    @property
    def metrics(self) -> ServedMetrics: ...

    def generate(
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
    ) -> AsyncIterator[Any]:
        """The deltas (`Output`) of all n answers, as they come; with `has_progress` news of the prompt before them.
        A delta has `interval` tokens at least, but for an answer's first and last.

        Raises RequestError before the first of them, EngineDeadError at any time. Closing the iterator, or
        cancelling the task that waits for it, aborts the request in the engine.
        """
        ...


async def close(iterator: AsyncIterator[Any]) -> None:
    """Close an iterator that is a generator (or looks like one); the engine then aborts the request."""
    if isinstance(iterator, AsyncGenerator) or hasattr(iterator, "aclose"):
        await iterator.aclose()
