"""Planned steps: a recorded Decoder gives the bits of the eager one, for any rows, in little memory."""

from __future__ import annotations

import pytest
import torch

from millstream.kernels.native import NativeOps, native_available
from millstream.kernels.native_memory import Arena, allocate
from tests.unit.native_cases import Heads, PagedRequests, dtypes, random

if not native_available():
    pytest.skip("the native kernels are not built", allow_module_level=True)

from millstream.kernels.native_plan import RECORDING_TABLES, Buffers, Plan, record
from millstream.kernels.ops import LayerCache, StepTables

HEADS = Heads(num_heads=4, num_kv_heads=2, head_dim=32)
WIDTH, VOCAB, LAYERS = 64, 90, 3


class Model:
    """Layers in the order of the Decoder's, calling nothing but operations."""

    def __init__(self, ops: NativeOps) -> None:
        def weight(*shape: int) -> torch.Tensor:
            self.seed += 1
            return (random(shape, self.seed) * 0.2).to(ops.dtype)

        self.seed, self.ops = 0, ops
        self.table = weight(VOCAB, WIDTH)
        self.norm = weight(WIDTH)
        self.layers = [
            (
                ops.pack_linear(weight(HEADS.row_width, WIDTH), weight(HEADS.row_width)),
                ops.pack_linear(weight(WIDTH, 128)),
                ops.pack_gate_up(weight(48, WIDTH), weight(48, WIDTH)),
                ops.pack_linear(weight(WIDTH, 48)),
            )
            for _ in range(LAYERS)
        ]
        self.head = ops.pack_linear(self.table)

    def forward(
        self, ids: torch.Tensor, caches: list[LayerCache], tables: StepTables, table: torch.Tensor
    ) -> torch.Tensor:
        ops, shape = self.ops, {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
        x = ops.embedding(ids, self.table)
        for cache, (qkv, out, gate_up, down) in zip(caches, self.layers, strict=True):
            rows = ops.linear(ops.rms_norm(x, self.norm, 1e-5), qkv)
            q = ops.rotary_and_cache(rows, cache, tables, table, **shape)
            x = ops.linear_add(ops.attention(q, cache, tables, scale=0.2, **shape), out, x)
            x = ops.linear_add(ops.linear_silu_mul(ops.rms_norm(x, self.norm, 1e-5), gate_up), down, x)
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.logits(self.ops.rms_norm(x, self.norm, 1e-5), self.head)


@pytest.mark.parametrize("dtype", dtypes)
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_plan_gives_the_bits_of_its_model(dtype: str, quantization: str | None) -> None:
    lens = (40, 3, 70)
    requests = PagedRequests(lens, HEADS)
    ops = NativeOps(dtype=dtype, threads=2, quantization=quantization)
    model = Model(ops)
    eager, planned = ([ops.allocate_kv_cache(requests.num_blocks, 32, 2, 32) for _ in range(LAYERS)] for _ in range(2))
    plan = record(ops, lambda ids: model.forward(ids, planned, RECORDING_TABLES, requests.cos_sin), max_rows=64)
    head = record(ops, model.logits, max_rows=8, input_width=WIDTH)
    done = [0, 0, 0]
    for step in ([(2, 33), (0, 30)], [(1, 3), (2, 1)], [(0, 1)], [(0, 9), (2, 36)]):
        tables = requests.tables(step, done)
        ids = torch.arange(sum(n for _, n in step), dtype=torch.int32) * 7 % VOCAB
        expected = model.forward(ids, eager, tables, requests.cos_sin)
        assert torch.equal(plan.run(ids, tables), expected)
        logits = model.logits(expected[-8:])
        assert torch.equal(head.run(expected[-8:]), logits)
        assert torch.equal(head.run_greedy(expected[-8:]).long(), logits.argmax(dim=1))
        for r, count in step:
            done[r] += count


def small_plan(ops: NativeOps) -> Plan:
    weight = ops.pack_linear(random((16, 16), 0))
    return record(ops, lambda x: ops.linear(x, weight), max_rows=4, input_width=16)


def test_a_plan_keeps_what_it_reads() -> None:
    ops = NativeOps(dtype="float32", threads=1)
    plan = small_plan(ops)
    noise = [torch.full((4096,), torch.nan) for _ in range(50)]
    assert torch.equal(plan.run(torch.eye(16)[:3]), random((16, 16), 0).T[:3])
    assert len(noise) == 50


def test_a_step_that_is_too_large_is_refused() -> None:
    plan = small_plan(NativeOps(dtype="float32", threads=1))
    with pytest.raises(ValueError, match="the step has 5 rows: the plan holds 4"):
        plan.run(torch.zeros(5, 16))
    assert plan.run(torch.zeros(0, 16)).shape == (0, 16)


def test_arithmetic_outside_the_operations_is_refused() -> None:
    ops = NativeOps(dtype="float32", threads=1)
    weight = ops.pack_linear(random((16, 16), 0))
    with pytest.raises(ValueError, match="not made by an operation"):
        record(ops, lambda x: ops.linear(x * 2, weight), max_rows=4, input_width=16)
    with pytest.raises(ValueError, match="not made by an operation"):
        record(ops, lambda x: ops.linear(x, weight) + 1, max_rows=4, input_width=16)
    # and the operations work again
    assert ops.linear(torch.eye(16), weight).shape == (16, 16)


def test_a_profile_names_every_operation() -> None:
    plan = small_plan(NativeOps(dtype="float32", threads=2))
    [(name, seconds)] = plan.profile(torch.ones(4, 16))
    assert name == "linear"
    assert seconds > 0


def test_buffers_are_used_again() -> None:
    buffers = Buffers()
    first = buffers.take((4, 8), torch.float32)
    second = buffers.take((4, 8), torch.float32)
    assert first.data_ptr() != second.data_ptr()
    address = first.data_ptr()
    del first
    third = buffers.take((4, 16), torch.bfloat16)
    assert third.data_ptr() == address
    assert buffers.num_bytes == 2 * 4 * 8 * 4
    assert buffers.holds(third)
    assert not buffers.holds(torch.zeros(4))


def test_memory_is_zeroed_and_aligned() -> None:
    assert allocate(5).data_ptr() % 2**21 == 0
    assert not allocate(3_000_000).any()
    arena = Arena()
    a, b = arena.take((3, 5), torch.bfloat16), arena.take((7,), torch.int32)
    assert b.data_ptr() - a.data_ptr() == 128
    a.fill_(1)
    assert not b.any()
    large = arena.take((80 * 2**20,), torch.uint8)
    assert large.numel() == 80 * 2**20
