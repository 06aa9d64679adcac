"""The scheduler over a fake worker that checks every read of the KV cache."""

from __future__ import annotations

import itertools
import random
from concurrent.futures import Future
from typing import Any

import pytest

from millstream.engine.core import EngineCore
from millstream.errors import ContextLengthError, InvalidRequestError
from millstream.messages import EngineRequest, ModelRunnerOutput
from millstream.request import FinishReason, SamplingParams
from millstream.sched.block_pool import BlockPool
from tests.fakes import EOS, VOCAB, FakeExecutor, expected_tokens, make_core, next_token, params

Ahead = dict[str, Any]

ROADS: list[Ahead] = [
    {},
    {"async_scheduling": True},
    {"num_scheduler_steps": 4},
    {"async_scheduling": True, "num_scheduler_steps": 3},
    {"async_scheduling": True, "num_scheduler_steps": 8, "adaptive_steps": False},
]
"""How far scheduling runs ahead of what is known."""


def add(core: EngineCore, request_id: str, prompt: list[int], p: SamplingParams, **more: object) -> None:
    core.add(EngineRequest(request_id, prompt, p, **more))  # type: ignore[arg-type]


def run(core: EngineCore) -> dict[str, list[int]]:
    """Step until nothing is open: each request's tokens."""
    tokens: dict[str, list[int]] = {}
    for _ in range(100_000):
        if not core.has_work:
            core.check_integrity()
            return tokens
        outputs = core.step()
        if outputs is not None:
            for request_id, new in zip(outputs.request_ids, outputs.new_token_ids, strict=True):
                tokens.setdefault(request_id, []).extend(new)
    raise AssertionError("requests are stuck")


def prompt_of(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB - 1), k=length)


def test_decodes_get_their_token_before_prompts() -> None:
    executor = FakeExecutor()
    core = make_core(executor, max_num_batched_tokens=60)
    for name in ("b", "d"):
        add(core, name, prompt_of(2, 5), params(9))
    core.step()
    for name, length, priority in (("a", 100, -1), ("c", 50, 1)):
        add(core, name, prompt_of(3, length), params(1), priority=priority)
    core.step()
    step = executor.worker.steps[-1]
    # "a" comes first in rank and is the most urgent, so it gets all that the decodes leave
    assert dict(zip(step.request_ids, step.num_scheduled_tokens, strict=True)) == {"a": 58, "b": 1, "d": 1}
    run(core)


def test_one_request_gets_the_models_tokens() -> None:
    core = make_core(FakeExecutor())
    add(core, "a", [1, 2, 3], params(10))
    assert run(core) == {"a": expected_tokens([1, 2, 3], 10)}


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("budget", [1, 3, 16, 500])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("ahead", ROADS)
def test_batch_chunks_and_depth_do_not_change_tokens(depth: int, budget: int, caching: bool, ahead: Ahead) -> None:
    executor = FakeExecutor(num_blocks=100, depth=depth)
    core = make_core(executor, max_num_batched_tokens=budget, enable_prefix_caching=caching, **ahead)
    prompts = {f"r{i}": prompt_of(i % 3, 5 + 7 * i) for i in range(6)}
    for name, prompt in prompts.items():
        add(core, name, prompt, params(9))
    assert run(core) == {name: expected_tokens(prompt, 9) for name, prompt in prompts.items()}
    assert all(step.num_tokens <= budget for step in executor.worker.steps)


def test_decodes_go_on_while_a_long_prompt_is_computed() -> None:
    executor = FakeExecutor()
    core = make_core(executor, max_num_batched_tokens=16)
    add(core, "short", [1, 2], params(20))
    core.step()
    add(core, "long", prompt_of(1, 100), params(2))
    before = len(executor.worker.steps)
    run(core)
    mixed = executor.worker.steps[before:]
    # 15 of each step's 16 tokens are left to the long prompt, and the short one never misses a step
    assert all("short" in step.request_ids for step in mixed[:7])
    shares = [dict(zip(s.request_ids, s.num_scheduled_tokens, strict=True)) for s in mixed[:6]]
    assert [share["long"] for share in shares] == [15] * 6


def test_chunks_of_one_prompt_are_in_flight_together() -> None:
    executor = FakeExecutor(depth=3)
    core = make_core(executor, max_num_batched_tokens=16, chunk_policy="fixed")
    add(core, "a", prompt_of(1, 48), params(1))
    core.step()
    # three steps were submitted before the first one's result was asked for
    starts = [s.num_computed_tokens for s in executor.submitted]
    assert starts == [[0], [16], [32]]
    run(core)


def test_middle_chunks_bring_no_rows() -> None:
    core = make_core(FakeExecutor(), max_num_batched_tokens=16)
    add(core, "a", prompt_of(1, 40), params(1))
    rows = []
    while core.has_work:
        outputs = core.step()
        assert outputs is not None
        rows.append(outputs.request_ids)
    assert rows == [[], [], ["a"]]


def test_a_shared_prefix_is_computed_once_even_within_a_step() -> None:
    executor = FakeExecutor()
    core = make_core(executor, max_num_batched_tokens=64)
    prompt = prompt_of(1, 18)
    for name in ("a", "b", "c"):
        add(core, name, prompt, params(4))
    assert run(core) == dict.fromkeys(("a", "b", "c"), expected_tokens(prompt, 4))
    # blocks of 4: 16 of the 18 tokens come from the first request's blocks
    assert executor.worker.steps[0].num_scheduled_tokens == [18, 2, 2]


def test_the_last_prompt_token_is_always_computed() -> None:
    executor = FakeExecutor()
    core = make_core(executor)
    for name in ("a", "b"):
        add(core, name, prompt_of(1, 8), params(1))
        run(core)
    assert executor.worker.steps[-1].num_computed_tokens == [4]
    assert executor.worker.steps[-1].num_scheduled_tokens == [4]


def test_salts_keep_prefixes_apart() -> None:
    executor = FakeExecutor()
    core = make_core(executor)
    for salt, spared in (("x", 0), ("y", 0), ("x", 12)):
        add(core, "a", prompt_of(1, 16), params(1), cache_salt=salt)
        run(core)
        assert executor.worker.steps[-1].num_computed_tokens == [spared]


def test_cached_tokens_are_reported_and_counted() -> None:
    core = make_core(FakeExecutor(), max_num_batched_tokens=64)
    prompt = prompt_of(1, 18)
    add(core, "a", prompt, params(1))
    run(core)
    add(core, "b", prompt, params(1))
    outputs = core.step()
    assert outputs is not None and outputs.stats is not None
    assert outputs.num_cached_tokens == [16]
    assert (outputs.stats.num_prefix_queries, outputs.stats.num_prefix_hits) == (18, 16)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("ahead", ROADS)
def test_preemption_loses_no_token(depth: int, ahead: Ahead) -> None:
    # 10 blocks of 4 hold 40 tokens; four requests grow to 36 each
    executor = FakeExecutor(num_blocks=10, depth=depth)
    core = make_core(executor, max_num_batched_tokens=32, **ahead)
    prompts = {f"r{i}": prompt_of(i, 6) for i in range(4)}
    for name, prompt in prompts.items():
        add(core, name, prompt, params(30))
    preempted = 0
    tokens: dict[str, list[int]] = {}
    while core.has_work:
        outputs = core.step()
        if outputs is not None:
            assert outputs.stats is not None
            preempted += outputs.stats.num_preemptions
            for name, new in zip(outputs.request_ids, outputs.new_token_ids, strict=True):
                tokens.setdefault(name, []).extend(new)
    assert preempted > 0
    assert tokens == {name: expected_tokens(prompt, 30) for name, prompt in prompts.items()}
    core.check_integrity()


def test_the_last_in_rank_is_preempted() -> None:
    executor = FakeExecutor(num_blocks=8)
    core = make_core(executor, max_num_batched_tokens=64)
    add(core, "first", prompt_of(1, 6), params(20))
    add(core, "urgent", prompt_of(2, 6), params(20), priority=-5)
    add(core, "last", prompt_of(3, 6), params(20))
    order = []
    while core.has_work:
        outputs = core.step()
        assert outputs is not None
        order += [r for r, f in zip(outputs.request_ids, outputs.finish_reasons, strict=True) if f is not None]
    assert order == ["urgent", "first", "last"]
    assert any("last" in step.forget_ids for step in executor.worker.steps[:20])


def test_waiting_long_enough_beats_priority() -> None:
    core = make_core(FakeExecutor(), max_num_seqs=1)
    # the fake clock gains a second with every call, so "old" has waited longer than one step of priority is worth
    add(core, "running", [1], params(30))
    core.step()
    add(core, "old", [2], params(1))
    for _ in range(10):
        core.step()
    add(core, "favoured", [3], params(1), priority=-1)
    order = []
    while core.has_work:
        outputs = core.step()
        assert outputs is not None
        order += [r for r, f in zip(outputs.request_ids, outputs.finish_reasons, strict=True) if f is not None]
    assert order == ["running", "old", "favoured"]


def test_end_of_text_and_stop_tokens_end_a_request() -> None:
    prompt = [5, 6]
    stop = expected_tokens(prompt, 6)[3]
    core = make_core(FakeExecutor())
    add(core, "a", prompt, params(6, stop_token_ids=(stop,)))
    reasons = []
    tokens = []
    while core.has_work:
        outputs = core.step()
        assert outputs is not None
        tokens += outputs.new_token_ids[0]
        reasons.append((outputs.finish_reasons[0], outputs.stop_reasons[0]))
    assert tokens == expected_tokens(prompt, 6)[:4]
    assert reasons == [(None, None)] * 3 + [(FinishReason.STOP, stop)]


def test_the_context_ends_a_request() -> None:
    core = make_core(FakeExecutor(max_model_len=12))
    add(core, "a", [1] * 8, SamplingParams(seed=0))
    assert len(run(core)["a"]) == 4


def test_what_can_never_run_is_refused() -> None:
    core = make_core(FakeExecutor(max_model_len=12))
    with pytest.raises(ContextLengthError, match=r"The prompt has 12 tokens.*holds 12"):
        add(core, "a", [1] * 12, params(1))
    with pytest.raises(ContextLengthError, match=r"8 tokens and max_tokens is 5, 13 in all.*holds 12"):
        add(core, "a", [1] * 8, params(5))
    with pytest.raises(InvalidRequestError, match=r"token id 1000: .* 0 to 999"):
        add(core, "a", [VOCAB], params(1))
    with pytest.raises(InvalidRequestError, match="empty"):
        add(core, "a", [], params(1))
    assert not core.has_work


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("ahead", ROADS)
def test_an_abort_in_any_phase_frees_everything_and_harms_nobody(depth: int, steps: int, ahead: Ahead) -> None:
    core = make_core(FakeExecutor(depth=depth, num_blocks=40), max_num_batched_tokens=8, **ahead)
    prompts = {"gone": prompt_of(1, 20), "stays": prompt_of(2, 15)}
    for name, prompt in prompts.items():
        add(core, name, prompt, params(5))
    tokens: list[int] = []
    for i in range(1000):
        if i == steps:
            assert core.abort("gone")
            assert not core.abort("gone")
        if not core.has_work:
            break
        outputs = core.step()
        if outputs is not None and "stays" in outputs.request_ids:
            tokens += outputs.new_token_ids[outputs.request_ids.index("stays")]
    assert tokens == expected_tokens(prompts["stays"], 5)
    core.check_integrity()


def test_min_tokens_keeps_a_sampled_stop_from_ending() -> None:
    # the sampler masks stop ids before min_tokens; should one come all the same, the request goes on
    prompt = [5, 6]
    first = next_token(prompt)
    core = make_core(FakeExecutor())
    add(core, "a", prompt, params(6, stop_token_ids=(first,), min_tokens=3))
    assert len(run(core)["a"]) == 6
    assert first != EOS


def test_a_block_stays_fenced_until_the_last_step_that_may_touch_it_has_landed() -> None:
    pool = BlockPool(2)
    blocks = pool.take(1)
    pool.publish(blocks[0], b"hash")
    pool.release(blocks, fence=5)
    # found by its hash while fenced, and given back under a later fence, or under none
    pool.touch(blocks)
    pool.release(blocks, fence=7)
    pool.touch(blocks)
    pool.release(blocks)
    assert pool.num_free == 1
    pool.land(5)
    assert pool.num_free == 1
    pool.land(7)
    assert (pool.num_free, pool.num_fenced) == (2, 0)
    pool.check_integrity()


def test_a_next_token_is_scheduled_while_the_one_before_is_in_the_making() -> None:
    executor = FakeExecutor()
    core = make_core(executor, async_scheduling=True)
    add(core, "a", [1, 2, 3], params(3))
    core.step()
    # the first step has been settled, and the second was submitted before it
    assert [s.num_computed_tokens for s in executor.submitted] == [[0], [3]]
    core.step()
    core.step()
    # max_tokens is known beforehand: no step is wasted on what comes after it
    assert [s.num_computed_tokens for s in executor.worker.steps] == [[0], [3], [4]]
    assert not core.has_work
    core.check_integrity()


@pytest.mark.parametrize("num_steps", [1, 4])
def test_a_stop_found_late_wastes_a_decision_at_most_and_is_the_end(num_steps: int) -> None:
    executor = FakeExecutor()
    core = make_core(executor, async_scheduling=True, num_scheduler_steps=num_steps)
    prompt = prompt_of(1, 7)
    wanted = expected_tokens(prompt, 20)
    assert wanted[5] not in wanted[:5]
    add(core, "a", prompt, params(20, stop_token_ids=(wanted[5],)))
    assert run(core) == {"a": wanted[:6]}
    # with one token a step, the step after the stop is the only one too many; else its whole block and one more
    assert len(executor.worker.steps) <= 6 + (1 if num_steps == 1 else 2 * num_steps)
    assert core.scheduler.kv_cache.usage == 0


def test_each_step_of_a_decision_brings_its_tokens() -> None:
    executor = FakeExecutor()
    core = make_core(executor, num_scheduler_steps=4)
    for name, count in (("a", 6), ("b", 3)):
        add(core, name, prompt_of(2, 5), params(count))
    rows = []
    while core.has_work:
        outputs = core.step()
        assert outputs is not None
        assert all(len(new) == 1 for new in outputs.new_token_ids)
        rows.append(outputs.request_ids)
    # the prompts' step is for one token each, as they are waiting; then 4 for "a" and the 2 left for "b", then the rest
    assert rows == [["a", "b"], ["a", "b"], ["a", "b"], ["a"], ["a"], ["a"]]
    assert [s.step_id for s in executor.worker.steps] == [0, 1, 1, 1, 1, 2]


def test_blocks_for_all_steps_of_a_decision_come_before_it() -> None:
    executor = FakeExecutor(block_size=4)
    core = make_core(executor, num_scheduler_steps=8)
    add(core, "a", [1, 2, 3], params(20))
    core.step()
    core.step()
    # tokens 3 to 10 are computed on, the eighth of them sampled and not
    assert executor.worker.steps[1].new_block_ids == [[1, 2]]
    run(core)


def test_where_blocks_for_many_steps_lack_one_step_is_taken() -> None:
    # 3 blocks of 4: the answer ends in the last place
    executor = FakeExecutor(num_blocks=3, block_size=4)
    core = make_core(executor, num_scheduler_steps=8, adaptive_steps=False)
    add(core, "a", [1, 2, 3], params(5))
    add(core, "b", [4, 5, 6], params(5))
    assert run(core) == {"a": expected_tokens([1, 2, 3], 5), "b": expected_tokens([4, 5, 6], 5)}


def test_a_waiting_prompt_makes_decisions_short_if_it_may() -> None:
    for adaptive in (True, False):
        executor = FakeExecutor(num_blocks=100)
        core = make_core(executor, num_scheduler_steps=8, adaptive_steps=adaptive, max_num_batched_tokens=16)
        add(core, "a", [1, 2], params(30))
        core.step()
        add(core, "b", prompt_of(1, 60), params(2))
        run(core)
        chunks = [s for s in executor.worker.steps if any(n > 1 for n in s.num_scheduled_tokens)]
        assert all((s.num_steps == 1) == adaptive for s in chunks[1:-1])


def test_a_newcomer_waits_for_one_step_of_a_decision_in_flight() -> None:
    executor = FakeExecutor()
    core = make_core(executor, async_scheduling=True, num_scheduler_steps=8)
    add(core, "a", [1, 2], params(30))
    core.step()
    core.step()
    add(core, "b", [3, 4], params(2))
    run(core)
    steps = [(s.step_id, s.request_ids) for s in executor.worker.steps]
    # "b" comes while "a" is in the first of its eight steps: it is next, then they take turns
    assert steps[:4] == [(0, ["a"]), (1, ["a"]), (2, ["b"]), (1, ["a"])]


def test_a_newcomer_joins_the_others_when_their_decision_ends() -> None:
    executor = FakeExecutor(num_blocks=100)
    core = make_core(executor, async_scheduling=True, num_scheduler_steps=8)
    add(core, "a", [1, 2], params(60))
    for _ in range(4):
        core.step()
    add(core, "b", [3, 4], params(40))
    run(core)
    names = [s.request_ids for s in executor.worker.steps]
    together = names.index(["a", "b"])
    # what is left of the decision that "b" found, each step of it for one of them, is at most 7 steps of both
    assert together <= 4 + 2 * 8
    assert names[together : together + 30] == [["a", "b"]] * 30


def test_a_request_aborted_within_a_decision_is_gone_with_the_next_step() -> None:
    executor = FakeExecutor()
    core = make_core(executor, async_scheduling=True, num_scheduler_steps=8)
    for name in ("a", "b"):
        add(core, name, prompt_of(3, 4), params(30))
    for _ in range(3):
        core.step()
    assert core.abort("a")
    outputs = core.step()
    assert outputs is not None and outputs.request_ids == ["b"]
    assert core.scheduler.num_running == 1
    # whoever comes next makes the worker forget it: it is computed no longer
    add(core, "c", prompt_of(4, 4), params(2))
    core.step()
    core.step()
    at = next(i for i, s in enumerate(executor.worker.steps) if "c" in s.request_ids)
    assert all("a" not in s.request_ids for s in executor.worker.steps[at:])
    run(core)


def test_a_stage_gets_a_decode_when_its_token_should_have_come_back() -> None:
    executor = FakeExecutor(depth=2)
    core = make_core(executor, async_scheduling=True, chunk_policy="balanced")
    for i in range(2):
        add(core, f"r{i}", prompt_of(i, 3), params(8))
    run(core)
    steps = [s.request_ids for s in executor.worker.steps if s.num_tokens == 1]
    # they take turns: in between each other's steps a token gets from the last stage to the first
    assert all(a != b for a, b in itertools.pairwise(steps[:10]))


def test_alone_a_request_does_not_wait_for_the_engine() -> None:
    executor = FakeExecutor(depth=2)
    core = make_core(executor, async_scheduling=True)
    add(core, "a", [1, 2, 3], params(5))
    core.step()
    assert [s.num_computed_tokens for s in executor.submitted] == [[0], [3]]
    run(core)


class _Racing(FakeExecutor):
    """Whoever asks whether a step has landed hears how it was before several more did."""

    def _future(self) -> Future[ModelRunnerOutput]:
        future = super()._future()
        done = future.done

        def done_before_others() -> bool:
            was_done = done()
            while self.queue:
                self.run_next()
            return was_done

        future.done = done_before_others  # type: ignore[method-assign]
        return future


@pytest.mark.parametrize("num_steps", [1, 2, 8])
def test_steps_that_land_while_one_looks_are_settled_in_order(num_steps: int) -> None:
    core = make_core(_Racing(), async_scheduling=True, num_scheduler_steps=num_steps)
    add(core, "a", [1, 2, 3], params(30))
    assert run(core) == {"a": expected_tokens([1, 2, 3], 30)}
