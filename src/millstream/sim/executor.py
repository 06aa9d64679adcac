"""A device that takes as long as a cost model says and answers with made-up tokens: an Executor without a model.

    submit ─> whose turn ─> stage 0 ─send─> stage 1 ─send─> ... ─> stage P-1 ─back─> the step lands
                               ^                                       │
                               └────────── sampled tokens ─────────────┘

Stage 0 takes steps in the order of the workers' own StepQueue, and begins with one when the tokens that it computes on
are there. From then on nothing overtakes: all its times are known. So the only event is that stage 0 turns to its next
step, and events up to now are made up for whenever somebody submits, waits or asks.

The engine's own work (`StepTimes.host`) moves the clock while the stages go on: it is hidden where a next step is with
them already, as with asynchronous scheduling, and on the way of every token where not.

Two clocks: a VirtualClock jumps (waiting for a result moves it to when the step lands), a WallClock sleeps. Imports no
torch.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

from millstream.executor.base import OnProgress, Wake
from millstream.messages import ModelRunnerOutput, PromptLogprobs, SchedulerOutput, TokenLogprobs, WorkerInfo
from millstream.request import SamplingParams
from millstream.worker.step_queue import StepQueue

_SETTLE_SHARE = 0.5
"""Of the engine's work on a step, what it does when the step has landed: that much for each step of a decision. The
rest is done once, before a decision is submitted. (benchmarks/scheduler.py: 0.4 to 0.65.)"""


class StepTimes(NamedTuple):
    """What one step takes, in seconds."""

    host: float
    """The engine process's own work on it, were it decided alone."""
    stages: Sequence[float]
    """Compute, by stage."""
    send: float
    """A link's time from one stage to the next."""
    back: float
    """From the last stage until the engine process has the tokens."""
    to_first: float = 0.0
    """From the last of several stages until the first has the tokens, which do not go through the engine."""


class StepCost(Protocol):
    """Says what a step takes."""

    num_stages: int

    def __call__(self, step: SchedulerOutput) -> StepTimes: ...


class Span(NamedTuple):
    """A stage at work on a step, from `start` to `end` (seconds of the clock)."""

    step: SchedulerOutput
    stage: int
    start: float
    end: float


class Clock(Protocol):
    """Tells the time in seconds, and lets it pass."""

    def __call__(self) -> float: ...

    def advance_to(self, when: float) -> None:
        """Let time pass until `when`; it never goes back."""
        ...

    def wait(self, when: float, wake: Wake | None) -> None:
        """Let time pass until `when`, or until `wake` can be read."""
        ...

    def spend(self, seconds: float) -> None:
        """Account for what this process itself does."""
        ...


class VirtualClock:
    """Time that passes only when somebody moves it. `next_event` tells when the next thing happens outside."""

    def __init__(self, now: float = 0.0, *, next_event: Callable[[], float] = lambda: math.inf) -> None:
        self.now = now
        self.next_event = next_event

    def __call__(self) -> float:
        return self.now

    def advance_to(self, when: float) -> None:
        if when > self.now:
            self.now = when

    def wait(self, when: float, wake: Wake | None) -> None:
        # what `wake` would tell of is the next event
        self.advance_to(when if wake is None else min(when, self.next_event()))

    def spend(self, seconds: float) -> None:
        self.now += seconds


class WallClock:
    """The time of day's pace."""

    def __call__(self) -> float:
        return time.monotonic()

    def advance_to(self, when: float) -> None:
        if (left := when - time.monotonic()) > 0:
            time.sleep(left)

    def wait(self, when: float, wake: Wake | None) -> None:
        if wake is None:
            return self.advance_to(when)
        # poll counts whole milliseconds: the rest is slept, so a newcomer may have to wait for less than one
        left = when - time.monotonic()
        if not wake.poll(None if math.isinf(left) else max(0, int(left * 1000))):
            self.advance_to(when)
        return None

    def spend(self, seconds: float) -> None:
        """Nothing: what this process does takes its time for real."""


class Pipe:
    """The stages and links: when each is free, and how long it was at work."""

    def __init__(self, num_stages: int, on_span: Callable[[Span], None] | None = None) -> None:
        self.busy_seconds = [0.0] * num_stages
        self.active_seconds = 0.0
        """Time with at least one step between its turn and its landing."""
        self.started = [0.0] * num_stages
        """When each stage begins with the step that was pushed last."""
        self._stage_free = [0.0] * num_stages
        self._link_free = [0.0] * num_stages
        self._landed = 0.0
        self._returning: deque[tuple[float, set[str]]] = deque()
        """Tokens on their way from the last stage to the first: when they are there, and whose they are."""
        self._on_span = on_span

    @property
    def first_free(self) -> float:
        """When the first stage can take its next step."""
        return self._stage_free[0]

    def push(self, step: SchedulerOutput, times: StepTimes, now: float) -> float:
        """Send a step through, whose turn comes `now`; when it lands."""
        last = len(self._stage_free) - 1
        at = now if last == 0 else self._tokens_there(step, now)
        for stage, seconds in enumerate(times.stages):
            start = self.started[stage] = max(at, self._stage_free[stage])
            end = start + seconds
            self._stage_free[stage] = end
            self.busy_seconds[stage] += seconds
            if self._on_span is not None:
                self._on_span(Span(step, stage, start, end))
            if stage < last:
                at = max(end, self._link_free[stage]) + times.send
                self._link_free[stage] = at
            else:
                at = end + times.back
        if last > 0:
            rows = zip(step.request_ids, step.num_sampled_tokens, strict=True)
            self._returning.append((end + times.to_first, {request_id for request_id, wanted in rows if wanted}))
        self.active_seconds += at - max(now, self._landed)
        self._landed = at
        return at

    def _tokens_there(self, step: SchedulerOutput, now: float) -> float:
        """From when on the first stage has all tokens that the step computes on."""
        returning = self._returning
        while returning and returning[0][0] <= now:
            returning.popleft()
        if step.forget_ids:
            # what comes back under the same name has all its tokens known
            for _, request_ids in returning:
                request_ids.difference_update(step.forget_ids)
        return next((when for when, ids in reversed(returning) if not ids.isdisjoint(step.request_ids)), now)


class MadeUpTokens:
    """Answers steps: the next of `token_ids` for each row that wants a token, never an end of text.

    Answers end by max_tokens alone. Log-probabilities, where asked for, are made up too: halving from token to token.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self._judged: dict[str, tuple[SamplingParams, int]] = {}
        """Requests that want log-probabilities: their parameters and the number of their prompt tokens."""

    def answer(self, step: SchedulerOutput) -> ModelRunnerOutput:
        known, ids = self._token_ids, step.request_ids
        if self._judged:
            for request_id in step.forget_ids:
                self._judged.pop(request_id, None)
        for new in step.new_requests:
            if new.sampling_params.logprobs is not None or new.sampling_params.prompt_logprobs is not None:
                self._judged[new.request_id] = (new.sampling_params, new.num_prompt_tokens)
        rows = [i for i, wanted in enumerate(step.num_sampled_tokens) if wanted]
        starts, counts, size = step.num_computed_tokens, step.num_scheduled_tokens, len(known)
        # by position: a request's answer is the same whatever shares its batch
        tokens = [[known[(starts[i] + counts[i]) % size]] for i in rows]
        output = ModelRunnerOutput(step.step_id, [ids[i] for i in rows], tokens, logprobs={}, prompt_logprobs={})
        if self._judged:
            self._add_logprobs(step, output)
        return output

    def _add_logprobs(self, step: SchedulerOutput, output: ModelRunnerOutput) -> None:
        for request_id, token_ids in zip(output.request_ids, output.new_token_ids, strict=True):
            if request_id in self._judged and (num_top := self._judged[request_id][0].logprobs) is not None:
                output.logprobs[request_id] = [self._logprobs(token_ids[0], num_top)]
        for i, request_id in enumerate(step.request_ids):
            if request_id not in self._judged:
                continue
            params, num_prompt_tokens = self._judged[request_id]
            start = step.num_computed_tokens[i]
            # a position is judged by the one before it, as in a real worker
            count = min(step.num_scheduled_tokens[i], num_prompt_tokens - 1 - start)
            if params.prompt_logprobs is not None and count > 0:
                found = [self._logprobs(self._token_ids[0], params.prompt_logprobs)] * count
                output.prompt_logprobs[request_id] = PromptLogprobs(start + 1, found)

    def _logprobs(self, token_id: int, num_top: int) -> TokenLogprobs:
        top = [token_id, *(t for t in self._token_ids[: num_top + 1] if t != token_id)][:num_top]
        return TokenLogprobs([token_id, *top], [-math.log(2), *(-math.log(2) * k for k in range(1, len(top) + 1))], 1)


class _Landing(Future[ModelRunnerOutput]):
    """A step that is to land: asking for its result lets time pass until then."""

    def __init__(self, executor: SimulatedExecutor) -> None:
        super().__init__()
        self._executor = executor
        self.times: StepTimes | None = None
        """What the step takes, once that is known."""
        self.lands = math.inf
        """When, once it has had its turn."""
        self.output: ModelRunnerOutput | None = None
        self.is_settled = False
        """Whether the engine has been charged for what it does now."""

    def done(self) -> bool:
        return self._executor.has_landed(self)

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        return self._executor.land(self)


class SimulatedExecutor:
    """A WaitingExecutor over a Pipe.

    Args:
        info: what a worker would tell after its start: blocks, context, vocabulary.
        cost: what each step takes.
        token_ids: what answers are made of.
        depth: steps in flight at once.
        clock: a VirtualClock, or a WallClock.
        on_span: told of every stage's work on every step.
    """

    def __init__(
        self,
        info: WorkerInfo,
        cost: StepCost,
        *,
        token_ids: Sequence[int],
        depth: int,
        clock: Clock,
        on_span: Callable[[Span], None] | None = None,
    ) -> None:
        self.depth = depth
        self.pipe = Pipe(cost.num_stages, on_span)
        self._info = info
        self._cost = cost
        self._tokens = MadeUpTokens(token_ids)
        self._clock = clock
        self._queue = StepQueue()
        self._submitted = 0.0
        """When the last decision came."""
        self._awaited: dict[int, deque[_Landing]] = {}
        """By decision: the steps that have not had their turn."""
        self._in_flight: deque[_Landing] = deque()
        """Those that have, in the order in which they land."""

    def start(self, on_progress: OnProgress) -> WorkerInfo:
        on_progress(self._info.weight_bytes, self._info.weight_bytes)
        return self._info

    def submit(self, step: SchedulerOutput) -> list[Future[ModelRunnerOutput]]:
        landings = [_Landing(self) for _ in range(step.num_steps)]
        times = landings[0].times = self._cost(step)
        self._clock.spend(times.host * (1 - _SETTLE_SHARE))
        now = self._clock()
        self._run(now)
        self._queue.put(step)
        self._awaited[step.step_id] = deque(landings)
        self._submitted = now
        self._run(now)
        return list(landings)

    def wait(self, wake: Wake | None = None) -> None:
        """Let time pass until a step has landed, or `wake` can be read."""
        now = self._clock()
        self._run(now)
        while self._in_flight and self._in_flight[0].lands <= now:
            self._in_flight.popleft()
        # stage 0 is free before the last step that it has done lands: if a step waits for its turn, another is here
        self._clock.wait(self._in_flight[0].lands if self._in_flight else math.inf, wake)

    def has_landed(self, landing: _Landing) -> bool:
        now = self._clock()
        if landing.output is None:
            self._run(now)
        return landing.lands <= now

    def land(self, landing: _Landing) -> ModelRunnerOutput:
        """Let time pass until the step has landed, and the engine has done its work on the result."""
        while landing.output is None:
            self._begin()
        self._clock.advance_to(landing.lands)
        if not landing.is_settled:
            landing.is_settled = True
            assert landing.times is not None
            self._clock.spend(landing.times.host * _SETTLE_SHARE)
        return landing.output

    def shutdown(self) -> None:
        self._in_flight.clear()

    def kill(self) -> None:
        """There is no process to end."""

    def _run(self, now: float) -> None:
        """All turns up to now."""
        while self._queue and self.pipe.first_free <= now:
            self._begin()

    def _begin(self) -> None:
        """The next step has its turn."""
        step = self._queue.take()
        landings = self._awaited[step.step_id]
        landing = landings.popleft()
        if not landings:
            del self._awaited[step.step_id]
        times = landing.times = landing.times or self._cost(step)
        output = landing.output = self._tokens.answer(step)
        landing.lands = self.pipe.push(step, times, max(self.pipe.first_free, self._submitted))
        output.stage_seconds = list(times.stages)
        output.stage_started = self.pipe.started.copy()
        output.stage_send_seconds = [*[times.send] * (len(times.stages) - 1), 0.0]
        self._in_flight.append(landing)
