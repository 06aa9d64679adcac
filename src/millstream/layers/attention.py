"""Attention with grouped key/value heads, rotary positions and a paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from millstream.kernels.ops import LayerCache, Ops, StepTables
from millstream.layers.linear import Linear
from millstream.layers.norm import RMSNorm
from millstream.layers.slot import Slot


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """What an attention layer's size is: heads, their width E, which parts have a bias or a norm, its window."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_qkv_bias: bool
    has_output_bias: bool
    has_qk_norm: bool
    eps: float
    window: int | None


class Attention:
    """residual + output(attention(rotated q, cache))."""

    def __init__(self, ops: Ops, shape: AttentionShape) -> None:
        self._ops = ops
        self._shape = shape
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.qkv = Linear(
            ops, shape.hidden_size, {"q": q_size, "k": kv_size, "v": kv_size}, has_bias=shape.has_qkv_bias
        )
        self.output = Linear(ops, q_size, {"": shape.hidden_size}, has_bias=shape.has_output_bias)
        self.q_norm = RMSNorm(ops, shape.head_dim, eps=shape.eps) if shape.has_qk_norm else None
        self.k_norm = RMSNorm(ops, shape.head_dim, eps=shape.eps) if shape.has_qk_norm else None

    def slots(self) -> dict[str, Slot]:
        """The weights by name."""
        slots = {"qkv": self.qkv.slot, "output": self.output.slot}
        if self.q_norm is not None and self.k_norm is not None:
            slots |= {"q_norm": self.q_norm.slot, "k_norm": self.k_norm.slot}
        return slots

    def forward(
        self, x_TD: Tensor, residual_TD: Tensor, cache: LayerCache, tables: StepTables, cos_sin_PE: Tensor
    ) -> Tensor:
        shape = self._shape
        q_TN = self._ops.rotary_and_cache(
            self.qkv.forward(x_TD),
            cache,
            tables,
            cos_sin_PE,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            q_norm_E=None if self.q_norm is None else self.q_norm.weight,
            k_norm_E=None if self.k_norm is None else self.k_norm.weight,
            eps=shape.eps,
        )
        attended_TN = self._ops.attention(
            q_TN,
            cache,
            tables,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            scale=shape.head_dim**-0.5,
            window=shape.window,
        )
        return self.output.forward_add(attended_TN, residual_TD)
