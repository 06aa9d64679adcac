"""Native norms and gathers."""

from __future__ import annotations

import pytest
import torch

from millstream.kernels.native import NativeOps, native_available
from tests.unit.native_cases import dtypes, levels, normed, random, relative_error, tolerances

pytestmark = pytest.mark.skipif(not native_available(), reason="the native kernels are not built")


@pytest.mark.parametrize("level", levels)
@pytest.mark.parametrize("dtype", dtypes)
@pytest.mark.parametrize("shape", [(1, 576), (5, 33), (0, 64), (7, 7), (3, 1000)])
def test_rms_norm(level: str, dtype: str, shape: tuple[int, int]) -> None:
    ops = NativeOps(dtype=dtype, level=level, threads=2)
    x, weight = random(shape, 0, ops.dtype), random(shape[1:], 1, ops.dtype)
    found = ops.rms_norm(x, weight, 1e-5)
    assert found.shape == shape
    assert relative_error(found, normed(x.double(), weight.double(), 1e-5)) < tolerances[dtype]
    for i in range(shape[0]):
        assert torch.equal(ops.rms_norm(x[i : i + 1], weight, 1e-5), found[i : i + 1])


@pytest.mark.parametrize("level", levels)
@pytest.mark.parametrize("dtype", dtypes)
def test_embedding(level: str, dtype: str) -> None:
    ops = NativeOps(dtype=dtype, level=level, threads=2)
    table = random((10, 24), 0, ops.dtype)
    for ids in (torch.tensor([3, 9, 0, 3], dtype=torch.int32), torch.tensor([2]), torch.tensor([], dtype=torch.int64)):
        assert torch.equal(ops.embedding(ids, table), table[ids.long()])
    assert torch.equal(ops.embedding(torch.tensor([-1, 10]), table), torch.zeros(2, 24, dtype=ops.dtype))


def test_a_nan_stays_one() -> None:
    ops = NativeOps(dtype="bfloat16", threads=1)
    x = torch.full((1, 32), torch.nan, dtype=torch.bfloat16)
    assert ops.rms_norm(x, x[0], 1e-5).isnan().all()
    assert ops.linear_silu_mul(x, ops.pack_gate_up(x, x)).isnan().all()
