"""Native sampling: the tokens of the sampler's own mathematics, row by row."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from millstream.kernels.native import NativeOps, native_available
from millstream.request import SamplingParams
from millstream.worker import sampling_math
from tests.unit.native_cases import levels, random

if not native_available():
    pytest.skip("the native kernels are not built", allow_module_level=True)

from millstream.kernels.native_sampling import draw, row_stats

VOCABS = (1, 5, 300, 5000)
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(top_k=1),
    SamplingParams(top_k=7, temperature=1.5),
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=0.05),
    SamplingParams(top_p=0.9999, temperature=2.0),
    SamplingParams(min_p=0.1),
    SamplingParams(min_p=0.02, top_p=0.7),
    SamplingParams(top_k=40, top_p=0.8, min_p=0.01),
]


def native_draw(ops: NativeOps, logits: torch.Tensor, params: list[SamplingParams], numbers: list[float]) -> list[int]:
    return draw(
        ops.runtime,
        logits,
        temperature=[p.temperature for p in params],
        top_k=[p.top_k for p in params],
        top_p=[p.top_p for p in params],
        min_p=[p.min_p for p in params],
        number=numbers,
    )


@pytest.mark.parametrize("level", levels)
@pytest.mark.parametrize("vocab", VOCABS)
def test_draws_what_the_sampler_draws(level: str, vocab: int) -> None:
    ops = NativeOps(dtype="float32", level=level, threads=2)
    numbers = [0.0, 0.1, 0.5, 0.77, 0.999]
    cases = [(p, u) for p in PARAMS for u in numbers]
    logits = random((len(cases), vocab), vocab) * 3
    found = native_draw(ops, logits, [p for p, _ in cases], [u for _, u in cases])
    for row, (params, number), token in zip(logits.numpy(), cases, found, strict=True):
        # a number that falls on a border may go to either side: sums differ in their last bits
        near = {
            sampling_math.draw(row.copy(), params=params, number=min(max(number + e, 0.0), 1 - 2.0**-53))
            for e in (-1e-6, 0.0, 1e-6)
        }
        assert token in near, f"{params} at {number}: {token}, not {near}"


@pytest.mark.parametrize("level", levels)
def test_equal_logits_are_cut_by_id(level: str) -> None:
    ops = NativeOps(dtype="float32", level=level, threads=1)
    logits = torch.zeros(3, 100)
    logits[:, 90:] = 1.0
    params = [SamplingParams(top_k=3), SamplingParams(top_k=12), SamplingParams(top_p=1e-6)]
    numbers = [1 - 2.0**-53] * 3
    # of ten likeliest tokens 90..99 the first three; all ten and 0, 1; the first alone
    assert native_draw(ops, logits, params, numbers) == [92, 99, 90]
    assert native_draw(ops, logits, params, [0.0] * 3) == [90, 0, 90]


def test_a_row_is_drawn_alike_in_every_batch() -> None:
    one, two = (NativeOps(dtype="float32", threads=n) for n in (1, 2))
    logits = random((20, 3000), 1)
    params = [PARAMS[i % len(PARAMS)] for i in range(20)]
    numbers = [i / 20 for i in range(20)]
    together = native_draw(two, logits, params, numbers)
    apart = [native_draw(one, logits[i : i + 1], [params[i]], [numbers[i]])[0] for i in range(20)]
    assert together == apart


@pytest.mark.parametrize("level", levels)
def test_the_largest_number_picks_a_possible_token(level: str) -> None:
    ops = NativeOps(dtype="float32", level=level, threads=1)
    logits = random((len(PARAMS), 700), 3)
    logits[:, 600:] = -torch.inf
    found = native_draw(ops, logits, PARAMS, [1 - 2.0**-53] * len(PARAMS))
    assert all(0 <= token < 600 for token in found)


def test_the_distribution_is_right() -> None:
    ops = NativeOps(dtype="float32", threads=2)
    n = 4000
    logits = torch.log(torch.tensor([0.5, 0.0, 0.3, 0.2])).expand(n, 4).contiguous()
    found = native_draw(ops, logits, [SamplingParams()] * n, [(i + 0.5) / n for i in range(n)])
    counts = np.bincount(found, minlength=4)
    assert counts.tolist() == pytest.approx([2000, 0, 1200, 800], abs=1)


@pytest.mark.parametrize("level", levels)
@pytest.mark.parametrize("vocab", VOCABS)
def test_row_stats(level: str, vocab: int) -> None:
    ops = NativeOps(dtype="float32", level=level, threads=2)
    logits = random((5, vocab), 0) * 5
    logits[1] = 2.0
    found = row_stats(ops.runtime, logits)
    assert found.ids_R.tolist() == logits.argmax(dim=1).tolist()
    assert torch.equal(found.best_R, logits.amax(dim=1))
    expected = logits.double().logsumexp(dim=1)
    assert (found.log_sum_R - expected).abs().max() < 1e-6
    assert found.log_sum_R[1].item() == pytest.approx(2.0 + math.log(vocab), abs=1e-6)


def test_rows_without_a_finite_logit_are_marked() -> None:
    ops = NativeOps(dtype="float32", threads=1)
    logits = torch.full((2, 40), -torch.inf)
    logits[1, 33] = -5.0
    assert native_draw(ops, logits, [SamplingParams(top_p=0.5)] * 2, [0.5] * 2) == [-1, 33]
    assert native_draw(ops, logits[:0], [], []) == []
