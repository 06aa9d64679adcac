"""The reference operations against the plainest formulas, for steps that mix everything."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from millstream.errors import ConfigError
from millstream.kernels import attention_plan
from millstream.kernels.attention_plan import plan_attention
from millstream.kernels.ops import make_ops
from millstream.kernels.reference import ReferenceOps
from tests.models_helpers import step_tables

HEADS, KV_HEADS, WIDTH, BLOCK = 6, 2, 16, 4
TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# (context_len, query_len) of each request: chunks with and without a past, decodes of unlike lengths
STEPS = {
    "decodes": [(1, 1), (9, 1), (40, 1), (4, 1)],
    "one decode": [(23, 1)],
    "first chunk": [(13, 13)],
    "later chunk": [(37, 6)],
    "mixed": [(5, 5), (30, 1), (21, 8), (3, 1), (17, 1), (2, 2)],
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def dense_attention(q_TN: Tensor, keys: list[Tensor], values: list[Tensor], step: list[tuple[int, int]], window):
    """Token by token, head by head, over each request's own keys and values (C, G, E)."""
    out, row = [], 0
    for (context_len, query_len), k_CGE, v_CGE in zip(step, keys, values, strict=True):
        for position in range(context_len - query_len, context_len):
            first = 0 if window is None else max(0, position - window + 1)
            q_HE = q_TN[row].view(HEADS, WIDTH)
            for head in range(HEADS):
                group = head // (HEADS // KV_HEADS)
                scores = k_CGE[first : position + 1, group] @ q_HE[head] / math.sqrt(WIDTH)
                out.append(scores.softmax(0) @ v_CGE[first : position + 1, group])
            row += 1
    return torch.stack(out).view(q_TN.shape)


def scattered_blocks(step: list[tuple[int, int]]) -> list[list[int]]:
    """Blocks for each request: none shared, in no order."""
    counts = [-(-context_len // BLOCK) for context_len, _ in step]
    order = iter((torch.randperm(sum(counts), generator=torch.Generator().manual_seed(3)) + 1).tolist())
    return [[next(order) for _ in range(n)] for n in counts]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 7, 100])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_attention_equals_the_formula(step: list[tuple[int, int]], window: int | None, dtype: str) -> None:
    ops = ReferenceOps(dtype=dtype)
    blocks = scattered_blocks(step)
    cache = ops.allocate_kv_cache(sum(map(len, blocks)) + 1, BLOCK, KV_HEADS, WIDTH)
    cache.fill_(9.0)  # what lies beyond a context must not count
    keys, values = [], []
    for r, ((context_len, _), ids) in enumerate(zip(step, blocks, strict=True)):
        kv = random(2, context_len, KV_HEADS, WIDTH, seed=r).to(DTYPES[dtype])
        keys.append(kv[0].float())
        values.append(kv[1].float())
        for position in range(context_len):
            cache[ids[position // BLOCK], :, position % BLOCK] = kv[:, position]
    q_TN = random(sum(q for _, q in step), HEADS * WIDTH, seed=99).to(DTYPES[dtype])
    tables = step_tables([(c, q, b) for (c, q), b in zip(step, blocks, strict=True)], block_size=BLOCK, padding=2)
    sizes = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": WIDTH}
    out_TN = ops.attention(q_TN, cache, tables, **sizes, scale=WIDTH**-0.5, window=window)
    wanted_TN = dense_attention(q_TN.float(), keys, values, step, window)
    assert out_TN.dtype == DTYPES[dtype]
    assert (out_TN.float() - wanted_TN).abs().max() < TOLERANCE[dtype]


def test_long_chunks_and_large_groups_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_plan, "MAX_PIECE_ROWS", 3)
    monkeypatch.setattr(attention_plan, "MAX_GROUP_TOKENS", 16)
    for window in (None, 7):
        for step in STEPS.values():
            test_attention_equals_the_formula(step, window, "float32")


def test_decodes_of_unlike_length_go_in_groups() -> None:
    lens = [2000, 10, 12, 9, 1990, 11]
    blocks = [list(range(-(-n // BLOCK))) for n in lens]
    tables = step_tables([(n, 1, b) for n, b in zip(lens, blocks, strict=True)], block_size=BLOCK)
    plan = plan_attention(tables, block_size=BLOCK, window=None, dtype=torch.float32)
    assert [group.rows_R.tolist() for group in plan.groups if group.rows_R is not None] == [[0, 4], [1, 2, 3, 5]]
    assert [group.context_len for group in plan.groups] == [2000, 12]


def test_decodes_within_a_window_read_only_its_blocks() -> None:
    tables = step_tables([(40, 1, range(10)), (21, 1, range(6))], block_size=BLOCK)
    plan = plan_attention(tables, block_size=BLOCK, window=5, dtype=torch.float32)
    (group,) = plan.groups
    assert (group.cache_rows[:4] // 2).tolist() == [8, 9, 4, 5]
    assert group.mask is not None
    # positions 32 to 39, of which 35 on are seen; 16 to 23, of which 16 to 20 are
    assert (group.mask.view(2, 8) == 0).int().tolist() == [[0, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0, 0]]


@pytest.mark.parametrize("has_norm", [False, True])
def test_rotary_and_cache_rotate_and_store(has_norm: bool) -> None:
    ops = make_ops("reference", dtype="float32")
    step, blocks = [(6, 2), (9, 1)], [[3, 1], [2, 5, 4]]
    tables = step_tables([(c, q, b) for (c, q), b in zip(step, blocks, strict=True)], block_size=BLOCK)
    cache = ops.allocate_kv_cache(6, BLOCK, KV_HEADS, WIDTH)
    angles_PF = torch.outer(torch.arange(16).float(), 10.0 ** -torch.arange(WIDTH // 2).float())
    cos_sin_PE = torch.cat((angles_PF.cos(), angles_PF.sin()), 1)
    qkv_TXE = random(3, HEADS + 2 * KV_HEADS, WIDTH)
    q_norm_E, k_norm_E = (random(WIDTH, seed=1), random(WIDTH, seed=2)) if has_norm else (None, None)
    q_TN = ops.rotary_and_cache(
        qkv_TXE.view(3, -1).clone(),
        cache,
        tables,
        cos_sin_PE,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=WIDTH,
        q_norm_E=q_norm_E,
        k_norm_E=k_norm_E,
        eps=1e-6,
    )

    def rotated(x_E: Tensor, norm_E: Tensor | None, position: int) -> Tensor:
        if norm_E is not None:
            x_E = x_E / (x_E.square().mean() + 1e-6).sqrt() * norm_E
        pairs = torch.complex(*x_E.view(2, -1).unbind(0)) * torch.polar(torch.ones(WIDTH // 2), angles_PF[position])
        return torch.cat((pairs.real, pairs.imag))

    # token, its position, block and place in the block
    for t, position, block, offset in ((0, 4, 1, 0), (1, 5, 1, 1), (2, 8, 4, 0)):
        for head in range(HEADS):
            wanted = rotated(qkv_TXE[t, head], q_norm_E, position)
            assert torch.allclose(q_TN.view(3, HEADS, WIDTH)[t, head], wanted, atol=1e-5)
        for head in range(KV_HEADS):
            wanted = rotated(qkv_TXE[t, HEADS + head], k_norm_E, position)
            assert torch.allclose(cache[block, 0, offset, head], wanted, atol=1e-5)
        assert torch.equal(cache[block, 1, offset], qkv_TXE[t, HEADS + KV_HEADS :])
    assert int((cache != 0).sum()) == 3 * 2 * KV_HEADS * WIDTH


@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_linears_equal_the_formula(dtype: str, rows: int) -> None:
    ops = make_ops("reference", dtype=dtype)
    kind = DTYPES[dtype]
    x, w, b = random(rows, 40).to(kind), (random(24, 40, seed=1) / 6).to(kind), random(24, seed=2).to(kind)
    up, residual = (random(24, 40, seed=3) / 6).to(kind), random(rows, 24, seed=4).to(kind)
    plain = x.float() @ w.float().t()
    packed = ops.pack_linear(w, b)
    tolerance = 4 * TOLERANCE[dtype]
    assert torch.allclose(ops.linear(x, packed).float(), plain + b.float(), atol=tolerance)
    wanted = residual.float() + plain + b.float()
    assert torch.allclose(ops.linear_add(x, packed, residual.clone()).float(), wanted, atol=tolerance)
    gated = torch.nn.functional.silu(plain) * (x.float() @ up.float().t())
    assert torch.allclose(ops.linear_silu_mul(x, ops.pack_gate_up(w, up)).float(), gated, atol=2 * tolerance)
    logits = ops.logits(x, ops.pack_linear(w))
    assert logits.dtype == torch.float32
    assert torch.allclose(logits, plain, atol=tolerance)


def test_rms_norm_is_computed_in_float32() -> None:
    ops = make_ops("reference", dtype="bfloat16")
    x = (random(3, 64) * 300).bfloat16()
    weight = random(64, seed=1).bfloat16()
    wanted = x.float() / (x.float().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.float()
    assert torch.equal(ops.rms_norm(x, weight, 1e-5), wanted.bfloat16())


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"name": "reference", "is_pinned": True}, "--pin-threads is on: .* but --kernels is reference"),
        ({"name": "reference", "quantization": "int8"}, "--quantization is int8: .* but --kernels is reference"),
        ({"name": "native", "dtype": "float16"}, "--kernels is native, but .*float16"),
    ],
)
def test_what_only_the_native_kernels_do_is_refused_without_them(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_ops(**{"dtype": "float32", **asked})
