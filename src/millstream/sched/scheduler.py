"""Decides what each step computes.

There is no prefill and no decode: a step is {request: number of tokens} under a token budget, and a request's
computed tokens catch up with its known ones. `schedule` makes a step, `update` takes its result; several steps may be
in flight between the two. The scheduler holds no tensors and knows no device.

A token that is being sampled is pending: its place in the request is known, so the step that computes on it can be
scheduled too, and the workers fill it in. One decision may also be for several steps, with a token from each.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from millstream.errors import ContextLengthError
from millstream.messages import EngineOutputs, ModelRunnerOutput, NewRequest, SchedulerOutput, SchedulerStats
from millstream.request import FinishReason, Request, RequestStatus
from millstream.sched.backlog import Backlog
from millstream.sched.cost_model import CostModel, StepLoad
from millstream.sched.kv_cache_manager import KVCacheManager
from millstream.sched.policy import FIRST_SHARE, ChunkPolicy, FixedPolicy, StepBudget
from millstream.sched.request_queue import Overtaking, RequestQueue, WaitingQueue, rank, size


@dataclass(slots=True)
class _Batch:
    """A step being put together, then in flight: columns, one row for each request."""

    requests: list[Request] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    new_block_ids: list[list[int]] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    """Tell, when the step lands, which requests were preempted since."""
    num_sampled: list[int] = field(default_factory=list)
    """Tokens to come from each row, one from each step."""
    new_requests: list[NewRequest] = field(default_factory=list)
    num_steps: int = 1
    num_left: int = 1
    """Steps that have not landed, of as many as the longest row has."""
    load: StepLoad = field(default_factory=StepLoad)
    chunk_rows: dict[str, int] = field(default_factory=dict)
    """Which row is whose, of prompts: one may get a second share."""
    predicted_seconds: float = 0.0

    def add(self, request: Request, start: int, count: int, new_block_ids: list[int]) -> None:
        self.requests.append(request)
        self.starts.append(start)
        self.counts.append(count)
        self.new_block_ids.append(new_block_ids)
        self.epochs.append(request.num_preemptions)
        self.num_sampled.append(0)
        request.num_in_flight_tokens += count

    def sample(self, row: int, count: int, step_id: int) -> None:
        """Want `count` tokens from a row, from as many steps; all but the last are computed on as well."""
        request = self.requests[row]
        self.num_sampled[row] = count
        request.num_pending_tokens += count
        request.num_in_flight_tokens += count - 1
        request.pending_step_id = step_id

    def add_chunk(self, request: Request, count: int) -> None:
        """The next `count` tokens of a prompt, in a row of their own or after those that it has in the step."""
        start = request.num_scheduled_until
        self.load.add_chunk(start, count)
        row = self.chunk_rows.setdefault(request.request_id, len(self.requests))
        if row == len(self.requests):
            self.add(request, start, count, [])
        else:
            self.counts[row] += count
            request.num_in_flight_tokens += count


class Scheduler:
    """Owns every open request, from `add` until `update` or `abort` finishes it.

    `policy` says how much a step computes (default: as many tokens as fit). `cost_model` learns from the slowest stage
    of each step, and is the one that the policy looks at, if it looks at any. Without `chunk_pipelining` a request's
    next chunk waits until the one before has landed, and without `async_scheduling` its next token until the last one
    is known. Up to `max_steps` tokens of each answer are decided at once, with `adaptive_steps` only while no prompt
    wants to be computed.
    """

    def __init__(
        self,
        *,
        kv_cache: KVCacheManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: ChunkPolicy | None = None,
        cost_model: CostModel | None = None,
        chunk_pipelining: bool = True,
        async_scheduling: bool = False,
        num_stages: int = 1,
        max_steps: int = 1,
        adaptive_steps: bool = True,
    ) -> None:
        self.kv_cache = kv_cache
        self.max_num_batched_tokens = max_num_batched_tokens
        # each running request may want a token in the same step
        self.max_num_running = min(max_num_seqs, max_num_batched_tokens)
        self.policy = policy or FixedPolicy(max_num_batched_tokens)
        self.cost_model = cost_model or CostModel()
        self.chunk_pipelining = chunk_pipelining
        self.async_scheduling = async_scheduling
        self.num_stages = num_stages
        self.max_steps = max_steps
        self.adaptive_steps = adaptive_steps
        self.requests: dict[str, Request] = {}
        self.backlog = Backlog()
        self.predicted_seconds = 0.0
        """What the step that `update` settled last was expected to take on its slowest stage; 0: nobody asked."""
        self._waiting = WaitingQueue()
        self._running = RequestQueue()
        self._overtaking = Overtaking()
        self._in_flight: dict[int, _Batch] = {}
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
        self.backlog.put(request)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request now, wherever it is; whether it was still open."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._finish(request, reason)
        return True

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None if there is nothing to compute."""
        batch = _Batch()
        num_preempted = self._stats.num_preemptions
        decodes, prompts, num_decoding = self._ready()
        num_in_flight = len(self._in_flight)
        max_decodes = self.policy.max_decodes(num_decoding, num_ready=len(decodes), num_in_flight=num_in_flight)
        can_admit = bool(self._waiting) and len(self._running) < self.max_num_running
        # prompts would have to wait while a decision for many steps is computed
        num_steps = 1 if self.adaptive_steps and (prompts or can_admit) else self.max_steps
        long = [b.num_left for b in self._in_flight.values() if b.num_left > 1]
        if len(long) >= self.num_stages:
            # the stages have enough to do: who comes now ends with the others, and from then on they are one batch
            num_steps = min(num_steps, *long)
        self._schedule_decodes(batch, decodes, max_decodes, num_steps)
        budget = self.policy.open_step(batch.load, backlog=self.backlog.load, num_decoding=num_decoding)
        if self._stats.num_preemptions == num_preempted:
            self._schedule_prompts(batch, prompts, budget, may_admit=True)
        else:
            # what was preempted for want of blocks must not be readmitted on the blocks it gave up
            prompts = [r for r in prompts if r.status is RequestStatus.RUNNING]
            self._schedule_prompts(batch, prompts, budget, may_admit=False)
        return self._seal(batch, num_steps) if batch.requests else None

    def update(self, result: ModelRunnerOutput) -> EngineOutputs:
        """Settle a step: what it brought, for every request with news."""
        batch = self._in_flight[result.step_id]
        batch.num_left -= 1
        step = batch.num_steps - batch.num_left - 1
        self.predicted_seconds = batch.predicted_seconds if step == 0 else 0.0
        if step == 0 and result.stage_seconds:
            self.cost_model.observe(batch.load, max(result.stage_seconds))
        if batch.num_left == 0:
            del self._in_flight[result.step_id]
            # where decisions are for several steps, a later one may be done before an earlier one
            self.kv_cache.pool.land(min(self._in_flight, default=self._next_step_id) - 1)
        new_tokens = dict(zip(result.request_ids, result.new_token_ids, strict=True))
        news = EngineOutputs([], [], [], [], [], logprobs={}, prompt_logprobs=result.prompt_logprobs)
        rows = zip(batch.requests, batch.counts, batch.epochs, batch.num_sampled, strict=True)
        for request, count, epoch, num_sampled in rows:
            if step > 0 and num_sampled <= step:
                continue
            self._stats.num_step_requests += 1
            if request.is_finished or request.num_preemptions != epoch:
                continue  # aborted or preempted while in flight: what landed is void
            num_settled = count if step == 0 else 1
            self._settle(request, num_settled)
            if num_sampled:
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

    def _ready(self) -> tuple[list[Request], list[Request], int]:
        """Running requests that want one token, and more, both by rank; how many have begun to answer in all."""
        decodes: list[Request] = []
        prompts: list[Request] = []
        too_early: list[Request] = []
        num_decoding, is_async = 0, self.async_scheduling
        # before later steps the workers have sampled what is pending, or are about to
        last_step_id = self._next_step_id - self.num_stages
        for request in self._running:
            # this runs over all that are running, every step: no calls, and what is in flight is passed over soon
            num_tokens, num_pending = len(request.token_ids), request.num_pending_tokens
            if num_pending:
                num_decoding += 1
                # all but the last pending one are computed on by steps that are in flight already
                if is_async and num_pending == 1 and num_tokens + 1 < request.max_num_tokens:
                    (decodes if request.pending_step_id <= last_step_id else too_early).append(request)
                continue
            num_decoding += num_tokens > request.num_prompt_tokens
            num_new = num_tokens - request.num_computed_tokens - request.num_in_flight_tokens
            if num_new > 0 and (self.chunk_pipelining or request.num_in_flight_tokens == 0):
                (decodes if num_new == 1 else prompts).append(request)
        if too_early and not decodes and not prompts and not self._waiting:
            # the first stage has nothing better to do than to wait for the tokens that come first
            first = min(r.pending_step_id for r in too_early)
            decodes = [r for r in too_early if r.pending_step_id == first]
        return decodes, prompts, num_decoding

    def _schedule_decodes(self, batch: _Batch, decodes: list[Request], count: int, num_steps: int) -> None:
        block_size = self.kv_cache.block_size
        no_blocks: list[int] = []
        # in the order of rank: whoever is preempted for a request's sake comes after it, so is not in the batch yet
        for request in decodes:
            if len(batch.requests) == count:
                break
            if request.status is not RequestStatus.RUNNING:
                continue
            start = request.num_computed_tokens + request.num_in_flight_tokens
            # otherwise the token goes into the block of the one before
            block_ids = no_blocks if start % block_size else self._grow_or_preempt(request, start + 1)
            if block_ids is None:
                continue
            batch.add(request, start, 1, block_ids)
            batch.load.decode_context += start + 1
            self._sample(batch, len(batch.requests) - 1, num_steps)
        batch.load.num_decodes = len(batch.requests)

    def _sample(self, batch: _Batch, row: int, num_steps: int) -> None:
        """Want the next tokens from a row: as many as there are steps, blocks for them, and tokens left to answer."""
        request, count = batch.requests[row], 1
        if num_steps > 1 and (wanted := min(num_steps, request.num_wanted_tokens)) > 1:
            # the last one sampled is not computed on
            added = self.kv_cache.grow(request, batch.starts[row] + batch.counts[row] + wanted - 1)
            if added is not None:
                count = wanted
                batch.new_block_ids[row] = batch.new_block_ids[row] + added
        batch.sample(row, count, self._next_step_id)

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
        request.num_computed_tokens = request.num_in_flight_tokens = request.num_pending_tokens = 0
        request.status = RequestStatus.PREEMPTED
        self._waiting.add(request)
        self.backlog.put(request)
        self._stats.num_preemptions += 1

    # -- prompts, running and waiting ---------------------------------------------------------------------------

    def _schedule_prompts(self, batch: _Batch, prompts: list[Request], budget: StepBudget, *, may_admit: bool) -> None:
        """Offer the budget first to the first in rank, up to its share, then to all, shortest first; see policy.py."""
        if not budget.has_room(0):
            return
        head = self._waiting.first() if may_admit else None
        if head is not None and (not prompts or rank(head) < rank(prompts[0])):
            if self._admit(batch, head):
                prompts = [head, *prompts]
            elif len(self._running) < self.max_num_running:
                self._overtaking.block(head, self.kv_cache.num_blocks_for(head.num_tokens))
        shorter: list[Request] = []
        if may_admit and self._waiting:
            shorter = self._waiting.shortest(self.max_num_running - len(self._running))
        if prompts and (len(prompts) > 1 or shorter):
            self._take(batch, prompts[0], budget, share=FIRST_SHARE)
        for request in heapq.merge(sorted(prompts, key=size), shorter, key=size):
            if not budget.has_room(0):
                break
            if request.status is RequestStatus.RUNNING:
                if request.num_new_tokens > 0 and budget.has_room(request.num_scheduled_until):
                    self._take(batch, request, budget)
            elif may_admit:
                # where one finds no room, those behind it, longer or less urgent, are not asked
                may_admit = self._may_overtake(request) and self._admit(batch, request)
                if may_admit:
                    self._take(batch, request, budget)

    def _take(self, batch: _Batch, request: Request, budget: StepBudget, *, share: float = 1.0) -> None:
        """Make a chunk of the request part of the step, as the budget allows."""
        start, wanted = request.num_scheduled_until, request.num_new_tokens
        batch.add_chunk(request, budget.grant(wanted=wanted, start=start, share=share))
        self.kv_cache.publish(request, request.num_scheduled_until)

    def _may_overtake(self, request: Request) -> bool:
        return self._overtaking.may_take(self.kv_cache.num_blocks_for(request.num_tokens))

    def _admit(self, batch: _Batch, request: Request) -> bool:
        """Give a waiting request a slot and blocks for all its known tokens, if there are."""
        if len(self._running) >= self.max_num_running:
            return False
        # each running request may need a block soon: admitting into the last ones would only preempt again
        block_ids = self.kv_cache.admit(request, reserve=len(self._running))
        if block_ids is None and not self._running:
            block_ids = self.kv_cache.admit(request)
        if block_ids is None:
            return False
        self._overtaking.admit(request, len(block_ids))
        self._waiting.remove(request)
        self._running.add(request)
        self.backlog.put(request)
        self._count_prefix(request)
        request.status = RequestStatus.RUNNING
        batch.new_requests.append(
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
        return True

    def _count_prefix(self, request: Request) -> None:
        if request.num_preemptions == 0:
            request.num_cached_tokens = request.num_computed_tokens
            self._stats.num_prompt_tokens += request.num_prompt_tokens
            self._stats.num_prefix_queries += request.num_prompt_tokens
            self._stats.num_prefix_hits += request.num_cached_tokens

    # -- both ---------------------------------------------------------------------------------------------------

    def _seal(self, batch: _Batch, num_steps: int) -> SchedulerOutput:
        """The step is complete: give it a number and write it down in columns."""
        for row in batch.chunk_rows.values():
            request = batch.requests[row]
            num_left = len(request.token_ids) - batch.starts[row] - batch.counts[row]
            # a single token left is for the next step to take as a decode
            if num_left <= 1:
                self.backlog.discard(request)
            if num_left == 0:
                self._sample(batch, row, num_steps)
        batch.num_steps = batch.num_left = max(1, *batch.num_sampled)
        batch.predicted_seconds = self.cost_model.predict(batch.load)
        output = SchedulerOutput(
            step_id=self._next_step_id,
            forget_ids=self._forget_ids,
            new_requests=batch.new_requests,
            request_ids=[r.request_id for r in batch.requests],
            num_computed_tokens=batch.starts,
            num_scheduled_tokens=batch.counts,
            new_block_ids=batch.new_block_ids,
            num_sampled_tokens=batch.num_sampled,
            num_steps=batch.num_steps,
        )
        self._forget_ids = []
        self._in_flight[output.step_id] = batch
        self._next_step_id += 1
        return output

    def _settle(self, request: Request, count: int) -> None:
        """Some of the request's tokens are computed. Its answer's blocks, as they fill up, can now be found: that the
        tokens are known, and their keys and values written, is certain only here."""
        request.num_in_flight_tokens -= count
        request.num_computed_tokens += count
        self._stats.num_step_tokens += count
        if request.num_computed_tokens % self.kv_cache.block_size < count:
            self.kv_cache.publish(request, request.num_computed_tokens)

    def _take_tokens(self, request: Request, token_ids: list[int]) -> list[int]:
        """Append sampled tokens up to a stop; those that count."""
        request.num_pending_tokens -= len(token_ids)
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
            self._forget_ids.append(request.request_id)
        else:
            self._waiting.remove(request)
        self.kv_cache.free(request, fence=self._fence(request))
        self.backlog.discard(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self.requests[request.request_id]

    def _fence(self, request: Request) -> int | None:
        """The last step in flight that may touch the request's blocks."""
        return self._next_step_id - 1 if request.num_in_flight_tokens else None
