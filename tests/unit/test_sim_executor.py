"""The simulated device: FIFO stages and links, both clocks, what it answers."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import NamedTuple

import zmq

from millstream.config import EngineConfig, SchedulerConfig
from millstream.engine.core import EngineCore
from millstream.executor.base import WaitingExecutor
from millstream.executor.simulated import (
    MadeUpTokens,
    Pipe,
    SimulatedExecutor,
    Span,
    StepTimes,
    VirtualClock,
    WallClock,
)
from millstream.messages import EngineRequest, NewRequest, SchedulerOutput, WorkerInfo
from millstream.request import SamplingParams

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


def step(step_id: int = 0, *, sampled: bool = True, start: int = 0, count: int = 1) -> SchedulerOutput:
    return SchedulerOutput(step_id, [], [], ["a"], [start], [count], [[]], [sampled])


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


def make_executor(times: StepTimes, clock: VirtualClock | WallClock) -> SimulatedExecutor:
    return SimulatedExecutor(INFO, Fixed(times), token_ids=[7], depth=len(times.stages), clock=clock)


def test_virtual_time_jumps_to_the_landing() -> None:
    clock = VirtualClock(100.0)
    executor = make_executor(StepTimes(0.5, (1.0, 1.0), 0.0, 0.0), clock)
    first, second = executor.submit(step(0)), executor.submit(step(1))
    assert clock.now == 101.0, "the engine's own work on two steps"
    assert not first.done()
    assert first.result().step_id == 0
    assert clock.now == 102.5
    assert second.result().step_id == 1
    assert clock.now == 103.5
    assert second.result().stage_seconds == [1.0, 1.0]
    assert first.result().stage_started == [100.5, 101.5]
    assert second.result().stage_started == [101.5, 102.5]


def test_waiting_ends_with_a_landing_or_with_what_happens_outside() -> None:
    clock = VirtualClock(0.0)
    executor = make_executor(StepTimes(0.0, (4.0,), 0.0, 0.0), clock)
    assert isinstance(executor, WaitingExecutor)
    future = executor.submit(step())
    clock.next_event = lambda: 1.0
    with zmq.Context() as context, context.socket(zmq.PAIR) as wake:
        executor.wait(wake)
        assert clock.now == 1.0 and not future.done()
        executor.wait()
        assert clock.now == 4.0 and future.done()


def test_wall_time_passes_for_real_and_a_newcomer_ends_the_wait() -> None:
    executor = make_executor(StepTimes(0.0, (0.02,), 0.0, 0.0), WallClock())
    started = time.monotonic()
    future = executor.submit(step())
    assert future.result().new_token_ids == [[7]]
    assert time.monotonic() - started >= 0.02
    slow = make_executor(StepTimes(0.0, (3600.0,), 0.0, 0.0), WallClock())
    with zmq.Context() as context, context.socket(zmq.PAIR) as wake, context.socket(zmq.PAIR) as client:
        wake.bind("inproc://wake")
        client.connect("inproc://wake")
        client.send(b"hello")
        waiting = slow.submit(step())
        slow.wait(wake)
        assert not waiting.done(), "it came back for the newcomer, an hour before the step lands"


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
    assert tokens.answer(step(sampled=False, count=4)).request_ids == []


def test_logprobs_come_where_they_were_asked_for() -> None:
    tokens = MadeUpTokens([10, 11, 12])
    params = SamplingParams(logprobs=2, prompt_logprobs=1)
    first = step(count=4)
    first.new_requests = [NewRequest("a", [1, 2, 3, 4], 4, params, [], [0], 0)]
    output = tokens.answer(first)
    (judged,) = output.logprobs["a"]
    assert judged.token_ids[0] == output.new_token_ids[0][0]
    assert len(judged.token_ids) == len(judged.logprobs) == 3
    assert output.prompt_logprobs["a"].first_position == 1
    assert len(output.prompt_logprobs["a"].logprobs) == 3
    forgetful = step(start=4)
    forgetful.forget_ids = ["a"]
    assert tokens.answer(forgetful).logprobs == {}


def test_it_loads_no_torch() -> None:
    code = (
        "import sys, millstream.executor.simulated, millstream.sim.command, millstream.sim.run, millstream.sim.plot, "
        "millstream.sim.sweep, millstream.sim.device, millstream.sim.calibrate; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
