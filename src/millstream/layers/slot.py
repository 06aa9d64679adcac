"""Slot: a weight that waits for its pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from millstream.errors import ModelError


class Slot:
    """Collects the pieces of one weight; when the last one comes, hands them to `pack` and keeps none.

    `shapes` says which pieces there are and what shape each has.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        pack: Callable[[dict[str, Tensor]], None],
        *,
        is_float32: bool = False,
    ) -> None:
        self.shapes = shapes
        self.is_float32 = is_float32
        self._pack = pack
        self._pieces: dict[str, Tensor] = {}
        self._is_packed = False

    @property
    def missing(self) -> list[str]:
        """Pieces that have not come yet."""
        return [] if self._is_packed else [piece for piece in self.shapes if piece not in self._pieces]

    def put(self, piece: str, tensor: Tensor) -> None:
        """Take one piece. Raises ModelError for one that is not wanted or has another shape."""
        if piece not in self.missing:
            raise ModelError(f"a weight got its piece {piece!r} twice or has no such piece")
        if tuple(tensor.shape) != self.shapes[piece]:
            raise ModelError(f"a piece has shape {list(tensor.shape)}: it must be {list(self.shapes[piece])}")
        self._pieces[piece] = tensor
        if not self.missing:
            pieces, self._pieces, self._is_packed = self._pieces, {}, True
            self._pack(pieces)
