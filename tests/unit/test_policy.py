"""How much a step computes, and whose: the budgets alone, then whole traces over stages that only take time."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

import pytest

from millstream.config import SchedulerConfig
from millstream.request import Request, RequestStatus
from millstream.sched.backlog import Backlog
from millstream.sched.cost_model import CostModel, StepCosts, StepLoad
from millstream.sched.factory import make_scheduler
from millstream.sched.policy import BalancedPolicy, FixedPolicy, TimeBudget, TokenBudget
from millstream.sched.request_queue import Overtaking
from tests.fakes import FakePipeline, TimedStep, make_request, worker_info

COSTS = StepCosts(step=4e-3, token=4e-4, token_context=6e-8, decode=6e-4, decode_context=3e-7)


def seconds_of(load: StepLoad) -> float:
    return CostModel(COSTS).predict(load)


def pipeline(
    *,
    depth: int = 2,
    policy: str = "balanced",
    chunk_pipelining: bool = True,
    target_tpot_ms: float | None = None,
    budget: int = 512,
    num_blocks: int = 4000,
    max_num_seqs: int = 64,
    prior: StepCosts = COSTS,
    async_scheduling: bool = True,
) -> FakePipeline:
    scheduler = make_scheduler(
        SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            chunk_policy=policy,
            chunk_pipelining=chunk_pipelining,
            target_tpot_ms=target_tpot_ms,
            async_scheduling=async_scheduling,
        ),
        worker_info(num_blocks, 32),
        enable_prefix_caching=False,
        depth=depth,
        prior=prior,
    )
    return FakePipeline(scheduler, num_stages=depth, seconds=seconds_of)


def prompt(name: str, length: int, max_tokens: int = 1, *, at: float = 0.0, priority: int = 0) -> Request:
    return make_request(name, [1] * length, max_tokens, arrival_time=at, priority=priority)


def chunks(steps: Sequence[TimedStep], name: str) -> list[int]:
    return [n for step in steps if (n := step.chunk(name)) > 0]


# -- budgets --------------------------------------------------------------------------------------------------------


def test_token_budget_is_spent_to_the_last_token() -> None:
    budget = TokenBudget(15)
    assert budget.grant(wanted=100, start=0, share=0.5) == 8
    assert budget.grant(wanted=3, start=50) == 3
    assert budget.grant(wanted=100, start=0) == 4
    assert not budget.has_room(0)


def test_fixed_policy_takes_all_decodes_and_fills_up_with_prompts() -> None:
    policy = FixedPolicy(100)
    assert policy.max_decodes(40, num_ready=37, num_in_flight=1) == 37
    budget = policy.open_step(StepLoad(num_decodes=37), backlog=StepLoad(), num_decoding=37)
    assert budget.grant(wanted=1000, start=0) == 63


def test_time_budget_buys_fewer_tokens_where_context_is_long() -> None:
    model = CostModel(COSTS)
    granted = []
    for start in (0, 3000, 30000):
        budget = TimeBudget(512, 0.1, model)
        granted.append(budget.grant(wanted=10_000, start=start))
        # as many as fit, but for a multiple of 16 where there are many
        assert model.chunk_seconds(start, granted[-1]) <= 0.1 < model.chunk_seconds(start, granted[-1] + 16)
    assert granted == sorted(granted, reverse=True) and len(set(granted)) == 3


def test_time_budget_ends_a_prompt_rather_than_leave_a_few_tokens() -> None:
    assert TimeBudget(512, 0.1, CostModel(COSTS)).grant(wanted=246, start=0) == 246  # 240 would fit
    assert TimeBudget(243, 0.1, CostModel(COSTS)).grant(wanted=246, start=0) == 243  # but tokens are tokens


def test_some_prompt_moves_though_no_time_is_left() -> None:
    budget = TimeBudget(512, -1.0, CostModel(COSTS))
    assert budget.has_room(50_000)
    assert budget.grant(wanted=1000, start=50_000) == 4
    assert not budget.has_room(0)


def test_balanced_target_follows_backlog_between_its_bounds() -> None:
    model = CostModel(COSTS)
    policy = BalancedPolicy(512, depth=2, cost_model=model)
    full = model.predict(StepLoad(num_tokens=512, token_context=512 * 513 // 2))

    def target(num_tokens: int, *, is_decoding: bool, fixed: float = 4e-3) -> float:
        backlog = StepLoad(num_tokens, num_tokens * (num_tokens + 1) // 2)
        return policy.target_seconds(fixed, backlog=backlog, is_decoding=is_decoding)

    # f + sqrt(W f) for one follower
    work = model.chunk_seconds(0, 7000)
    assert target(7000, is_decoding=False) == pytest.approx(4e-3 + (work * 4e-3) ** 0.5)
    assert target(10, is_decoding=False) == pytest.approx(full / 4)
    assert target(1_000_000, is_decoding=False) == pytest.approx(full)
    # attention makes the same number of tokens take longer in long prompts
    mean = model.costs.step + model.chunk_seconds(0, 3000) * 512 / 3000
    assert 1.1 * full < mean < 2 * full
    assert target(3000, is_decoding=True, fixed=0.02) == pytest.approx(mean / 2)
    assert target(512, is_decoding=True, fixed=0.05) == pytest.approx(full / 2)
    # prompts get as much of a step as its decodes
    assert target(3000, is_decoding=True, fixed=1.0) == pytest.approx(2.0)


def test_target_tpot_bounds_the_target() -> None:
    policy = BalancedPolicy(512, depth=4, cost_model=CostModel(COSTS), target_tpot=0.1)
    assert policy.target_seconds(4e-3, backlog=StepLoad(9000, 9000**2 // 2), is_decoding=True) == 0.025


# -- steps of equal time --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_steps_of_a_long_prompt_take_equal_time_and_its_chunks_shrink(depth: int) -> None:
    line = pipeline(depth=depth)
    line.run([prompt("a", 20_000)])
    seconds = [step.seconds for step in line.steps]
    middle = statistics.median(seconds)
    assert all(abs(s / middle - 1) < 0.1 for s in seconds[:-1]), seconds
    sizes = chunks(line.steps, "a")
    assert sum(sizes) == 20_000
    assert sizes[:-1] == sorted(sizes[:-1], reverse=True)
    # by the costs, a token at 20,000 takes four times as long as the first
    assert sizes[-2] < sizes[0] / 3


def test_steps_of_many_prompts_and_decodes_take_equal_time() -> None:
    line = pipeline(depth=2)
    line.run([prompt(f"d{i}", 40, 400) for i in range(12)] + [prompt(f"p{i}", 4000, at=1.0) for i in range(5)])
    mixed = [s for s in line.steps if s.load.num_tokens > 0 and s.load.num_decodes > 0][2:-2]
    middle = statistics.median(s.seconds for s in mixed)
    assert len(mixed) > 50
    assert all(abs(s.seconds / middle - 1) < 0.1 for s in mixed)
    assert all(abs(s.predicted / s.seconds - 1) < 0.1 for s in mixed)


def test_chunk_pipelining_brings_the_first_token_of_a_long_prompt_sooner() -> None:
    def ttft(depth: int, policy: str, chunk_pipelining: bool) -> float:
        line = pipeline(depth=depth, policy=policy, chunk_pipelining=chunk_pipelining)
        line.run([prompt("a", 7000)])
        return line.token_times["a"][0]

    for depth in (2, 4):
        off = ttft(depth, "fixed", False)
        num_chunks = -(-7000 // 512)
        # n * P stage-steps before, n + P - 1 after
        assert off / ttft(depth, "fixed", True) == pytest.approx(num_chunks * depth / (num_chunks + depth - 1), rel=0.1)
        assert off / ttft(depth, "balanced", True) > 0.85 * depth


def test_without_chunk_pipelining_a_chunk_waits_for_the_one_before() -> None:
    line = pipeline(depth=3, policy="fixed", chunk_pipelining=False)
    line.run([prompt("a", 2000), prompt("b", 2000)])
    for name in ("a", "b"):
        mine = [step for step in line.steps if step.chunk(name)]
        assert all(late.submitted >= early.landed for early, late in itertools.pairwise(mine))


# -- decodes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize(("depth", "count"), [(2, 16), (3, 16), (4, 5), (4, 3)])
def test_a_burst_is_spread_over_the_steps_in_flight(depth: int, count: int, async_scheduling: bool) -> None:
    line = pipeline(depth=depth, async_scheduling=async_scheduling)
    line.run([prompt(f"r{i}", 8, 50) for i in range(count)])
    part = -(-count // depth)
    assert max(step.load.num_decodes for step in line.steps) == part
    # in the steady part each runs once in a round of `depth` steps, or of as many as it takes to have them all: a step
    # decided ahead, when those of several others are back, is filled up to the part
    steady = [step.load.num_decodes for step in line.steps[len(line.steps) // 3 : len(line.steps) * 2 // 3]]
    window = -(-count // part) if async_scheduling else min(depth, count)
    assert all(sum(steady[i : i + window]) == count for i in range(len(steady) - window))
    # and nobody is passed over for long: a round takes no more than `depth` steps of its own size
    longest = max(max(line.gaps(f"r{i}")[depth:]) for i in range(count))
    assert longest < 1.5 * depth * max(s.seconds for s in line.steps[depth * 2 :])


@pytest.mark.parametrize("policy", ["fixed", "balanced"])
def test_requests_at_different_stages_do_not_wait_for_each_other(policy: str) -> None:
    line = pipeline(depth=4, policy=policy)
    line.run([prompt(f"r{i}", 8, 50, at=0.006 * i) for i in range(3)])
    # one round through the stages from token to token, though a step could wait for all three
    longest = max(s.seconds for s in line.steps if s.load.num_decodes)
    # the first tokens apart, while the others' prompts are computed
    assert all(gap < 4.001 * longest for i in range(3) for gap in line.gaps(f"r{i}")[3:])


def test_fixed_policy_leaves_a_burst_in_one_step() -> None:
    line = pipeline(depth=2, policy="fixed")
    line.run([prompt(f"r{i}", 8, 50) for i in range(16)])
    assert max(step.load.num_decodes for step in line.steps) == 16


@pytest.mark.parametrize("target_tpot_ms", [60.0, 100.0, 250.0])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_target_tpot_is_kept_while_long_prompts_are_computed(depth: int, target_tpot_ms: float) -> None:
    line = pipeline(depth=depth, target_tpot_ms=target_tpot_ms, budget=2048)
    line.run([prompt(f"d{i}", 20, 400) for i in range(6)] + [prompt(f"p{i}", 6000, at=0.5) for i in range(3)])
    gaps = [gap for i in range(6) for gap in line.gaps(f"d{i}") if gap > 0]
    prompts_over = max(line.token_times[f"p{i}"][0] for i in range(3))
    during = [
        g
        for i in range(6)
        for g, t in zip(line.gaps(f"d{i}"), line.token_times[f"d{i}"], strict=False)
        if 0.5 < t < prompts_over
    ]
    assert statistics.quantiles(gaps, n=100)[98] <= target_tpot_ms / 1000 * 1.05
    # and it is made use of, not undercut at the prompts' cost
    assert statistics.mean(during) > 0.6 * min(
        target_tpot_ms / 1000, 1.5 * line.scheduler.cost_model.chunk_seconds(0, 2048) / 2
    )


@pytest.mark.parametrize("depth", [2, 4])
def test_decodes_wait_no_longer_than_before_chunks_overlapped(depth: int) -> None:
    """P99 of the gaps: no worse than with steps of fixed size and one chunk in flight, as the seed's got."""

    def run(policy: str, chunk_pipelining: bool) -> tuple[float, float]:
        line = pipeline(depth=depth, policy=policy, chunk_pipelining=chunk_pipelining)
        line.run(
            [prompt(f"r{i}", 2000 + 700 * (i % 7), 100 + 25 * (i % 8), at=2.5 * i) for i in range(24)],
        )
        gaps = [gap for i in range(24) for gap in line.gaps(f"r{i}")]
        ttft = statistics.mean(line.token_times[f"r{i}"][0] - 2.5 * i for i in range(24))
        return statistics.quantiles(gaps, n=100)[98], ttft

    before_gap, before_ttft = run("fixed", False)
    after_gap, after_ttft = run("balanced", True)
    assert after_gap <= before_gap
    assert after_ttft < before_ttft / 1.3


def test_the_policy_works_from_a_wrong_first_guess() -> None:
    guess = StepCosts.from_flops(per_token=10**9, per_token_context=10**5)
    line = pipeline(depth=2, target_tpot_ms=100.0, prior=guess)
    line.run([prompt(f"d{i}", 20, 600) for i in range(6)] + [prompt(f"p{i}", 6000, at=5.0 * i) for i in range(4)])
    late = [gap for i in range(6) for gap in line.gaps(f"d{i}")[100:]]
    assert statistics.quantiles(late, n=100)[98] <= 0.11


def test_a_coming_and_going_of_short_answers_does_not_make_steps_alternate() -> None:
    line = pipeline()
    line.run([prompt("huge", 12_000), *(prompt(f"s{i}", 400, 2, at=0.4 * i) for i in range(40))])
    seconds = [step.seconds for step in line.steps if step.chunk("huge") and step.chunk("huge") < 400][4:]
    jumps = [abs(b / a - 1) > 0.4 for a, b in itertools.pairwise(seconds)]
    assert len(jumps) > 40
    assert sum(jumps) < 4


# -- fairness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fixed", "balanced"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_short_prompt_behind_a_huge_one_starts_at_once(policy: str, depth: int) -> None:
    line = pipeline(depth=depth, policy=policy)
    line.run([prompt("huge", 50_000), prompt("short", 100, at=1.0), prompt("mid", 1000, at=1.0)])
    # it is in the step after the one that was being made when it came
    first = next(i for i, step in enumerate(line.steps) if step.chunk("short"))
    assert line.steps[first].submitted < 1.0 + 2 * max(s.seconds for s in line.steps)
    assert line.token_times["short"][0] < 1.0 + 2 * (depth + 1) * max(s.seconds for s in line.steps)
    assert line.token_times["short"][0] <= line.token_times["mid"][0] < line.token_times["huge"][0] / 5
    # the huge one moves meanwhile
    assert all(step.chunk("huge") > 0 for step in line.steps[:-1])


@pytest.mark.parametrize("policy", ["fixed", "balanced"])
def test_a_stream_of_short_prompts_does_not_starve_a_huge_one(policy: str) -> None:
    def ttft(shorts: list[Request]) -> float:
        line = pipeline(policy=policy)
        line.run([prompt("huge", 20_000), *shorts], until=200.0)
        return line.token_times["huge"][0]

    # more than the machine can do, for ever
    flood = [prompt(f"s{i}", 400, at=0.1 + 0.05 * i) for i in range(4000)]
    assert ttft(flood) < 2.3 * ttft([])


def test_a_stream_of_urgent_prompts_does_not_starve_an_older_one() -> None:
    def ttft(num_urgent: int) -> float:
        line = pipeline()
        urgent = [prompt(f"u{i}", 400, at=0.1 + 0.05 * i, priority=-1) for i in range(num_urgent)]
        line.run([prompt("old", 4000), *urgent], until=200.0)
        return line.token_times["old"][0]

    # one step of priority is worth ten seconds: those 200 come first, and no more than as much again
    assert ttft(4000) < 1.3 * ttft(200)


def test_an_urgent_prompt_gets_everything() -> None:
    line = pipeline(policy="fixed", depth=1)
    line.run([prompt("usual", 5000), prompt("short", 600, at=0.1), prompt("urgent", 5000, at=0.1, priority=-1)])
    mine = [step for step in line.steps if step.chunk("urgent")]
    assert all(step.chunk("urgent") == 512 for step in mine[:-1])
    assert line.token_times["urgent"][0] < line.token_times["short"][0]


@pytest.mark.parametrize("policy", ["fixed", "balanced"])
def test_short_prompts_pass_a_huge_one_that_finds_no_room_but_not_for_ever(policy: str) -> None:
    # 100 blocks of 32: "running" holds 50 and grows, "huge" wants 80
    line = pipeline(policy=policy, num_blocks=100)
    shorts = [prompt(f"s{i}", 200, 20, at=0.5 + 0.1 * i) for i in range(500)]
    line.run([prompt("running", 1500, 60), prompt("huge", 2500, 5, at=0.2), *shorts], until=60.0)
    first_short = line.token_times["s0"][0]
    huge = line.token_times["huge"][0]
    assert first_short < line.token_times["running"][-1] < huge
    passed = [name for name, times in line.token_times.items() if name.startswith("s") and times[0] < huge]
    # those took 7 blocks each; together no more than the 79 or so that it waits for, or they came with it
    assert 3 <= len(passed) <= 79 // 7 + 6
    assert huge < 10


def test_a_blocked_prompt_that_goes_away_blocks_nobody() -> None:
    line = pipeline(policy="fixed", num_blocks=100)
    line.scheduler.add(prompt("running", 1500, 1600))
    line.scheduler.add(prompt("huge", 2500, 5, at=0.1))
    line.run([prompt(f"s{i}", 200, 2, at=0.2 + 0.001 * i) for i in range(30)], until=1.0)
    waiting = line.scheduler.num_waiting
    assert waiting > 1
    assert line.scheduler.abort("huge")
    line.run([], until=6.0)
    assert line.scheduler.num_waiting == 0


def test_overtaking_ends_when_as_many_blocks_are_taken() -> None:
    overtaking = Overtaking()
    head = prompt("head", 100)
    assert overtaking.may_take(50)
    for _ in range(2):
        overtaking.block(head, 10)  # every step says so again
        assert not overtaking.may_take(11)
    overtaking.admit(prompt("a", 100), 7)
    overtaking.block(head, 10)
    assert overtaking.may_take(3) and not overtaking.may_take(4)
    overtaking.admit(head, 10)
    assert overtaking.may_take(50)


def test_nobody_waits_for_a_head_that_is_gone_nor_passes_one_that_was_preempted() -> None:
    overtaking = Overtaking()
    head = prompt("head", 100)
    head.status = RequestStatus.PREEMPTED
    overtaking.block(head, 10)
    assert not overtaking.may_take(1)
    head.status = RequestStatus.FINISHED
    assert overtaking.may_take(50)


def test_backlog_counts_prompts_whole() -> None:
    backlog = Backlog()
    first, second = prompt("a", 10), prompt("b", 4)
    backlog.put(first)
    backlog.put(second)
    assert backlog.load == StepLoad(14, 55 + 10)
    first.num_computed_tokens = 8  # a cached prefix
    backlog.put(first)
    assert backlog.load == StepLoad(6, 9 + 10 + 10)
    backlog.discard(second)
    backlog.discard(second)
    assert backlog.load == StepLoad(2, 19)
