"""The scheduler through random traces: whatever comes in whatever order, everyone gets the tokens of a lone run.

Stages are FakeWorkers that take the same steps in the same order, each when chance lets it: a later stage is a few
steps behind an earlier one, as in a pipeline, so a block handed on too early is overwritten while it is still read.
"""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.config import SchedulerConfig
from millstream.messages import ModelRunnerOutput, SchedulerOutput
from millstream.sched.factory import make_scheduler
from millstream.worker.step_queue import StepQueue
from tests.fakes import FakeWorker, expected_tokens, make_request, next_token, worker_info

BLOCK_SIZE = 4


class Ledger:
    """Up to where each request's tokens were scheduled, to tell what is skipped or computed twice."""

    def __init__(self) -> None:
        self._ends: dict[str, int] = {}

    def check(self, step: SchedulerOutput, *, budget: int) -> None:
        assert 0 < step.num_tokens <= budget
        assert len(set(step.request_ids)) == len(step.request_ids)
        for request_id in step.forget_ids:
            self._ends.pop(request_id, None)
        for new in step.new_requests:
            self._ends[new.request_id] = new.num_computed_tokens
        assert {new.request_id for new in step.new_requests} <= set(step.request_ids)
        columns = zip(
            step.request_ids,
            step.num_computed_tokens,
            step.num_scheduled_tokens,
            step.num_sampled_tokens,
            strict=True,
        )
        for request_id, start, count, wanted in columns:
            assert start == self._ends[request_id], f"{request_id} skips tokens, or computes some twice"
            self._ends[request_id] = start + count + max(0, wanted - 1)


class Trace:
    """A scheduler and its stages, moved one random event at a time."""

    def __init__(
        self,
        seed: int,
        *,
        depth: int,
        num_blocks: int,
        budget: int,
        max_num_seqs: int,
        policy: str,
        chunk_pipelining: bool,
        caching: bool,
        async_scheduling: bool = False,
        num_scheduler_steps: int = 1,
        adaptive_steps: bool = True,
    ) -> None:
        self.random = random.Random(seed)
        self.depth, self.num_blocks, self.budget = depth, num_blocks, budget
        self.scheduler = make_scheduler(
            SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=budget,
                chunk_policy=policy,
                chunk_pipelining=chunk_pipelining,
                async_scheduling=async_scheduling,
                num_scheduler_steps=num_scheduler_steps,
                adaptive_steps=adaptive_steps,
            ),
            worker_info(num_blocks, BLOCK_SIZE),
            enable_prefix_caching=caching,
            depth=depth,
        )
        self.stages = [FakeWorker(num_blocks=num_blocks, block_size=BLOCK_SIZE) for _ in range(depth)]
        self.queues = [StepQueue() for _ in range(depth)]
        self.held: SchedulerOutput | None = None
        # before each stage but the first: the order in which the one before it took its steps
        self.orders: list[deque[int]] = [deque() for _ in range(depth)]
        # tokens on their way from the last stage to the first
        self.returning: Counter[str] = Counter()
        self.done: deque[ModelRunnerOutput] = deque()
        self.max_in_flight = depth + async_scheduling
        self.in_flight: dict[int, SchedulerOutput] = {}
        self.num_landed: Counter[int] = Counter()
        self.num_preempted = self.num_cached = self.num_aborted = 0
        self.ledger = Ledger()
        self.chunk_pipelining = chunk_pipelining
        self.wanted: dict[str, list[int]] = {}
        self.got: dict[str, list[int]] = {}
        self.aborted: set[str] = set()

    def add(self, name: str) -> None:
        rng = self.random
        capacity = self.num_blocks * BLOCK_SIZE
        length = rng.randint(1, capacity - 1 if rng.random() < 0.2 else min(14, capacity - 1))
        count = min(rng.randint(1, 12), capacity - length)
        prompt = random.Random(rng.randint(0, 2)).choices(range(900), k=length)
        wanted = expected_tokens(prompt, count)
        stops = rng.sample(wanted, 1) if rng.random() < 0.3 else []
        request = make_request(
            name,
            prompt,
            count,
            priority=rng.randint(-1, 1),
            arrival_time=float(len(self.wanted)),
            stop_token_ids=stops,
        )
        self.scheduler.add(request)
        self.wanted[name] = wanted[: wanted.index(stops[0]) + 1] if stops else wanted

    def abort(self) -> None:
        if self.scheduler.requests:
            name = self.random.choice(sorted(self.scheduler.requests))
            assert self.scheduler.abort(name)
            self.aborted.add(name)

    def schedule(self) -> bool:
        if len(self.in_flight) == self.max_in_flight:
            return False
        in_flight = {
            name
            for step in self.in_flight.values()
            for name, wanted in zip(step.request_ids, step.num_sampled_tokens, strict=True)
            if max(1, wanted) > self.num_landed[step.step_id]
        }
        epochs = {r.request_id: r.num_preemptions for r in self.scheduler.requests.values()}
        step = self.scheduler.schedule()
        requests = self.scheduler.requests.values()
        if all(r.num_new_tokens <= 1 for r in requests if r.num_tokens > 1):
            assert self.scheduler.backlog.load.num_tokens <= sum(r.num_tokens == 1 for r in requests)
        if step is None:
            return False
        new_ids = {new.request_id for new in step.new_requests}
        for name in new_ids:
            again = self.scheduler.requests[name].num_preemptions > epochs[name]
            assert not again, "admitted on the blocks that it was made to give up"
        if not self.chunk_pipelining:
            chunks = zip(step.request_ids, step.num_computed_tokens, strict=True)
            prompts = {n for n, start in chunks if start < self.scheduler.requests[n].num_prompt_tokens}
            assert not prompts & in_flight - new_ids, "a chunk is scheduled before the one before has landed"
        self.ledger.check(step, budget=self.budget)
        self.in_flight[step.step_id] = step
        for queue in self.queues:
            queue.put(step)
        return True

    def compute(self, stage: int) -> bool:
        """A stage does its next step, if there is one and what it needs has come."""
        order = self.orders[stage]
        if not (order if stage else self.held or self.queues[0]):
            return False
        if stage == 0:
            # the first stage takes a step and then waits for the tokens that it computes on
            self.held = step = self.held or self.queues[0].take()
            if any(self.returning[name] for name in step.request_ids):
                return False
            self.held = None
        else:
            step = self.queues[stage].take(order.popleft())
        result = self.stages[stage].execute(step)
        sampled = [n for n, wanted in zip(step.request_ids, step.num_sampled_tokens, strict=True) if wanted]
        if stage == 0:
            self.returning.update(sampled)
        if stage + 1 < self.depth:
            self.orders[stage + 1].append(step.step_id)
        else:
            self.returning.subtract(sampled)
            self.done.append(result)
        return True

    def land(self) -> bool:
        if not self.done:
            return False
        result = self.done.popleft()
        result.stage_seconds = [self.random.uniform(0.01, 0.1) for _ in self.stages]
        news = self.scheduler.update(result)
        self.num_landed[result.step_id] += 1
        if self.num_landed[result.step_id] == self.in_flight[result.step_id].num_steps:
            del self.in_flight[result.step_id]
        assert news.stats is not None
        self.num_preempted += news.stats.num_preemptions
        self.num_cached += news.stats.num_prefix_hits
        for name, new in zip(news.request_ids, news.new_token_ids, strict=True):
            assert name not in self.aborted
            self.got.setdefault(name, []).extend(new)
        return True

    def move(self) -> None:
        """One thing happens, any of those that can."""
        moves = [self.schedule, self.land, *(lambda s=s: self.compute(s) for s in range(self.depth))]
        self.random.shuffle(moves)
        # with nothing in flight there is always something to schedule
        assert any(move() for move in moves) or not self.scheduler.has_work, "requests are stuck"

    def run(self) -> None:
        for i in range(150):
            if self.random.random() < 0.15:
                self.add(f"r{i}")
            if self.random.random() < 0.04:
                self.abort()
            self.move()
        for _ in range(20_000):
            if not self.scheduler.has_work and not self.in_flight:
                break
            self.move()
        self.check()

    def check(self) -> None:
        assert not self.scheduler.has_work, "requests are stuck"
        self.scheduler.check_integrity()
        assert self.scheduler.kv_cache.usage == 0
        for name, tokens in self.wanted.items():
            if name in self.aborted:
                assert tokens[: len(self.got.get(name, []))] == self.got.get(name, [])
            else:
                assert self.got[name] == tokens


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    depth=st.integers(1, 4),
    num_blocks=st.integers(4, 30),
    budget=st.integers(1, 40),
    max_num_seqs=st.integers(1, 6),
    policy=st.sampled_from(["fixed", "balanced"]),
    chunk_pipelining=st.booleans(),
    caching=st.booleans(),
    async_scheduling=st.booleans(),
    num_scheduler_steps=st.sampled_from([1, 1, 2, 4, 8]),
    adaptive_steps=st.booleans(),
)
def test_random_traces(
    seed: int,
    depth: int,
    num_blocks: int,
    budget: int,
    max_num_seqs: int,
    policy: str,
    chunk_pipelining: bool,
    caching: bool,
    async_scheduling: bool,
    num_scheduler_steps: int,
    adaptive_steps: bool,
) -> None:
    Trace(
        seed,
        depth=depth,
        num_blocks=num_blocks,
        budget=budget,
        max_num_seqs=max_num_seqs,
        policy=policy,
        chunk_pipelining=chunk_pipelining,
        caching=caching,
        async_scheduling=async_scheduling,
        num_scheduler_steps=num_scheduler_steps,
        adaptive_steps=adaptive_steps,
    ).run()


@pytest.mark.parametrize("policy", ["fixed", "balanced"])
@pytest.mark.parametrize("chunk_pipelining", [True, False])
@pytest.mark.parametrize("num_scheduler_steps", [1, 4])
def test_traces_are_hard_enough(policy: str, chunk_pipelining: bool, num_scheduler_steps: int) -> None:
    """Preemptions, prefix hits and aborts do occur in them."""
    preempted = cached = aborted = 0
    for seed in range(25):
        trace = Trace(
            seed,
            depth=3,
            num_blocks=12,
            budget=20,
            max_num_seqs=6,
            policy=policy,
            chunk_pipelining=chunk_pipelining,
            caching=True,
            async_scheduling=True,
            num_scheduler_steps=num_scheduler_steps,
        )
        trace.run()
        preempted += trace.num_preempted
        cached += trace.num_cached
        aborted += len(trace.aborted)
    assert preempted > 10 and cached > 50 and aborted > 30


def test_one_slot_and_tiny_chunks_do_not_stall() -> None:
    trace = Trace(
        1, depth=2, num_blocks=30, budget=2, max_num_seqs=1, policy="balanced", chunk_pipelining=True, caching=False
    )
    for i in range(4):
        trace.add(f"r{i}")
    for _ in range(20_000):
        if not trace.scheduler.has_work and not trace.in_flight:
            break
        trace.move()
    trace.check()


def test_the_fakes_model_depends_on_all_tokens() -> None:
    assert next_token([1, 2, 3]) != next_token([1, 2, 4])
