"""The engine as the API process sees it: `generate` gives the deltas of one request.

One reader task takes the engine's messages, as many at once as are there; every request has one slot for each answer.
Who reads more slowly than the engine writes finds deltas merged, so nothing queues up and nobody waits for another. A
process that can't keep up with its messages merges in the same way for all its readers: the more it lags, the fewer and
larger deltas it has to hand out.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Callable

import msgspec

from millstream import errors
from millstream.config import EngineConfig
from millstream.engine.client import EngineConnection, error_of
from millstream.engine.metrics import EngineMetrics
from millstream.engine.output_processor import OutputProcessor, RequestOutput
from millstream.errors import EngineDeadError, InvalidRequestError, MillstreamError, OverloadedError
from millstream.log import log
from millstream.messages import (
    AbortRequests,
    EngineFailed,
    EngineOutputs,
    EngineProgress,
    EngineReady,
    EngineRequest,
    FromEngine,
    RequestRefused,
    TraceTo,
    WorkerInfo,
)
from millstream.request import FinishReason, SamplingParams, check_fits, nth_seed
from millstream.tokenizer.tokenizer import Tokenizer


class _Stream:
    """The deltas of one request's answers that were not read yet, one slot for each answer.

    A delta is due when it has `interval` tokens, holds the first or the last one, or tells of progress.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._slots: dict[int, RequestOutput] = {}
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None
        # asking for it costs a system call each time
        self._loop = asyncio.get_running_loop()

    def put(self, delta: RequestOutput) -> None:
        slot = self._slots.get(delta.index)
        if slot is None:
            slot = self._slots[delta.index] = delta
        else:
            slot.merge(delta)
        if self._reader is not None and self._is_due(slot):
            self._wake()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._wake()

    async def take(self) -> list[RequestOutput]:
        """Wait until a delta is due; raises what `fail` was given once all deltas before it were taken."""
        while not (due := [slot for slot in self._slots.values() if self._is_due(slot)]):
            if self._error is not None:
                raise self._error
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        for slot in due:
            del self._slots[slot.index]
        return due

    def _is_due(self, slot: RequestOutput) -> bool:
        num_tokens = len(slot.token_ids)
        return (
            num_tokens >= self._interval
            or num_tokens == slot.num_output_tokens
            or slot.finish_reason is not None
            or self._error is not None
        )

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class AsyncLLM:
    """A running engine process, with tokenizer and metrics."""

    info: WorkerInfo
    """What the engine told when it was ready; unset before."""

    def __init__(
        self, client: EngineConnection, *, config: EngineConfig, tokenizer: Tokenizer, model_name: str
    ) -> None:
        """Over a client whose engine process was started (it takes a while, so begin with that)."""
        self.tokenizer = tokenizer
        self.metrics = EngineMetrics(model_name)
        self._config = config
        self._client = client
        self._processor = OutputProcessor(tokenizer, metrics=self.metrics)
        self._streams: dict[str, _Stream] = {}
        self._reader: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[WorkerInfo] | None = None
        self._death: EngineDeadError | None = None
        self._trace = config.trace.trace
        """The file that the engine writes a trace to."""

    @property
    def is_ready(self) -> bool:
        """The engine has loaded its model and lives."""
        return self._death is None and self._ready is not None and self._ready.done() and not self._ready.cancelled()

    @property
    def is_dead(self) -> bool:
        return self._death is not None

    async def start(self, *, on_progress: Callable[[int, int], None] = lambda done, total: None) -> WorkerInfo:
        """Wait until the engine is ready; `on_progress` is told the bytes of weights loaded, and all.

        Raises ConfigError or ModelError where the settings or the model don't work, EngineDeadError otherwise.
        """
        self._ready = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read(self._ready, on_progress), name="engine-reader")
        self.info = await self._ready
        return self.info

    async def wait_dead(self) -> EngineDeadError:
        """Wait until the engine has died (or was stopped)."""
        assert self._reader is not None, "the engine was not started"
        await asyncio.wait({self._reader})
        return self._death or EngineDeadError("The engine was stopped")

    async def stop(self) -> None:
        """End the engine process; open requests get an EngineDeadError."""
        if self._death is None:
            self._fail(EngineDeadError("The server is shutting down"))
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
        await self._client.stop()

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
    ) -> AsyncIterator[RequestOutput]:
        """The deltas of all `params.n` answers, as they come; with `has_progress` also, before the first delta of
        answer 0, outputs without tokens that say how far the prompt is.

        A delta has at least `interval` tokens, but for an answer's first, which comes at once, and its last; more where
        the caller takes them more slowly than they come.

        Raises InvalidRequestError, ContextLengthError or OverloadedError before the first delta, EngineDeadError at
        any time. Closing the iterator early aborts what is still running.
        """
        self._admit(prompt_token_ids, params)
        stream = _Stream(interval)
        open_ids: dict[int, str] = {}
        base_seed = params.seed or 0
        for index in range(params.n):
            engine_id = request_id if params.n == 1 else f"{request_id}-{index}"
            if engine_id in self._streams:
                raise InvalidRequestError(f"A request called {engine_id} is running already", param="request_id")
            open_ids[index] = engine_id
        try:
            for index, engine_id in open_ids.items():
                # the answers to one prompt differ by their seeds, counted up from the request's; prompt
                # log-probabilities are the same for all
                answer_params = msgspec.structs.replace(
                    params,
                    seed=nth_seed(base_seed, index),
                    n=1,
                    prompt_logprobs=params.prompt_logprobs if index == 0 else None,
                )
                self._streams[engine_id] = stream
                self._processor.add(
                    engine_id,
                    request_id=request_id,
                    index=index,
                    prompt_token_ids=prompt_token_ids,
                    params=answer_params,
                    sink=stream.put,
                    skip_special_tokens=skip_special_tokens,
                )
                self._client.send(
                    EngineRequest(
                        engine_id,
                        prompt_token_ids,
                        answer_params,
                        priority,
                        cache_salt,
                        has_progress=has_progress and index == 0,
                    )
                )
            while open_ids:
                for delta in await stream.take():
                    if delta.finish_reason is not None:
                        del self._streams[open_ids.pop(delta.index)]
                    yield delta
        finally:
            self._abort(list(open_ids.values()))

    # -- traces -------------------------------------------------------------------------------------------------

    async def start_trace(self) -> str:
        """Begin to write what every stage does to a new file, which only this user can read; its path.

        Raises InvalidRequestError where a trace is being written already.
        """
        if self._trace is not None:
            raise InvalidRequestError(f"A trace is being written already, to {self._trace}")
        fd, self._trace = tempfile.mkstemp(prefix="millstream-trace-", suffix=".json")
        os.close(fd)
        self._client.send(TraceTo(self._trace))
        return self._trace

    async def stop_trace(self) -> str:
        """End the trace; the path of its file. Raises InvalidRequestError where none is being written."""
        path, self._trace = self._trace, None
        if path is None:
            raise InvalidRequestError("No trace is being written")
        self._client.send(TraceTo(None))
        return path

    # -- one request --------------------------------------------------------------------------------------------

    def _admit(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Refuse at the door what can't be run."""
        if self._death is not None:
            raise self._death
        if not self.is_ready:
            raise OverloadedError("The model is still being loaded", code="model_loading")
        if not prompt_token_ids:
            raise InvalidRequestError("The prompt is empty", param="prompt")
        params.check_vocab(self.info.vocab_size)
        check_fits(len(prompt_token_ids), params.max_tokens, max_model_len=self.info.max_model_len)
        limits = self._config.scheduler
        if len(self._streams) + params.n > limits.max_num_open:
            raise OverloadedError(
                f"{len(self._streams)} requests are open: at most {limits.max_num_seqs} run at once "
                f"(--max-num-seqs) and {limits.max_num_waiting} wait (--max-num-waiting)"
            )

    def _abort(self, engine_ids: list[str]) -> None:
        for engine_id in engine_ids:
            self._streams.pop(engine_id, None)
        aborted = [i for i in engine_ids if self._processor.drop(i)]
        if aborted and self._death is None:
            self._client.send(AbortRequests(aborted))

    # -- the reader ---------------------------------------------------------------------------------------------

    async def _read(self, ready: asyncio.Future[WorkerInfo], on_progress: Callable[[int, int], None]) -> None:
        try:
            while True:
                for message in await self._client.receive():
                    self._take(message, ready, on_progress)
        except MillstreamError as e:
            death = e if isinstance(e, EngineDeadError) else EngineDeadError(str(e))
            if not ready.done():
                self._death = death
                ready.set_exception(e)
                return
            log.error("%s", e)
            self._fail(death)
        except Exception as e:
            log.exception("The reader of the engine's messages failed")
            self._fail(EngineDeadError(f"The reader of the engine's messages failed: {e}"))

    def _take(
        self, message: FromEngine, ready: asyncio.Future[WorkerInfo], on_progress: Callable[[int, int], None]
    ) -> None:
        match message:
            case EngineOutputs():
                stopped = self._processor.process(message)
                if stopped:
                    self._client.send(AbortRequests(stopped, FinishReason.STOP))
            case RequestRefused():
                self._refuse(message)
            case EngineProgress(done, total):
                on_progress(done, total)
            case EngineReady(info):
                if not ready.done():
                    ready.set_result(info)
            case EngineFailed():
                raise error_of(message)
            case TraceTo(path):
                self._trace = path

    def _refuse(self, refused: RequestRefused) -> None:
        stream = self._streams.get(refused.request_id)
        if stream is not None:
            self._processor.drop(refused.request_id)
            stream.fail(getattr(errors, refused.error)(refused.message, param=refused.param))

    def _fail(self, death: EngineDeadError) -> None:
        self._death = death
        for stream in self._streams.values():
            stream.fail(death)
