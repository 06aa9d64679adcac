"""What the tests of the native kernels share: steps over a paged cache, and attention as one would write it down."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from millstream.kernels.native import LEVELS, NativeOps, native_available, native_level
from millstream.kernels.ops import StepTables

levels = LEVELS[: LEVELS.index(native_level()) + 1] if native_available() else ()
dtypes = ("float32", "bfloat16")
tolerances = {"float32": 2e-5, "bfloat16": 2e-2}

Step = Sequence[tuple[int, int]]
"""Requests of a step, each with the number of its tokens."""


@dataclass(frozen=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    has_norm: bool = False

    @property
    def row_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


def random(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)).to(dtype)


def cos_sin(head_dim: int, num_positions: int) -> Tensor:
    angle = torch.arange(num_positions)[:, None] * 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    return torch.cat((angle.cos(), angle.sin()), dim=1).float()


def relative_error(x: Tensor, expected: Tensor) -> float:
    if x.numel() == 0:
        return 0.0
    return ((x.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


class PagedRequests:
    """Some requests' rows of q, k and v, their blocks scattered over a cache; runs them through attention in steps."""

    def __init__(
        self,
        lens: Sequence[int],
        heads: Heads,
        *,
        block_size: int = 32,
        seed: int = 0,
        key_factors: Sequence[float] = (1.0,),
    ) -> None:
        """`key_factors`: of the keys of every 40 tokens, in turn."""
        self.lens, self.heads, self.block_size = lens, heads, block_size
        self.qkv = [random((n, heads.row_width), seed + i) for i, n in enumerate(lens)]
        for qkv in self.qkv:
            of_token = torch.tensor(key_factors)[torch.arange(qkv.shape[0]) // 40 % len(key_factors)]
            keys = slice(heads.num_heads * heads.head_dim, (heads.num_heads + heads.num_kv_heads) * heads.head_dim)
            qkv[:, keys] *= of_token[:, None]
        self.norms = (random((heads.head_dim,), seed + 100), random((heads.head_dim,), seed + 101))
        num_blocks = [-(-n // block_size) for n in lens]
        self.num_blocks = sum(num_blocks) + 1
        order = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
        self.blocks = [[order.pop() for _ in range(n)] for n in num_blocks]
        self.cos_sin = cos_sin(heads.head_dim, max(lens) + 1)

    def tables(self, step: Step, done: Sequence[int]) -> StepTables:
        positions: list[int] = []
        slots: list[int] = []
        for r, count in step:
            for p in range(done[r], done[r] + count):
                positions.append(p)
                slots.append(self.blocks[r][p // self.block_size] * self.block_size + p % self.block_size)
        starts = [0]
        for _, count in step:
            starts.append(starts[-1] + count)
        contexts = [done[r] + count for r, count in step]
        width = max((-(-c // self.block_size) for c in contexts), default=0)
        rows = [(self.blocks[r] + [0] * width)[:width] for r, _ in step]

        def ints(values: object) -> Tensor:
            return torch.tensor(values, dtype=torch.int32)

        return StepTables(
            positions_T=ints(positions),
            slot_mapping_T=ints(slots),
            query_start_R1=ints(starts),
            context_len_R=ints(contexts),
            block_table_RB=ints(rows).reshape(len(step), width),
            query_lens=tuple(count for _, count in step),
            context_lens=tuple(contexts),
        )

    def run(self, ops: NativeOps, steps: Sequence[Step]) -> list[Tensor]:
        """The attention's results of each request, (tokens, H * E)."""
        h = self.heads
        cache = ops.allocate_kv_cache(self.num_blocks, self.block_size, h.num_kv_heads, h.head_dim)
        poison(cache.data, ops.dtype)
        q_norm, k_norm = (n.to(ops.dtype) if h.has_norm else None for n in self.norms)
        done = [0] * len(self.lens)
        out: list[list[Tensor]] = [[] for _ in self.lens]
        for step in steps:
            tables = self.tables(step, done)
            rows = [self.qkv[r][done[r] : done[r] + count] for r, count in step]
            qkv = torch.cat([*rows, torch.empty(0, h.row_width)]).to(ops.dtype)
            q = ops.rotary_and_cache(
                qkv,
                cache,
                tables,
                self.cos_sin,
                num_heads=h.num_heads,
                num_kv_heads=h.num_kv_heads,
                head_dim=h.head_dim,
                q_norm_E=q_norm,
                k_norm_E=k_norm,
                eps=1e-5,
            )
            result = ops.attention(
                q,
                cache,
                tables,
                num_heads=h.num_heads,
                num_kv_heads=h.num_kv_heads,
                head_dim=h.head_dim,
                scale=h.head_dim**-0.5,
                window=h.window,
            )
            start = 0
            for r, count in step:
                out[r].append(result[start : start + count])
                done[r] += count
                start += count
        assert done == list(self.lens), f"the steps do {done} of {self.lens} tokens"
        return [torch.cat(pieces) for pieces in out]

    def expected(self, dtype: torch.dtype) -> list[Tensor]:
        """The same in float64, a request at a time."""
        h, found = self.heads, []
        for qkv in self.qkv:
            n = qkv.shape[0]
            x = qkv.to(dtype).double().view(n, -1, h.head_dim)
            q, k, v = x.split((h.num_heads, h.num_kv_heads, h.num_kv_heads), dim=1)
            if h.has_norm:
                q, k = (normed(t, w.to(dtype).double(), 1e-5) for t, w in zip((q, k), self.norms, strict=True))
            q, k = rotated(q, self.cos_sin[:n]), rotated(k, self.cos_sin[:n])
            group = h.num_heads // h.num_kv_heads
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
            scores = torch.einsum("qhe,khe->hqk", q, k) * h.head_dim**-0.5
            age = torch.arange(n)[:, None] - torch.arange(n)[None]
            hidden = (age < 0) | (age >= (h.window or n))
            weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
            found.append(torch.einsum("hqk,khe->qhe", weights, v).reshape(n, -1))
        return found


def poison(data: Tensor, dtype: torch.dtype) -> None:
    """What earlier requests left in a cache may be anything, NaN too: nothing of it may be read."""
    data.view(dtype).fill_(torch.nan)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt() * weight


def rotated(x: Tensor, table: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    cos, sin = table.double()[:, None].split(half, dim=-1)
    a, b = x.split(half, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def whole(lens: Sequence[int]) -> list[Step]:
    """All requests in one step."""
    return [[(r, n) for r, n in enumerate(lens)]]


def alone(lens: Sequence[int]) -> list[Step]:
    """One request after the other, each in one step."""
    return [[(r, n)] for r, n in enumerate(lens)]


def chunked(lens: Sequence[int], size: int) -> list[Step]:
    """All requests side by side, `size` tokens of each at a time."""
    return list(_chunks(lens, size))


def _chunks(lens: Sequence[int], size: int) -> Iterator[Step]:
    for start in range(0, max(lens), size):
        yield [(r, min(size, n - start)) for r, n in enumerate(lens) if n > start]
