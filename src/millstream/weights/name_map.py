"""NameMap: which slot of a model a checkpoint's tensor goes to. Plain data; imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from millstream.errors import ModelError

_NUMBER = re.compile(r"(?<=\.)[0-9]{1,9}(?=\.)")


@dataclass(frozen=True)
class Target:
    """Where a tensor goes: `piece` of the slot called `slot`.

    `unpermute_heads` is set for the query and key rows of Llama-family GGUF files: within each of so many heads
    rows i and i + E/2, which are rotated as a pair, stand next to each other there.
    """

    slot: str
    piece: str = "weight"
    unpermute_heads: int = 0


@dataclass(frozen=True)
class Place:
    """A target found for one tensor: the slot's full name, and the layer it is in (None: in no layer)."""

    slot: str
    piece: str
    unpermute_heads: int
    layer: int | None


@dataclass(frozen=True, kw_only=True)
class NameMap:
    """Targets by tensor name, where `{layer}` stands for the number of a layer in both names.

    Names in `ignored` (also with `{layer}`) may be in a checkpoint and are not loaded.
    """

    targets: Mapping[str, Target]
    num_layers: int
    ignored: frozenset[str] = frozenset()

    def find(self, name: str) -> Place | None:
        """The place of the tensor `name`; None when it is ignored. Raises ModelError for an unknown name."""
        layer, pattern = None, name
        if name not in self.targets and (number := _NUMBER.search(name)):
            layer = int(number[0])
            pattern = name[: number.start()] + "{layer}" + name[number.end() :]
        if pattern in self.ignored:
            return None
        target = None if "{" in name else self.targets.get(pattern)
        if target is None or (layer is not None and layer >= self.num_layers):
            raise ModelError(
                f"the checkpoint holds {name!r}, which this model of {self.num_layers} layers has no use for"
            )
        return Place(target.slot.format(layer=layer), target.piece, target.unpermute_heads, layer)

    def name_of(self, slot: str, piece: str) -> str:
        """The checkpoint's name of a piece of a slot, for messages."""
        number = _NUMBER.search(slot)
        pattern = slot if number is None else slot[: number.start()] + "{layer}" + slot[number.end() :]
        for name, target in self.targets.items():
            if target.slot == pattern and target.piece == piece:
                return name.format(layer=number[0] if number else "")
        return f"{slot}.{piece}"
