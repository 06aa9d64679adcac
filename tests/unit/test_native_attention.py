"""Native attention and cache writes: against float64 at every level, and the same bits on every road."""

from __future__ import annotations

import pytest
import torch

from millstream.kernels.native import NativeOps, native_available
from tests.unit.native_cases import (
    Heads,
    PagedRequests,
    alone,
    chunked,
    dtypes,
    levels,
    relative_error,
    tolerances,
    whole,
)

pytestmark = pytest.mark.skipif(not native_available(), reason="the native kernels are not built")

GQA = Heads(num_heads=9, num_kv_heads=3, head_dim=64)
SHAPES = [
    GQA,
    Heads(num_heads=4, num_kv_heads=4, head_dim=16),
    Heads(num_heads=6, num_kv_heads=1, head_dim=80, has_norm=True),
    Heads(num_heads=8, num_kv_heads=2, head_dim=128, has_norm=True),
    Heads(num_heads=2, num_kv_heads=1, head_dim=256),
    Heads(num_heads=50, num_kv_heads=1, head_dim=16),  # more heads of a kv head than rows of a tile
    Heads(num_heads=4, num_kv_heads=2, head_dim=32, window=5),
    Heads(num_heads=4, num_kv_heads=2, head_dim=48, window=70),
]
LENS = (1, 37, 265, 64, 2)


@pytest.mark.parametrize("level", levels)
@pytest.mark.parametrize("dtype", dtypes)
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_agrees_with_float64(level: str, dtype: str, heads: Heads) -> None:
    ops = NativeOps(dtype=dtype, level=level, threads=2)
    requests = PagedRequests(LENS, heads)
    for found, expected in zip(requests.run(ops, whole(LENS)), requests.expected(ops.dtype), strict=True):
        assert relative_error(found, expected) < tolerances[dtype]


@pytest.mark.parametrize("dtype", dtypes)
@pytest.mark.parametrize(("heads", "block_size"), [(SHAPES[0], 32), (SHAPES[2], 16), (SHAPES[5], 48), (SHAPES[7], 32)])
def test_same_bits_on_every_road(dtype: str, heads: Heads, block_size: int) -> None:
    check_roads(levels[-1], dtype, heads, block_size, (260, 33, 129, 1))


@pytest.mark.parametrize("level", levels[:-1])
@pytest.mark.parametrize("dtype", dtypes)
def test_same_bits_at_every_level(level: str, dtype: str) -> None:
    check_roads(level, dtype, Heads(num_heads=4, num_kv_heads=2, head_dim=32, window=70), 32, (100, 33, 1))


UNEVEN = (1.0, 60.0, 0.1, 5.0, 200.0)
"""Factors of keys with which some tokens' weights are 2^100 times those of the tokens before."""


@pytest.mark.parametrize("heads", [GQA, SHAPES[6], SHAPES[7]], ids=str)
def test_scores_that_grow_far_above_the_first_ones(heads: Heads) -> None:
    check_roads(levels[-1], "bfloat16", heads, 32, (270, 33, 129), key_factors=UNEVEN)
    requests = PagedRequests(LENS, heads, key_factors=UNEVEN)
    plain, best = (NativeOps(dtype="bfloat16", level=level, threads=2) for level in (levels[0], levels[-1]))
    for found, expected in zip(requests.run(best, whole(LENS)), requests.run(plain, whole(LENS)), strict=True):
        assert relative_error(found, expected) < tolerances["bfloat16"]


def check_roads(
    level: str,
    dtype: str,
    heads: Heads,
    block_size: int,
    lens: tuple[int, ...],
    key_factors: tuple[float, ...] = (1.0,),
) -> None:
    one, two = (NativeOps(dtype=dtype, level=level, threads=n) for n in (1, 2))
    requests = PagedRequests(lens, heads, block_size=block_size, key_factors=key_factors)
    expected = requests.run(one, alone(lens))
    roads = {
        "batch": whole(lens),
        "7": chunked(lens, 7),
        "64": chunked(lens, 64),
        "most, then decodes": [[(r, min(n, lens[0] - 9)) for r, n in enumerate(lens)], *tail(lens, lens[0] - 9)],
    }
    for name, steps in roads.items():
        for ops in (one, two):
            for found, wanted in zip(requests.run(ops, steps), expected, strict=True):
                assert torch.equal(found, wanted), f"{name} with {ops.threads} threads"


def tail(lens: tuple[int, ...], start: int) -> list[list[tuple[int, int]]]:
    return [[(r, 1) for r, n in enumerate(lens) if n > p] for p in range(start, max(lens))]


@pytest.mark.parametrize("dtype", dtypes)
@pytest.mark.parametrize("threads", [2, 3, 5])
def test_long_context_split_between_threads(dtype: str, threads: int) -> None:
    lens = (1500, 3)
    requests = PagedRequests(lens, Heads(num_heads=2, num_kv_heads=1, head_dim=32))
    prefix = [[(0, 1490), (1, 1)]]
    decodes = [[(0, 1), (1, 1)], [(0, 1), (1, 1)], [(0, 8)]]
    one = requests.run(NativeOps(dtype=dtype, threads=1), whole(lens))
    many = requests.run(NativeOps(dtype=dtype, threads=threads), prefix + decodes)
    for found, wanted in zip(many, one, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("size", [1, 2, 5, 16, 64])
def test_decodes_of_a_batch_match_each_alone(size: int) -> None:
    lens = tuple(3 + (37 * i) % 290 for i in range(size))
    prefixes = [[(r, n - 1) for r, n in enumerate(lens)]]
    together = [[(r, 1) for r in range(size)]]
    apart = [[(r, 1)] for r in range(size)]
    requests = PagedRequests(lens, GQA)
    ops = NativeOps(dtype="bfloat16", threads=2)
    for found, wanted in zip(requests.run(ops, prefixes + together), requests.run(ops, prefixes + apart), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", dtypes)
def test_a_step_without_tokens_is_empty(dtype: str) -> None:
    requests = PagedRequests((4,), GQA)
    found = requests.run(NativeOps(dtype=dtype, threads=2), [[], [(0, 4)]])
    assert found[0].shape == (4, 9 * 64)


def test_tables_that_leave_the_cache_are_refused() -> None:
    requests = PagedRequests((40,), GQA)
    ops = NativeOps(dtype="float32", threads=1)
    requests.blocks[0][1] = requests.num_blocks
    with pytest.raises(ValueError, match=r"slot_mapping\[32\] is 96: the limit is 95"):
        requests.run(ops, whole((40,)))


@pytest.mark.parametrize(
    ("block_size", "head_dim", "message"), [(24, 64, "block_size is 24"), (32, 40, "head_dim is 40")]
)
def test_layouts_that_cannot_be_are_refused(block_size: int, head_dim: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NativeOps(dtype="float32", threads=1).allocate_kv_cache(2, block_size, 1, head_dim)
