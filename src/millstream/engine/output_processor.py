"""Turns the engine's token lists into text deltas, one RequestOutput for each answer with news.

The same code serves a streamed answer, a whole one and the offline LLM: whoever asks gives a `sink`, and deltas can
be merged (`RequestOutput.merge`) where the reader is slower than the engine, or wants fewer of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from millstream.engine.detokenizer import DecodingTokenizer, Detokenizer
from millstream.engine.metrics import EngineMetrics, RequestTimes
from millstream.messages import EngineOutputs, PromptProgress, TokenLogprobs
from millstream.request import FinishReason, SamplingParams
from millstream.tokenizer.pieces import TokenPieces


@dataclass(slots=True)
class RequestOutput:
    """What is new of one answer since its last delta."""

    request_id: str
    index: int
    """Which of the request's n answers."""
    texts: list[str]
    """Pieces of `text`; joined when they are read, as a slow reader's are many."""
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    """One for each new token, where asked for."""
    prompt_logprobs: list[TokenLogprobs] | None
    """With the first delta, where asked for: of the prompt's tokens but the first."""
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    """The stop token or stop string that ended the answer."""
    num_prompt_tokens: int
    num_output_tokens: int
    """So far."""
    num_cached_tokens: int
    progress: PromptProgress | None = None
    """How far the prompt is, where asked for; what has it came before the first delta and has no tokens."""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def merge(self, newer: RequestOutput) -> None:
        """Append a later delta of the same answer."""
        if self.progress is not None:
            # not of interest any more, and the first delta is yet to come, or in `newer`
            self.progress = newer.progress
            self.prompt_logprobs = newer.prompt_logprobs
            self.num_cached_tokens = newer.num_cached_tokens
        self.texts += newer.texts
        self.token_ids += newer.token_ids
        self.logprobs += newer.logprobs
        self.finish_reason = newer.finish_reason
        self.stop_reason = newer.stop_reason
        self.num_output_tokens = newer.num_output_tokens


Sink = Callable[[RequestOutput], None]


@dataclass(slots=True)
class _Answer:
    request_id: str
    index: int
    params: SamplingParams
    num_prompt_tokens: int
    detokenizer: Detokenizer
    sink: Sink
    times: RequestTimes
    num_output_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


class OutputProcessor:
    """Keeps the detokenizer of every open answer."""

    def __init__(
        self,
        tokenizer: DecodingTokenizer,
        *,
        metrics: EngineMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokenizer = tokenizer
        self._pieces = TokenPieces(tokenizer.backend)
        self._metrics = metrics
        self._clock = clock
        self._answers: dict[str, _Answer] = {}

    @property
    def num_open(self) -> int:
        return len(self._answers)

    def add(
        self,
        engine_id: str,
        *,
        request_id: str,
        index: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        sink: Sink,
        skip_special_tokens: bool = True,
    ) -> None:
        """Follow the engine's request `engine_id`, the answer `index` to the client's `request_id`."""
        self._answers[engine_id] = _Answer(
            request_id=request_id,
            index=index,
            params=params,
            num_prompt_tokens=len(prompt_token_ids),
            detokenizer=Detokenizer(
                self._tokenizer,
                prompt_token_ids,
                stop=params.stop,
                skip_special_tokens=skip_special_tokens,
                min_tokens=params.min_tokens,
                pieces=self._pieces,
            ),
            sink=sink,
            times=RequestTimes(arrival=self._clock()),
        )

    def drop(self, engine_id: str) -> bool:
        """Stop following a request; whether it was still open."""
        answer = self._answers.pop(engine_id, None)
        if answer is not None and self._metrics is not None:
            self._metrics.finished(FinishReason.ABORT)
        return answer is not None

    def process(self, outputs: EngineOutputs) -> list[str]:
        """Hand out what a step brought; the engine's requests that a stop string has ended."""
        now = self._clock()
        stopped = []
        for engine_id, progress in outputs.progress.items():
            if (answer := self._answers.get(engine_id)) is not None:
                answer.sink(_progress(answer, progress))
        for i, engine_id in enumerate(outputs.request_ids):
            answer = self._answers.get(engine_id)
            if answer is None:
                continue  # dropped while the message was under way
            if engine_id in outputs.prompt_logprobs:
                news = outputs.prompt_logprobs[engine_id]
                answer.prompt_logprobs[news.first_position - 1 :] = news.logprobs
            if not outputs.new_token_ids[i] and outputs.finish_reasons[i] is None:
                continue
            delta = self._delta(
                answer,
                token_ids=outputs.new_token_ids[i],
                logprobs=outputs.logprobs.get(engine_id) or [],
                finish_reason=outputs.finish_reasons[i],
                stop_token=outputs.stop_reasons[i],
                num_cached_tokens=outputs.num_cached_tokens[i],
            )
            if delta.finish_reason is not None:
                del self._answers[engine_id]
                if outputs.finish_reasons[i] is None:
                    stopped.append(engine_id)
            self._observe(answer, delta, now)
            answer.sink(delta)
        if self._metrics is not None and outputs.stats is not None:
            self._metrics.step(outputs.stats)
        return stopped

    def _delta(
        self,
        answer: _Answer,
        *,
        token_ids: list[int],
        logprobs: list[TokenLogprobs],
        finish_reason: FinishReason | None,
        stop_token: int | None,
        num_cached_tokens: int,
    ) -> RequestOutput:
        # the token that ended the answer counts, but its text is not shown
        shown = token_ids[:-1] if finish_reason is FinishReason.STOP and stop_token is not None else token_ids
        pushed = answer.detokenizer.push(shown)
        text, stop_reason = pushed.text, stop_token
        reason: int | str | None = stop_reason
        if pushed.stop is not None:
            token_ids, logprobs = token_ids[: pushed.num_tokens], logprobs[: pushed.num_tokens]
            finish_reason, reason = FinishReason.STOP, pushed.stop
        elif finish_reason is not None:
            text += answer.detokenizer.finish()
        is_first = answer.num_output_tokens == 0
        answer.num_output_tokens += len(token_ids)
        return RequestOutput(
            request_id=answer.request_id,
            index=answer.index,
            texts=[text],
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=answer.prompt_logprobs if is_first and answer.params.prompt_logprobs is not None else None,
            finish_reason=finish_reason,
            stop_reason=reason,
            num_prompt_tokens=answer.num_prompt_tokens,
            num_output_tokens=answer.num_output_tokens,
            num_cached_tokens=num_cached_tokens,
        )

    def _observe(self, answer: _Answer, delta: RequestOutput, now: float) -> None:
        if self._metrics is None:
            return
        self._metrics.tokens(answer.times, len(delta.token_ids), now)
        if delta.finish_reason is not None:
            self._metrics.request(answer.times, delta.num_output_tokens, now)
            self._metrics.finished(delta.finish_reason)


def _progress(answer: _Answer, progress: PromptProgress) -> RequestOutput:
    return RequestOutput(
        request_id=answer.request_id,
        index=answer.index,
        texts=[],
        token_ids=[],
        logprobs=[],
        prompt_logprobs=None,
        finish_reason=None,
        stop_reason=None,
        num_prompt_tokens=answer.num_prompt_tokens,
        num_output_tokens=0,
        num_cached_tokens=progress.num_cached_tokens,
        progress=progress,
    )
