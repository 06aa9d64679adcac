"""Linear: one matrix, maybe fused of several, packed by the operations as soon as its pieces are there."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from millstream.kernels.ops import LinearWeight, Ops
from millstream.layers.slot import Slot


class Linear:
    """x W^T + bias. `out_sizes` gives the rows of each part by name; parts are fused in that order.

    The slot's pieces are `NAME.weight` and `NAME.bias` of each part, or `weight` and `bias` for one part with no name.
    """

    def __init__(self, ops: Ops, in_size: int, out_sizes: Mapping[str, int], *, has_bias: bool = False) -> None:
        self._ops = ops
        self._parts = [f"{name}." if name else "" for name in out_sizes]
        self._has_bias = has_bias
        self.weight: LinearWeight = None
        shapes: dict[str, tuple[int, ...]] = {}
        for part, size in zip(self._parts, out_sizes.values(), strict=True):
            shapes[part + "weight"] = (size, in_size)
            if has_bias:
                shapes[part + "bias"] = (size,)
        self.slot = Slot(shapes, self._pack)

    def _pack(self, pieces: dict[str, Tensor]) -> None:
        weight_NK = _joined([pieces[part + "weight"] for part in self._parts])
        bias_N = _joined([pieces[part + "bias"] for part in self._parts]) if self._has_bias else None
        pieces.clear()
        self.weight = self._ops.pack_linear(weight_NK, bias_N)

    def forward(self, x_TK: Tensor) -> Tensor:
        return self._ops.linear(x_TK, self.weight)

    def forward_add(self, x_TK: Tensor, residual_TN: Tensor) -> Tensor:
        """The same, added to the residual, whose memory it may use."""
        return self._ops.linear_add(x_TK, self.weight, residual_TN)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
