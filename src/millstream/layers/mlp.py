"""The gated MLP."""

from __future__ import annotations

from torch import Tensor

from millstream.kernels.ops import LinearWeight, Ops
from millstream.layers.linear import Linear
from millstream.layers.slot import Slot


class MLP:
    """residual + down(silu(gate(x)) * up(x))."""

    def __init__(self, ops: Ops, *, hidden_size: int, intermediate_size: int) -> None:
        self._ops = ops
        self._gate_up: LinearWeight = None
        shape = (intermediate_size, hidden_size)
        self._gate_up_slot = Slot({"gate.weight": shape, "up.weight": shape}, self._pack)
        self.down = Linear(ops, intermediate_size, {"": hidden_size})

    def _pack(self, pieces: dict[str, Tensor]) -> None:
        self._gate_up = self._ops.pack_gate_up(pieces["gate.weight"], pieces["up.weight"])

    def slots(self) -> dict[str, Slot]:
        """The weights by name."""
        return {"gate_up": self._gate_up_slot, "down": self.down.slot}

    def forward(self, x_TD: Tensor, residual_TD: Tensor) -> Tensor:
        return self.down.forward_add(self._ops.linear_silu_mul(x_TD, self._gate_up), residual_TD)
