"""RMSNorm: divides by the root of the mean square, then weighs."""

from __future__ import annotations

from torch import Tensor

from millstream.kernels.ops import Ops
from millstream.layers.slot import Slot


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    def __init__(self, ops: Ops, size: int, *, eps: float) -> None:
        self._ops = ops
        self.eps = eps
        self.weight: Tensor
        self.slot = Slot({"weight": (size,)}, self._pack)

    def _pack(self, pieces: dict[str, Tensor]) -> None:
        self.weight = pieces["weight"]

    def forward(self, x_TD: Tensor) -> Tensor:
        return self._ops.rms_norm(x_TD, self.weight, self.eps)
