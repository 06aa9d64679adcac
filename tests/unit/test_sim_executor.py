"""The simulated device: FIFO stages and links, both clocks, what it answers."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from typing import NamedTuple

import zmq

from millstream.config import EngineConfig, SchedulerConfig
from millstream.engine.core import EngineCore
from millstream.executor.base import WaitingExecutor
from millstream.messages import EngineRequest, NewRequest, SchedulerOutput, WorkerInfo
from millstream.request import SamplingParams
from millstream.sim.executor import (
    MadeUpTokens,
    Pipe,
    SimulatedExecutor,
    Span,
    StepTimes,
    VirtualClock,
    WallClock,
)

INFO = WorkerInfo(
    num_blocks=100,
    block_size=8,
    max_model_len=400,
    vocab_size=100,
    eos_token_ids=[],
    weight_bytes=0,
    kv_cache_bytes=0,
    dtype="float32",
    phases={},
)


class Fixed(NamedTuple):
    """A step cost that never changes."""

    times: StepTimes

    @property
    def num_stages(self) -> int:
        return len(self.times.stages)

    def __call__(self, step: SchedulerOutput) -> StepTimes:
        return self.times


def step(
    step_id: int = 0, *, name: str | None = None, num_sampled: int = 1, start: int = 0, count: int = 1
) -> SchedulerOutput:
    """A decision for one request, by default one of its own."""
    name = name or f"r{step_id}"
    return SchedulerOutput(step_id, [], [], [name], [start], [count], [[]], [num_sampled], max(1, num_sampled))


def test_a_step_goes_through_all_stages_and_links() -> None:
    pipe = Pipe(3)
    assert pipe.push(step(), StepTimes(0.0, (1.0, 2.0, 4.0), 0.5, 0.25), 10.0) == 10 + 1 + 0.5 + 2 + 0.5 + 4 + 0.25


def test_stages_take_steps_in_order_and_one_at_a_time() -> None:
    spans: list[Span] = []
    pipe = Pipe(2, spans.append)
    slow_last = StepTimes(0.0, (1.0, 3.0), 0.0, 0.0)
    assert pipe.push(step(0), slow_last, 0.0) == 4.0
    # stage 0 is free again at 1, stage 1 not before 4
    assert pipe.push(step(1), slow_last, 0.0) == 7.0
    assert [(s.step.step_id, s.stage, s.start, s.end) for s in spans] == [
        (0, 0, 0.0, 1.0),
        (0, 1, 1.0, 4.0),
        (1, 0, 1.0, 2.0),
        (1, 1, 4.0, 7.0),
    ]
    assert pipe.busy_seconds == [2.0, 6.0]
    assert pipe.active_seconds == 7.0


def test_links_carry_one_step_at_a_time() -> None:
    pipe = Pipe(2)
    times = StepTimes(0.0, (1.0, 0.0), 5.0, 0.0)
    assert pipe.push(step(0), times, 0.0) == 6.0
    assert pipe.push(step(1), times, 0.0) == 11.0


def test_idle_time_is_not_active_time() -> None:
    pipe = Pipe(1)
    times = StepTimes(0.0, (1.0,), 0.0, 0.0)
    pipe.push(step(0), times, 0.0)
    pipe.push(step(1), times, 5.0)
    assert pipe.active_seconds == 2.0


def make_executor(
    times: StepTimes, clock: VirtualClock | WallClock, spans: list[Span] | None = None
) -> SimulatedExecutor:
    on_span = None if spans is None else spans.append
    return SimulatedExecutor(INFO, Fixed(times), token_ids=[7], depth=len(times.stages), clock=clock, on_span=on_span)


def test_virtual_time_jumps_to_the_landing() -> None:
    clock = VirtualClock(100.0)
    executor = make_executor(StepTimes(0.5, (1.0, 1.0), 0.0, 0.0), clock)
    (first,), (second,) = executor.submit(step(0)), executor.submit(step(1))
    assert clock.now == 100.5, "half of the engine's own work on two steps"
    assert not first.done()
    assert first.result().step_id == 0
    assert clock.now == 102.25 + 0.25, "it lands, and the engine deals with it"
    assert second.result().step_id == 1
    assert clock.now == 103.25 + 0.25
    assert second.result().stage_seconds == [1.0, 1.0]
    assert clock.now == 103.5, "asking again costs nothing"
    assert first.result().stage_started == [100.25, 101.25]
    assert second.result().stage_started == [101.25, 102.25]


def test_waiting_ends_with_a_landing_or_with_what_happens_outside() -> None:
    clock = VirtualClock(0.0)
    executor = make_executor(StepTimes(0.0, (4.0,), 0.0, 0.0), clock)
    assert isinstance(executor, WaitingExecutor)
    (future,) = executor.submit(step())
    clock.next_event = lambda: 1.0
    with zmq.Context() as context, context.socket(zmq.PAIR) as wake:
        executor.wait(wake)
        assert clock.now == 1.0 and not future.done()
        executor.wait()
        assert clock.now == 4.0 and future.done()


def test_wall_time_passes_for_real_and_a_newcomer_ends_the_wait() -> None:
    executor = make_executor(StepTimes(0.0, (0.02,), 0.0, 0.0), WallClock())
    started = time.monotonic()
    first, second = executor.submit(step(num_sampled=2))
    assert first.result().new_token_ids == [[7]]
    assert time.monotonic() - started >= 0.02
    assert second.result().new_token_ids == [[7]]
    assert time.monotonic() - started >= 0.04
    slow = make_executor(StepTimes(0.0, (3600.0,), 0.0, 0.0), WallClock())
    with zmq.Context() as context, context.socket(zmq.PAIR) as wake, context.socket(zmq.PAIR) as client:
        wake.bind("inproc://wake")
        client.connect("inproc://wake")
        client.send(b"hello")
        (waiting,) = slow.submit(step())
        slow.wait(wake)
        assert not waiting.done(), "it came back for the newcomer, an hour before the step lands"


# -- several steps for a decision ----------------------------------------------------------------------------------


def starts(spans: list[Span], stage: int) -> list[tuple[int, float]]:
    return [(span.step.step_id, span.start) for span in spans if span.stage == stage]


def test_a_newcomer_comes_between_two_steps_of_a_decision() -> None:
    clock, spans = VirtualClock(), list[Span]()
    executor = make_executor(StepTimes(0.0, (1.0,), 0.0, 0.25), clock, spans)
    block = executor.submit(step(0, num_sampled=3))
    clock.advance_to(0.5)
    (newcomer,) = executor.submit(step(1))
    executor.wait()
    assert clock.now == 1.25 and block[0].done() and not newcomer.done()
    assert newcomer.result().step_id == 1
    assert clock.now == 2.25
    assert [future.result().new_token_ids for future in block] == [[[7]]] * 3
    assert clock.now == 4.25
    assert starts(spans, 0) == [(0, 0.0), (1, 1.0), (0, 2.0), (0, 3.0)]


def test_what_comes_later_does_not_change_what_has_begun() -> None:
    clock, spans = VirtualClock(), list[Span]()
    executor = make_executor(StepTimes(0.0, (1.0,), 0.0, 0.0), clock, spans)
    block = executor.submit(step(0, num_sampled=2))
    # nobody looked at the clock meanwhile: the second step has begun at 1 all the same
    clock.advance_to(1.5)
    executor.submit(step(1))
    assert block[1].result().step_id == 0
    assert clock.now == 2.0


def test_two_decisions_take_turns_in_two_stages() -> None:
    clock, spans = VirtualClock(), list[Span]()
    executor = make_executor(StepTimes(0.0, (1.0, 1.0), 0.0, 0.0), clock, spans)
    block, other = executor.submit(step(0, num_sampled=2)), executor.submit(step(1, num_sampled=2))
    assert other[1].result().step_id == 1
    assert starts(spans, 0) == [(0, 0.0), (1, 1.0), (0, 2.0), (1, 3.0)]
    assert starts(spans, 1) == [(0, 1.0), (1, 2.0), (0, 3.0), (1, 4.0)]
    assert block[1].done() and clock.now == 5.0


def test_the_first_stage_waits_for_tokens_on_their_way_back() -> None:
    clock, spans = VirtualClock(), list[Span]()
    times = StepTimes(0.0, (1.0, 1.0), 0.5, 9.0, to_first=0.25)
    executor = make_executor(times, clock, spans)
    executor.submit(step(0, num_sampled=2))
    clock.advance_to(1.75)
    # stage 0 has turned to the second step and waits: who comes now is too late to go first
    executor.submit(step(1))
    (last,) = executor.submit(step(2, name="r0"))
    assert last.result().step_id == 2
    assert starts(spans, 0) == [(0, 0.0), (0, 2.75), (1, 3.75), (2, 5.5)]
    assert starts(spans, 1) == [(0, 1.5), (0, 4.25), (1, 5.25), (2, 7.0)]


def test_a_forgotten_request_is_in_no_later_step() -> None:
    executor = make_executor(StepTimes(0.0, (1.0,), 0.0, 0.0), VirtualClock())
    _, second = executor.submit(step(0, num_sampled=2))
    later = step(1)
    later.forget_ids = ["r0"]
    executor.submit(later)
    assert second.result().request_ids == []


def test_a_request_that_is_back_after_preemption_waits_for_no_token() -> None:
    clock, spans = VirtualClock(), list[Span]()
    executor = make_executor(StepTimes(0.0, (1.0, 1.0), 0.0, 0.0), clock, spans)
    executor.submit(step(0))
    again = step(1, name="r0")
    again.forget_ids = ["r0"]
    (future,) = executor.submit(again)
    assert future.result().new_token_ids == [[7]]
    assert starts(spans, 0) == [(0, 0.0), (1, 1.0)]


# -- asynchronous scheduling ---------------------------------------------------------------------------------------


def token_times(*, host: float, is_async: bool, num_steps: int = 1) -> list[float]:
    """When the tokens of a lonely answer of 6 are there, on a device that takes 1 s a step."""
    clock = VirtualClock()
    config = SchedulerConfig(async_scheduling=is_async, num_scheduler_steps=num_steps)
    core = EngineCore(EngineConfig(scheduler=config), make_executor(StepTimes(host, (1.0,), 0.0, 0.0), clock))
    core.add(EngineRequest("a", [1] * 4, SamplingParams(max_tokens=6, ignore_eos=True)))
    times: list[float] = []
    while core.has_work:
        outputs = core.step()
        assert outputs is not None
        times += [clock.now for row in outputs.new_token_ids for _ in row]
    return times


def test_the_engines_time_is_on_the_way_of_every_token_or_hidden() -> None:
    # half a host before and after each step
    assert token_times(host=0.5, is_async=False) == [1.5, 3.0, 4.5, 6.0, 7.5, 9.0]
    assert token_times(host=0.5, is_async=True) == [1.5, 2.5, 3.5, 4.5, 5.5, 6.5]


def test_an_engine_slower_than_its_device_sets_the_pace() -> None:
    times = token_times(host=2.0, is_async=True)
    # beside the last step there is nothing left to decide
    assert [b - a for a, b in itertools.pairwise(times)] == [2.0, 2.0, 2.0, 2.0, 1.0]


def test_a_decision_for_several_steps_is_made_once() -> None:
    # alone the prompt's step, then three and two: 0.25 to decide, 1 for each step, 0.25 from its end to the token
    assert token_times(host=0.5, is_async=False, num_steps=3) == [1.5, 3.0, 4.0, 5.0, 6.5, 7.5]


def test_the_engine_runs_over_it() -> None:
    core = EngineCore(
        EngineConfig(scheduler=SchedulerConfig(max_num_batched_tokens=16)),
        make_executor(StepTimes(0.0, (0.0,), 0.0, 0.0), WallClock()),
    )
    core.add(EngineRequest("a", [1] * 40, SamplingParams(max_tokens=3, ignore_eos=True)))
    tokens = []
    while core.has_work:
        outputs = core.step()
        if outputs is not None:
            tokens += [t for row in outputs.new_token_ids for t in row]
    assert tokens == [7, 7, 7]
    core.check_integrity()


def test_answers_depend_on_the_position_alone() -> None:
    tokens = MadeUpTokens([10, 11, 12])
    assert tokens.answer(step(start=0, count=4)).new_token_ids == [[11]]
    assert tokens.answer(step(start=3, count=1)).new_token_ids == [[11]]
    assert tokens.answer(step(start=4, count=1)).new_token_ids == [[12]]
    assert tokens.answer(step(num_sampled=0, count=4)).request_ids == []


def test_logprobs_come_where_they_were_asked_for() -> None:
    tokens = MadeUpTokens([10, 11, 12])
    params = SamplingParams(logprobs=2, prompt_logprobs=1)
    first = step(name="a", count=4)
    first.new_requests = [NewRequest("a", [1, 2, 3, 4], 4, params, [], [0], 0)]
    output = tokens.answer(first)
    (judged,) = output.logprobs["a"]
    assert judged.token_ids[0] == output.new_token_ids[0][0]
    assert len(judged.token_ids) == len(judged.logprobs) == 3
    assert output.prompt_logprobs["a"].first_position == 1
    assert len(output.prompt_logprobs["a"].logprobs) == 3
    forgetful = step(name="a", start=4)
    forgetful.forget_ids = ["a"]
    assert tokens.answer(forgetful).logprobs == {}


def test_it_loads_no_torch() -> None:
    code = (
        "import sys, millstream.sim.executor, millstream.sim.command, millstream.sim.run, millstream.sim.plot, "
        "millstream.sim.sweep, millstream.sim.device, millstream.sim.calibrate; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
