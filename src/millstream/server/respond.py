"""One way from prompts to a reply, for both endpoints, streamed or whole."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import AsyncGenerator, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from millstream.errors import EngineDeadError
from millstream.messages import PromptProgress
from millstream.request import FinishReason
from millstream.server.errors import NotReadyError, ServerStoppingError, as_request_error, envelope, request_id_of
from millstream.server.generation import Generation, Generations, until_disconnect
from millstream.server.llm import Output, ServedLLM
from millstream.server.logprobs import first_token
from millstream.server.params import Options, Seeds
from millstream.server.prompts import LONG_TEXT_LEN, Prompt
from millstream.server.shapes import DONE, Answer, Progress, PromptTokensDetails, Shape, Usage

PING = b": ping\n\n"
"""A comment: clients skip it."""
FIRST_OUTPUT_PATIENCE = 10.0
"""Seconds that a stream's headers wait for its first delta, so that a refusal has its own status."""


WHOLE = sys.maxsize
"""As an interval: the whole answer at once."""


class Collector:
    """Gathers the deltas of all answers of one HTTP request; `feed` also gives the chunks to stream."""

    def __init__(self, prompts: Sequence[Prompt], options: Options, shape: Shape, echo_texts: Sequence[str]) -> None:
        self._prompts = prompts
        self._options = options
        self._shape = shape
        self._echo_texts = echo_texts
        self._has_logprobs = options.params.logprobs is not None
        self._has_prompt_logprobs = options.params.prompt_logprobs is not None
        self._n = options.params.n
        self.answers = [Answer(i) for i in range(len(prompts) * self._n)]
        self._is_begun = [False] * len(self.answers)
        self._held: list[list[Output]] = [[] for _ in prompts]
        self._progress = [PromptProgress(0, 0)] * len(prompts)
        self._has_output = False
        self._prompt_logprobs = [[first_token(p.token_ids[0])] if self._has_prompt_logprobs else [] for p in prompts]
        self._num_cached_tokens = [0] * len(prompts)

    def start(self) -> bytes:
        """The chunks before any text."""
        return b"".join(self._shape.start(a.index) for a in self.answers)

    def feed(self, prompt: int, output: Output, *, is_streamed: bool) -> bytes:
        """Take a delta; returns the chunks that it makes, if streamed.

        Raises ServerStoppingError where the engine ended the answer because the server stops.
        """
        if output.progress is not None:
            return self._take_progress(prompt, output.progress)
        self._has_output = True
        if output.num_cached_tokens > self._num_cached_tokens[prompt]:
            self._num_cached_tokens[prompt] = output.num_cached_tokens
        if output.prompt_logprobs:
            self._prompt_logprobs[prompt].extend(output.prompt_logprobs)
        elif self._has_prompt_logprobs and not self._knows_prompt(prompt):
            # the prompt's log-probabilities come with answer 0; an echo begins with them, so other answers wait
            self._held[prompt].append(output)
            return b""
        chunks = self._take(prompt, output, is_streamed)
        if self._held[prompt]:
            held, self._held[prompt] = self._held[prompt], []
            chunks += b"".join(self._take(prompt, o, is_streamed) for o in held)
        return chunks

    def _knows_prompt(self, prompt: int) -> bool:
        return len(self._prompt_logprobs[prompt]) >= len(self._prompts[prompt].token_ids)

    def _take_progress(self, prompt: int, progress: PromptProgress) -> bytes:
        """A chunk that says how far all prompts of the request are together; none once an answer has begun."""
        self._progress[prompt] = progress
        if self._has_output:
            return b""
        return self._shape.progress(
            Progress(
                prompt_tokens_done=sum(p.num_computed_tokens for p in self._progress),
                prompt_tokens_total=sum(len(p.token_ids) for p in self._prompts),
                cached_tokens=sum(p.num_cached_tokens for p in self._progress),
            )
        )

    def _take(self, prompt: int, output: Output, is_streamed: bool) -> bytes:
        answer = self.answers[prompt * self._n + output.index]
        assert answer.finish_reason is None, "a delta after the end of an answer"
        reason = output.finish_reason
        text = output.text
        if self._options.is_scoring:
            text = ""
            reason = reason and FinishReason.LENGTH
        else:
            answer.num_output_tokens = output.num_output_tokens
            if self._has_logprobs:
                answer.logprobs.extend(output.logprobs)
        if reason is FinishReason.ABORT:
            raise ServerStoppingError("the server is being stopped")
        if reason is FinishReason.ERROR:
            raise RuntimeError("the engine ended an answer with an error")
        if self._options.echo and not self._is_begun[answer.index]:
            text = self._echo_texts[prompt] + text
            answer.logprobs[:0] = self._prompt_logprobs[prompt]
        self._is_begun[answer.index] = True
        chunks = b""
        if not is_streamed:
            answer.text.append(text)
        elif text or (reason is not None and answer.logprobs):
            # log-probabilities of tokens without text yet (half a character) wait for the text, or the end
            chunks = self._shape.delta(answer.index, text, answer.logprobs if self._has_logprobs else None)
            answer.logprobs.clear()
        if reason is not None:
            answer.finish_reason = reason
            answer.stop_reason = output.stop_reason
            if is_streamed:
                chunks += self._shape.finish(answer.index, reason, output.stop_reason)
        return chunks

    def usage(self) -> Usage:
        """The counts, all answers ended. A prompt counts once, however many answers it has."""
        if any(a.finish_reason is None for a in self.answers):
            raise RuntimeError("the engine left an answer without an end")
        num_prompt_tokens = sum(len(p.token_ids) for p in self._prompts)
        num_output_tokens = sum(a.num_output_tokens for a in self.answers)
        return Usage(
            num_prompt_tokens,
            num_output_tokens,
            num_prompt_tokens + num_output_tokens,
            PromptTokensDetails(sum(self._num_cached_tokens)),
        )

    def whole(self) -> bytes:
        return self._shape.whole(self.answers, self.usage(), has_logprobs=self._has_logprobs)


class EventStream(Response):
    """Server-sent events of a generation, which is closed however the stream ends, begun or not.

    A client that does not read holds up nobody but itself: its events wait in the socket up to a limit, and then its
    deltas in their slots.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], generation: Generation, *, ping_interval: float) -> None:
        # proxies must neither keep nor gather what should be seen at once
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._generation = generation
        self._ping_interval = ping_interval

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.create_task(self._write(send))
        others = [asyncio.create_task(_disconnected(receive))]
        if self._ping_interval:
            others.append(asyncio.create_task(_ping(send, self._ping_interval)))
        try:
            await asyncio.wait({writing, *others}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            for task in (writing, *others):
                task.cancel()
            await asyncio.gather(writing, *others, return_exceptions=True)
            await self._events.aclose()
            await self._generation.aclose()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for events in self._events:
            await send({"type": "http.response.body", "body": events, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _ping(send: Send, interval: float) -> None:
    while True:
        await asyncio.sleep(interval)
        await send({"type": "http.response.body", "body": PING, "more_body": True})


class Responder:
    """Runs prompts on the engine and answers the HTTP request with what comes.

    `stream_interval` is the number of tokens of a chunk; `ping_interval` in seconds says how often a stream gets a
    comment; 0: never.
    """

    def __init__(
        self, llm: ServedLLM, generations: Generations, seeds: Seeds, *, stream_interval: int, ping_interval: float
    ) -> None:
        self._llm = llm
        self._generations = generations
        self._seeds = seeds
        self._stream_interval = stream_interval
        self._ping_interval = ping_interval
        # pings can't begin before the headers are sent
        self._patience = min(FIRST_OUTPUT_PATIENCE, ping_interval or math.inf)

    def check_ready(self) -> None:
        """Raise EngineDeadError, ServerStoppingError or NotReadyError where no request can be taken."""
        if self._llm.is_dead:
            raise EngineDeadError("the engine has ended")
        if self._generations.is_stopping:
            raise ServerStoppingError("the server is being stopped")
        if not self._llm.is_ready:
            raise NotReadyError("the model is still being loaded: try again in a moment")

    async def respond(
        self, request: Request, reply_id: str, prompts: Sequence[Prompt], options: Options, shape: Shape
    ) -> Response:
        """Raises RequestError, EngineDeadError (both before the reply began), ClientGoneError."""
        collector = Collector(prompts, options, shape, await self._echo_texts(prompts, options))
        generation = self._open(reply_id, prompts, options)
        is_handed_over = False
        try:
            if options.stream:
                await until_disconnect(request, generation.start(patience=self._patience))
                events = _events(generation, collector, options, shape, request_id_of(request))
                is_handed_over = True
                return EventStream(events, generation, ping_interval=self._ping_interval)
            body = await until_disconnect(request, _collect(generation, collector))
            return Response(body, media_type="application/json")
        finally:
            if not is_handed_over:
                await generation.aclose()

    def _open(self, reply_id: str, prompts: Sequence[Prompt], options: Options) -> Generation:
        iterators = []
        for i, prompt in enumerate(prompts):
            params = options.params
            if i > 0 and not options.has_seed:
                params = msgspec.structs.replace(params, seed=self._seeds.next())
            iterators.append(
                self._llm.generate(
                    prompt.token_ids,
                    params,
                    request_id=reply_id if len(prompts) == 1 else f"{reply_id}-{i}",
                    priority=options.priority,
                    cache_salt=options.cache_salt,
                    skip_special_tokens=options.skip_special_tokens,
                    has_progress=options.include_progress,
                    interval=self._stream_interval if options.stream else WHOLE,
                )
            )
        return self._generations.open(iterators)

    async def _echo_texts(self, prompts: Sequence[Prompt], options: Options) -> list[str]:
        if not options.echo:
            return []

        def text_of(prompt: Prompt) -> str:
            if prompt.text is not None:
                return prompt.text
            return self._llm.tokenizer.decode(prompt.token_ids, skip_special_tokens=options.skip_special_tokens)

        def work() -> list[str]:
            return [text_of(p) for p in prompts]

        is_long = sum(len(p.token_ids) for p in prompts) > LONG_TEXT_LEN
        return await asyncio.to_thread(work) if is_long else work()


async def _collect(generation: Generation, collector: Collector) -> bytes:
    async for prompt, output in generation.outputs():
        collector.feed(prompt, output, is_streamed=False)
    return collector.whole()


async def _events(
    generation: Generation, collector: Collector, options: Options, shape: Shape, request_id: str
) -> AsyncGenerator[bytes, None]:
    """The events of a stream: chunks, perhaps usage, [DONE]; or an error as the last one, and no [DONE]."""
    try:
        start = collector.start()
        if start:
            yield start
        async for prompt, output in generation.outputs():
            chunks = collector.feed(prompt, output, is_streamed=True)
            if chunks:
                yield chunks
        usage = collector.usage()
        yield (shape.usage(usage) + DONE) if options.include_usage else DONE
    except Exception as e:
        yield b"data: " + envelope(as_request_error(e, request_id=request_id)) + b"\n\n"
