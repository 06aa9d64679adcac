"""What the scheduler learns of how long a step takes."""

from __future__ import annotations

import random

import pytest

from millstream.sched.cost_model import CostModel, StepCosts, StepLoad

TRUE = StepCosts(step=4e-3, token=4e-4, token_context=6e-8, decode=6e-4, decode_context=3e-7)


def true_seconds(load: StepLoad) -> float:
    return (
        TRUE.step
        + TRUE.token * load.num_tokens
        + TRUE.token_context * load.token_context
        + TRUE.decode * load.num_decodes
        + TRUE.decode_context * load.decode_context
    )


def chunk(start: int, count: int, *, num_decodes: int = 0, context: int = 300) -> StepLoad:
    load = StepLoad(num_decodes=num_decodes, decode_context=num_decodes * context)
    load.add_chunk(start, count)
    return load


def random_load(rng: random.Random) -> StepLoad:
    start, count = (rng.randint(0, 6000), rng.randint(16, 512)) if rng.random() < 0.6 else (0, 0)
    return chunk(start, count, num_decodes=rng.randint(0, 16), context=rng.randint(50, 2000))


def train(model: CostModel, rng: random.Random, count: int, *, noise: float = 0.05, slower: float = 1.0) -> None:
    for _ in range(count):
        load = random_load(rng)
        model.observe(load, true_seconds(load) * slower * rng.uniform(1 - noise, 1 + noise))


def worst_error(model: CostModel, slower: float = 1.0) -> float:
    loads = [chunk(0, 512), chunk(6000, 256), chunk(3000, 64, num_decodes=8), chunk(0, 0, num_decodes=16), chunk(0, 32)]
    return max(abs(model.predict(load) / (true_seconds(load) * slower) - 1) for load in loads)


def test_load_counts_each_tokens_context() -> None:
    load = chunk(10, 3)
    assert (load.num_tokens, load.token_context) == (3, 11 + 12 + 13)
    load.add_chunk(0, 2)
    assert (load.num_tokens, load.token_context) == (5, 39)


def test_before_any_measurement_ratios_are_those_of_the_operations() -> None:
    model = CostModel(StepCosts.from_flops(per_token=1000, per_token_context=10, flops_per_second=1e6))
    assert model.predict(chunk(0, 100)) == pytest.approx(16e-3 + 100e-3 + 5050e-5)
    assert model.chunk_seconds(0, 100) == pytest.approx(100e-3 + 5050e-5)


@pytest.mark.parametrize("start", [0, 100, 5000])
@pytest.mark.parametrize("count", [1, 16, 700])
def test_tokens_within_is_the_inverse_of_chunk_seconds(start: int, count: int) -> None:
    model = CostModel(TRUE)
    seconds = model.chunk_seconds(start, count)
    assert model.tokens_within(seconds * 1.0001, start) == count
    assert model.tokens_within(seconds * 0.9999, start) == count - 1
    assert model.tokens_within(0.0, start) == model.tokens_within(-1.0, start) == 0


def test_the_first_measurement_sets_the_scale() -> None:
    model = CostModel()
    assert worst_error(model) > 0.5
    model.observe(chunk(0, 512), true_seconds(chunk(0, 512)))
    assert model.predict(chunk(0, 512)) == pytest.approx(true_seconds(chunk(0, 512)))


@pytest.mark.parametrize("seed", range(5))
def test_it_learns_what_steps_cost(seed: int) -> None:
    model = CostModel()
    train(model, random.Random(seed), 300)
    assert worst_error(model) < 0.08


@pytest.mark.parametrize("seed", range(5))
def test_a_slow_step_now_and_then_does_little_harm(seed: int) -> None:
    rng = random.Random(seed)
    model = CostModel()
    model.observe(chunk(0, 512), 50.0)  # the very first one, say: caches were cold
    train(model, rng, 300)
    for _ in range(20):
        load = random_load(rng)
        model.observe(load, 30 * true_seconds(load))
        train(model, rng, 20)
        assert worst_error(model) < 0.2


def test_a_new_normal_is_believed() -> None:
    rng = random.Random(1)
    model = CostModel()
    train(model, rng, 300)
    train(model, rng, 150, slower=2.5)
    assert worst_error(model, slower=2.5) < 0.15


def test_hours_without_prompts_do_not_unlearn_them() -> None:
    rng = random.Random(2)
    model = CostModel()
    train(model, rng, 300)
    before = model.chunk_seconds(2000, 256)
    for _ in range(5000):
        load = chunk(0, 0, num_decodes=rng.randint(1, 16))
        model.observe(load, true_seconds(load) * rng.uniform(0.95, 1.05))
    assert model.chunk_seconds(2000, 256) == pytest.approx(before, rel=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_no_cost_is_ever_negative(seed: int) -> None:
    rng = random.Random(seed)
    model = CostModel()
    for _ in range(500):
        # times that have nothing to do with the load
        model.observe(random_load(rng), 10 ** rng.uniform(-5, 1))
        costs = model.costs
        assert min(costs.step, costs.token, costs.token_context, costs.decode, costs.decode_context) > 0


def test_a_clock_that_stands_or_jumps_is_no_measurement() -> None:
    model = CostModel(TRUE)
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        model.observe(chunk(0, 100), seconds)
    assert model.costs == TRUE
