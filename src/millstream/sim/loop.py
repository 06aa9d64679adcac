"""A run in virtual time: the real EngineCore, arrivals on their time, and what the client would have seen.

    arrivals ─front end─> EngineCore ─> SimulatedExecutor ─front end─> records
                the clock moves by the engine's own work, by waiting for a step, and when idle to the next arrival

The loop does what engine/process.py does, in its order: take what has arrived, step, pass on what is new.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import cast

from millstream.bench.metrics import RequestRecord
from millstream.config import SchedulerConfig
from millstream.engine.core import EngineCore
from millstream.errors import RequestError
from millstream.executor.base import Wake
from millstream.messages import EngineOutputs, EngineRequest, SchedulerStats
from millstream.request import SamplingParams
from millstream.sim.executor import VirtualClock
from millstream.sim.load import Arrival

BEGIN = 1.0
"""The clock at the start: in a RequestRecord a time of 0 means that it did not happen."""
MAX_SAMPLES = 1024
_WAKE = cast(Wake, object())
"""In virtual time nobody looks at the socket: the clock knows when something arrives."""


@dataclass(frozen=True, slots=True)
class ClientModel:
    """What lies between client and engine."""

    max_concurrency: int | None
    """Requests open at once; more wait in the client."""
    front_end: float
    """Seconds, half on the way in and half on the way out."""
    stream_interval: int = 1
    """Tokens in a chunk; the first one comes alone."""


@dataclass(slots=True)
class _Open:
    record: RequestRecord
    num_unsent: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """How full the engine was when a step had landed."""

    at: float
    """Seconds after the start."""
    kv_usage: float
    num_running: int
    num_waiting: int


@dataclass(slots=True)
class Occupancy:
    """The engine's gauges over time, at most MAX_SAMPLES of them: as a run gets longer they lie further apart."""

    samples: list[Sample] = field(default_factory=list)
    max_kv_usage: float = 0.0
    num_preemptions: int = 0
    num_prefix_hits: int = 0
    num_prompt_tokens: int = 0
    _every: int = 1
    _num_steps: int = 0

    @property
    def num_steps(self) -> int:
        return self._num_steps

    def add(self, at: float, stats: SchedulerStats) -> None:
        self.max_kv_usage = max(self.max_kv_usage, stats.kv_usage)
        self.num_preemptions += stats.num_preemptions
        self.num_prefix_hits += stats.num_prefix_hits
        self.num_prompt_tokens += stats.num_prompt_tokens
        if self._num_steps % self._every == 0:
            self.samples.append(Sample(at, stats.kv_usage, stats.num_running, stats.num_waiting))
            if len(self.samples) > MAX_SAMPLES:
                del self.samples[1::2]
                self._every *= 2
        self._num_steps += 1


class Simulation:
    """One load through one engine. `run` gives a record for each request, in the order of arrival."""

    def __init__(
        self,
        core: EngineCore,
        clock: VirtualClock,
        arrivals: Iterator[Arrival],
        *,
        client: ClientModel,
        scheduler: SchedulerConfig,
        on_finish: Callable[[], None] = lambda: None,
    ) -> None:
        self.occupancy = Occupancy()
        self._core = core
        self._clock = clock
        self._arrivals = arrivals
        self._client = client
        self._batch_window = scheduler.batch_window_ms / 1000
        # what AsyncLLM lets in
        self._max_open = scheduler.max_num_waiting + scheduler.max_num_seqs
        self._on_finish = on_finish
        self._open: dict[str, _Open] = {}
        self._records: list[RequestRecord] = []
        self._next: Arrival | None = next(arrivals, None)
        self._ended: deque[float] = deque()
        """With max_concurrency: when those requests ended whose place nobody has taken yet."""
        self._num_sent = 0
        clock.next_event = lambda: math.inf if (at := self._next_time()) is None else at

    def run(self) -> list[RequestRecord]:
        """Until every request has ended."""
        while True:
            was_idle = not self._core.has_work
            self._receive()
            if not self._core.has_work:
                wakes = self._next_time()
                if wakes is None:
                    return self._records
                self._clock.advance_to(wakes)
                continue
            if was_idle and self._batch_window:
                self._gather()
            outputs = self._core.step(wake=_WAKE)
            if outputs is not None:
                self._settle(outputs)
            elif (at := self._next_time()) is None or at > self._clock.now:
                raise AssertionError("the scheduler has requests, but schedules none of them")

    # -- what arrives ---------------------------------------------------------------------------------------------

    def _sends_at(self) -> float | None:
        """When the client sends its next request; None: not before another one has ended, or never."""
        if self._next is None:
            return None
        at = BEGIN + self._next.at
        limit = self._client.max_concurrency
        if limit is None or self._num_sent < limit:
            return at
        return max(at, self._ended[0]) if self._ended else None

    def _next_time(self) -> float | None:
        """When the next request reaches the engine."""
        at = self._sends_at()
        return None if at is None else at + self._client.front_end / 2

    def _receive(self) -> None:
        """Take all that has reached the engine by now."""
        while (at := self._next_time()) is not None and at <= self._clock.now:
            self._send()

    def _gather(self) -> None:
        """Wait for the batch window, or until a full batch is there, as the engine process does."""
        deadline, scheduler = self._clock.now + self._batch_window, self._core.scheduler
        while scheduler.num_waiting < scheduler.max_num_running:
            at = self._next_time()
            if at is None or at > deadline:
                self._clock.advance_to(deadline)
                return
            self._clock.advance_to(at)
            self._receive()

    def _send(self) -> None:
        arrival, start = self._next, self._sends_at()
        assert arrival is not None and start is not None
        record = RequestRecord(
            arrival=BEGIN + arrival.at,
            start=start,
            prompt_len=len(arrival.prompt_token_ids),
            has_usage=True,
        )
        self._records.append(record)
        if self._client.max_concurrency is not None and self._num_sent >= self._client.max_concurrency:
            self._ended.popleft()
        # ids in the order of arrival, also as text: requests that come at one moment run in this order
        request_id = f"{self._num_sent:08d}"
        self._num_sent += 1
        self._next = next(self._arrivals, None)
        if len(self._open) >= self._max_open:
            self._refuse(record, "429: the queue is full")
            return
        params = SamplingParams(max_tokens=arrival.output_len, temperature=0.0, ignore_eos=True, seed=0)
        try:
            self._core.add(EngineRequest(request_id, arrival.prompt_token_ids, params))
        except RequestError as e:
            self._refuse(record, f"{e.status}: {e.message}")
            return
        self._open[request_id] = _Open(record)

    def _refuse(self, record: RequestRecord, error: str) -> None:
        record.error = error
        record.end = self._clock.now + self._client.front_end / 2
        self._end(record)

    # -- what comes back ------------------------------------------------------------------------------------------

    def _settle(self, outputs: EngineOutputs) -> None:
        assert outputs.stats is not None
        self.occupancy.add(self._clock.now - BEGIN, outputs.stats)
        # one number for all rows: it is kept for every chunk of every answer
        seen = self._clock.now + self._client.front_end / 2
        interval, opened = self._client.stream_interval, self._open
        for request_id, tokens, reason in zip(
            outputs.request_ids, outputs.new_token_ids, outputs.finish_reasons, strict=True
        ):
            found, count = opened[request_id], len(tokens)
            record = found.record
            record.output_len += count
            count += found.num_unsent
            if count >= interval or reason is not None or not record.chunk_times:
                record.chunk_times.append(seen)
                record.chunk_tokens.append(count)
                count = 0
            found.num_unsent = count
            if reason is not None:
                record.end = seen
                record.finish_reason = str(reason)
                del opened[request_id]
                self._end(record)

    def _end(self, record: RequestRecord) -> None:
        if self._client.max_concurrency is not None:
            self._ended.append(record.end)
        self._on_finish()
