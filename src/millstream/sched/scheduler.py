"""Decides what each step computes.

There is no prefill and no decode: a step is {request: number of tokens} under a token budget, and a request's
computed tokens catch up with its known ones. `schedule` makes a step, `update` takes its result; several steps may be
in flight between the two. The scheduler holds no tensors and knows no device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from millstream.errors import ContextLengthError
from millstream.messages import EngineOutputs, ModelRunnerOutput, NewRequest, SchedulerOutput, SchedulerStats
from millstream.request import FinishReason, Request, RequestStatus
from millstream.sched.kv_cache_manager import KVCacheManager
from millstream.sched.policy import split_budget
from millstream.sched.request_queue import RequestQueue


class _Row(NamedTuple):
    """One request's part of a step in flight; `epoch` tells whether it was preempted since."""

    request: Request
    num_tokens: int
    epoch: int
    is_sampled: bool


@dataclass
class _Batch:
    """A step being put together."""

    output: SchedulerOutput
    budget: int
    rows: list[_Row] = field(default_factory=list)


class Scheduler:
    """Owns every open request, from `add` until `update` or `abort` finishes it."""

    def __init__(self, *, kv_cache: KVCacheManager, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.kv_cache = kv_cache
        self.max_num_batched_tokens = max_num_batched_tokens
        # each running request may want a token in the same step
        self.max_num_running = min(max_num_seqs, max_num_batched_tokens)
        self.requests: dict[str, Request] = {}
        self._waiting = RequestQueue()
        self._running = RequestQueue()
        self._in_flight: dict[int, list[_Row]] = {}
        self._forget_ids: list[str] = []
        self._next_step_id = 0
        self._stats = SchedulerStats()

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, request: Request) -> None:
        """Queue a request. Raises ContextLengthError where it could never fit into the KV cache."""
        assert request.request_id not in self.requests, f"two requests are called {request.request_id}"
        if not self.kv_cache.can_ever_hold(request.max_num_tokens):
            capacity = self.kv_cache.pool.num_blocks * self.kv_cache.block_size
            raise ContextLengthError(
                f"The prompt has {request.num_prompt_tokens} tokens and up to {request.max_output_tokens} are to be "
                f"generated: the KV cache holds {capacity} tokens",
                param="max_tokens",
            )
        self.requests[request.request_id] = request
        self._waiting.add(request)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request now, wherever it is; whether it was still open."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._finish(request, reason)
        return True

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None if there is nothing to compute."""
        output = SchedulerOutput(self._next_step_id, [], [], [], [], [], [], [])
        batch = _Batch(output, self.max_num_batched_tokens)
        num_preempted = self._stats.num_preemptions
        self._schedule_running(batch)
        # what was preempted for want of blocks must not be readmitted on the blocks it gave up
        if self._stats.num_preemptions == num_preempted:
            self._schedule_waiting(batch)
        if not batch.rows:
            return None
        output.forget_ids, self._forget_ids = self._forget_ids, []
        self._in_flight[output.step_id] = batch.rows
        self._next_step_id += 1
        return output

    def update(self, result: ModelRunnerOutput) -> EngineOutputs:
        """Settle a step: what it brought, for every request with news."""
        rows = self._in_flight.pop(result.step_id)
        new_tokens = dict(zip(result.request_ids, result.new_token_ids, strict=True))
        news = EngineOutputs([], [], [], [], [], logprobs={}, prompt_logprobs=result.prompt_logprobs)
        self.kv_cache.pool.land(result.step_id)
        for row in rows:
            request = row.request
            if request.is_finished or request.num_preemptions != row.epoch:
                continue  # aborted or preempted while in flight: what landed is void
            request.num_in_flight_tokens -= row.num_tokens
            request.num_computed_tokens += row.num_tokens
            self._stats.num_step_tokens += row.num_tokens
            if row.is_sampled:
                kept = self._take_tokens(request, new_tokens[request.request_id])
                if request.request_id in result.logprobs:
                    news.logprobs[request.request_id] = result.logprobs[request.request_id][: len(kept)]
            elif request.request_id in result.prompt_logprobs:
                kept = []
            else:
                continue
            news.request_ids.append(request.request_id)
            news.new_token_ids.append(kept)
            news.finish_reasons.append(request.finish_reason)
            news.stop_reasons.append(request.stop_reason)
            news.num_cached_tokens.append(request.num_cached_tokens)
        self._stats.num_step_requests = len(rows)
        news.stats = self.take_stats()
        return news

    def take_stats(self) -> SchedulerStats:
        """Gauges as they are now, counters since the last call."""
        stats, self._stats = self._stats, SchedulerStats()
        stats.num_running = len(self._running)
        stats.num_waiting = len(self._waiting)
        stats.kv_usage = self.kv_cache.usage
        return stats

    def check_integrity(self) -> None:
        """Assert what must hold when no request is open and no step in flight."""
        assert not self.requests and not self._waiting and not self._running and not self._in_flight
        self.kv_cache.check_integrity()

    # -- running requests ---------------------------------------------------------------------------------------

    def _schedule_running(self, batch: _Batch) -> None:
        ready = [r for r in self._running if r.num_new_tokens > 0]
        shares = split_budget([r.num_new_tokens for r in ready], batch.budget)
        # in the order of rank: whoever is preempted for a request's sake comes after it, so is not in the batch yet
        for request, share in zip(ready, shares, strict=True):
            if share == 0 or request.status is not RequestStatus.RUNNING:
                continue
            block_ids = self._grow_or_preempt(request, request.num_scheduled_until + share)
            if block_ids is None:
                continue
            self._put(batch, request, share)
            batch.output.new_block_ids.append(block_ids)

    def _grow_or_preempt(self, request: Request, num_tokens: int) -> list[int] | None:
        """Blocks for the request, taken from the last in rank where none are free; None: not this step."""
        while (block_ids := self.kv_cache.grow(request, num_tokens)) is None:
            if self.kv_cache.pool.num_fenced:
                return None  # blocks come back when the steps in flight have landed
            victim = self._running.last()
            self._preempt(victim)
            if victim is request:
                return None
        return block_ids

    def _preempt(self, request: Request) -> None:
        """Take a request's blocks; it waits and computes all its tokens again, those it has made included."""
        self._running.remove(request)
        self.kv_cache.free(request, fence=self._fence(request))
        self._forget_ids.append(request.request_id)
        request.num_preemptions += 1
        request.num_computed_tokens = request.num_in_flight_tokens = 0
        request.status = RequestStatus.PREEMPTED
        self._waiting.add(request)
        self._stats.num_preemptions += 1

    # -- waiting requests ---------------------------------------------------------------------------------------

    def _schedule_waiting(self, batch: _Batch) -> None:
        while self._waiting and batch.budget > 0 and len(self._running) < self.max_num_running:
            request = self._waiting.first()
            # each running request may need a block soon: admitting into the last ones would only preempt again
            block_ids = self.kv_cache.admit(request, reserve=len(self._running))
            if block_ids is None and not self._running:
                block_ids = self.kv_cache.admit(request)
            if block_ids is None:
                return
            self._waiting.remove(request)
            self._running.add(request)
            self._count_prefix(request)
            request.status = RequestStatus.RUNNING
            batch.output.new_requests.append(
                NewRequest(
                    request_id=request.request_id,
                    token_ids=request.token_ids.copy(),
                    num_prompt_tokens=request.num_prompt_tokens,
                    sampling_params=request.sampling_params,
                    stop_token_ids=sorted(request.stop_token_ids),
                    block_ids=block_ids,
                    num_computed_tokens=request.num_computed_tokens,
                )
            )
            self._put(batch, request, min(request.num_new_tokens, batch.budget))
            batch.output.new_block_ids.append([])

    def _count_prefix(self, request: Request) -> None:
        if request.num_preemptions == 0:
            request.num_cached_tokens = request.num_computed_tokens
            self._stats.num_prompt_tokens += request.num_prompt_tokens
            self._stats.num_prefix_queries += request.num_prompt_tokens
            self._stats.num_prefix_hits += request.num_cached_tokens

    # -- both ---------------------------------------------------------------------------------------------------

    def _put(self, batch: _Batch, request: Request, share: int) -> None:
        """Make `share` tokens of the request part of the step. Its column of new blocks is left to the caller."""
        output = batch.output
        is_sampled = share == request.num_new_tokens
        output.request_ids.append(request.request_id)
        output.num_computed_tokens.append(request.num_scheduled_until)
        output.num_scheduled_tokens.append(share)
        output.is_sampled.append(is_sampled)
        batch.rows.append(_Row(request, share, request.num_preemptions, is_sampled))
        batch.budget -= share
        request.num_in_flight_tokens += share
        self.kv_cache.publish(request, request.num_scheduled_until)

    def _take_tokens(self, request: Request, token_ids: list[int]) -> list[int]:
        """Append sampled tokens up to a stop; those that count."""
        for i, token_id in enumerate(token_ids, 1):
            reason = request.append_token(token_id)
            if reason is not None:
                token_ids = token_ids[:i]
                self._finish(request, reason)
                break
        self._stats.num_generation_tokens += len(token_ids)
        return token_ids

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self.kv_cache.free(request, fence=self._fence(request))
            self._forget_ids.append(request.request_id)
        else:
            self._waiting.remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self.requests[request.request_id]

    def _fence(self, request: Request) -> int | None:
        """The last step in flight that may touch the request's blocks."""
        return self._next_step_id - 1 if request.num_in_flight_tokens else None
