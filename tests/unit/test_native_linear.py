"""Native linear layers: every epilogue at every level against float64, and rows that do not depend on their batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from millstream.kernels.native import NativeOps, native_available
from tests.unit.native_cases import dtypes, levels, random, relative_error, tolerances

pytestmark = pytest.mark.skipif(not native_available(), reason="the native kernels are not built")

# rows, inputs, outputs: one row, odd widths, no rows, many passes, panels that are not full
SHAPES = [(1, 64, 64), (3, 33, 100), (0, 32, 32), (9, 1, 17), (17, 96, 31), (70, 130, 33), (8, 576, 64)]
INT8_ERROR = 2e-2


def weights(shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    m, k, n = shape
    x, w, up = (random(s, i, dtype) for i, s in enumerate([(m, k), (n, k), (n, k)]))
    return x, w, up, random((n,), 3, dtype), random((m, n), 4, dtype)


@pytest.mark.parametrize("level", levels)
@pytest.mark.parametrize("dtype", dtypes)
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_float64(level: str, dtype: str, quantization: str | None, shape: tuple[int, int, int]) -> None:
    ops = NativeOps(dtype=dtype, level=level, threads=2, quantization=quantization)
    limit = tolerances[dtype] + (INT8_ERROR if quantization else 0)
    x, w, up, bias, residual = weights(shape, ops.dtype)
    gate = x.double() @ w.double().T
    y = gate + bias.double()
    packed = ops.pack_linear(w, bias)
    assert relative_error(ops.linear(x, packed), y) < limit
    assert relative_error(ops.linear_add(x, packed, residual.clone()), residual.double() + y) < limit
    both = F.silu(gate) * (x.double() @ up.double().T)
    assert relative_error(ops.linear_silu_mul(x, ops.pack_gate_up(w, up)), both) < 2 * limit
    logits = ops.logits(x, packed)
    assert logits.dtype == torch.float32
    assert relative_error(logits, y) < (limit if quantization else 2e-6)
    assert torch.equal(ops.argmax(x, packed).long(), logits.argmax(dim=1))


@pytest.mark.parametrize("level", levels)
@pytest.mark.parametrize("dtype", dtypes)
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_row_has_the_same_bits_in_every_batch(level: str, dtype: str, quantization: str | None) -> None:
    one, two = (NativeOps(dtype=dtype, level=level, threads=n, quantization=quantization) for n in (1, 2))
    x, w, up, bias, residual = weights((64, 98, 80), one.dtype)
    pairs = [(ops, ops.pack_linear(w, bias), ops.pack_gate_up(w, up)) for ops in (one, two)]

    def results(ops: NativeOps, packed: object, gate_up: object, rows: slice) -> list[Tensor]:
        return [
            ops.linear(x[rows], packed),
            ops.linear_add(x[rows], packed, residual[rows].clone()),
            ops.linear_silu_mul(x[rows], gate_up),
            ops.logits(x[rows], packed),
        ]

    alone = [torch.cat(r) for r in zip(*(results(*pairs[0], slice(i, i + 1)) for i in range(64)), strict=True)]
    for ops, packed, gate_up in pairs:
        for size in range(1, 65):
            rows = slice(64 - size, 64)
            for found, expected in zip(results(ops, packed, gate_up, rows), alone, strict=True):
                assert torch.equal(found, expected[rows]), f"{size} rows, {ops.threads} threads"


@pytest.mark.parametrize("level", levels)
def test_rows_too_wide_for_the_caches(level: str) -> None:
    ops = NativeOps(dtype="bfloat16", level=level, threads=2)
    x, w, _, bias, residual = weights((70, 16_400, 40), ops.dtype)
    packed = ops.pack_linear(w, bias)
    found = ops.linear_add(x, packed, residual.clone())
    expected = x.double() @ w.double().T + bias.double() + residual.double()
    assert relative_error(found, expected) < tolerances["bfloat16"]
    for i in range(70):
        assert torch.equal(ops.linear_add(x[i : i + 1], packed, residual[i : i + 1].clone()), found[i : i + 1])


@pytest.mark.parametrize("level", levels)
def test_argmax_takes_the_lowest_of_equals(level: str) -> None:
    ops = NativeOps(dtype="float32", level=level, threads=2)
    w = torch.zeros(200, 4)
    w[[150, 40, 90]] = 1.0
    found = ops.argmax(torch.tensor([[1.0, 0, 0, 0], [-1.0, 0, 0, 0], [0.0, 0, 0, 0]]), ops.pack_linear(w))
    assert found.tolist() == [40, 0, 0]
    # in whatever turns threads take their columns
    ops, w = NativeOps(dtype="float32", level=level, threads=3), torch.zeros(3000, 4)
    w[45::7] = 1.0
    packed = ops.pack_linear(w)
    assert {ops.argmax(torch.tensor([[1.0, 0, 0, 0]]), packed).item() for _ in range(50)} == {45}


@pytest.mark.parametrize("level", levels)
def test_int8_of_outliers_and_zeros(level: str) -> None:
    ops = NativeOps(dtype="float32", level=level, threads=1, quantization="int8")
    w = random((40, 96), 0)
    w[3] = 0.0
    x = random((3, 96), 1)
    x[1] = 0.0
    x[2, 5] = 1000.0
    y = ops.linear(x, ops.pack_linear(w))
    assert (y[:, 3] == 0).all()
    assert (y[1] == 0).all()
    # the outlier coarsens its own group of 32 and no other
    expected = x[2].double() @ w.double().T
    rest = x[2, 32:].double() @ w[:, 32:].double().T
    x[2, :32] = 0.0
    assert relative_error(ops.linear(x, ops.pack_linear(w))[2], rest) < INT8_ERROR
    assert relative_error(y[2], expected) < INT8_ERROR


@pytest.mark.parametrize("level", levels)
def test_int8_is_the_product_of_what_it_rounds_to(level: str) -> None:
    """Weights and inputs that 8 bits hold exactly: the result is exact, whatever the size of the sums."""
    ops = NativeOps(dtype="float32", level=level, threads=2, quantization="int8")
    whole = torch.Generator().manual_seed(0)
    w = torch.randint(-127, 128, (70, 160), generator=whole).float()
    x = torch.randint(-127, 128, (7, 160), generator=whole).float()
    w[:, ::32], x[:, ::32] = 127.0, -127.0
    assert torch.equal(ops.linear(x, ops.pack_linear(w)), x @ w.T)


def test_what_does_not_run_here_is_refused() -> None:
    with pytest.raises(ValueError, match="dtype is 'float16'"):
        NativeOps(dtype="float16")
    with pytest.raises(ValueError, match="level is 'sse9'"):
        NativeOps(dtype="float32", level="sse9")
    with pytest.raises(ValueError, match="quantization is 'int3'"):
        NativeOps(dtype="float32", quantization="int3")
    with pytest.raises(ValueError, match="num_threads is 5000"):
        NativeOps(dtype="float32", threads=5000)
