"""Loads a checkpoint into a model: each tensor to its slot, one at a time.

The model is a set of named slots; a slot is filled piece by piece and packs itself once it has them all. So no more
than the weights and the pieces of one layer are in memory at any time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from millstream.errors import ModelError
from millstream.hub.files import ModelFiles
from millstream.weights.checkpoint import Checkpoint
from millstream.weights.gguf_checkpoint import GGUFCheckpoint
from millstream.weights.name_map import NameMap, Place
from millstream.weights.safetensors_checkpoint import SafetensorsCheckpoint

READ_AHEAD = 6
"""Tensors read before the model takes them: less than a layer."""

Progress = Callable[[int, int], None]
"""Called with the bytes loaded so far and in all."""


class WeightSlot(Protocol):
    """A weight of the model, made of one or more pieces."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each piece."""
        ...

    @property
    def missing(self) -> list[str]:
        """Pieces that have not come yet."""
        ...

    @property
    def is_float32(self) -> bool:
        """Whether the slot wants float32 whatever the model computes in."""
        ...

    def put(self, piece: str, tensor: Tensor) -> None: ...


def open_checkpoint(files: ModelFiles) -> Checkpoint:
    """The tensors of a model's files. Raises ModelError when they are missing or odd."""
    if files.kind == "gguf":
        return GGUFCheckpoint(files.gguf)
    return SafetensorsCheckpoint(files.path)


def load_weights(
    slots: Mapping[str, WeightSlot],
    checkpoint: Checkpoint,
    names: NameMap,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> None:
    """Fill all `slots` from `checkpoint`. Tensors of layers that have no slot here (another stage's) are not read.

    Raises ModelError for a tensor that `names` does not know, has another shape than its slot or comes twice, and for
    pieces that no tensor filled.
    """
    places: list[tuple[str, Place]] = []
    for name in checkpoint.tensors:
        place = names.find(name)
        if place is not None and place.slot in slots:
            places.append((name, place))
    # by layer, so that a layer's pieces come together however the file orders them
    places.sort(key=lambda item: (-1 if item[1].layer is None else item[1].layer, item[1].slot))
    total, done = sum(checkpoint.tensors[name].num_bytes for name, _ in places), 0
    _check(slots, checkpoint, names, places)

    def read(name: str, place: Place) -> Tensor:
        tensor = checkpoint.read(name, torch.float32 if slots[place.slot].is_float32 else dtype)
        return unpermute_rows(tensor, place.unpermute_heads) if place.unpermute_heads else tensor

    # Several tensors are read at once, one by each thread: threads that share no work need not wait for each other.
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        ahead: deque[Future[Tensor]] = deque()
        rest = iter(places)
        for name, place in places:
            ahead.extend(pool.submit(read, *item) for item in islice(rest, READ_AHEAD - len(ahead)))
            slots[place.slot].put(place.piece, ahead.popleft().result().to(device))
            done += checkpoint.tensors[name].num_bytes
            if progress is not None:
                progress(done, total)


def _check(
    slots: Mapping[str, WeightSlot], checkpoint: Checkpoint, names: NameMap, places: list[tuple[str, Place]]
) -> None:
    """Raise ModelError unless the tensors at `places` are just the pieces of `slots`."""
    missing = {(slot_name, piece) for slot_name, slot in slots.items() for piece in slot.missing}
    for name, place in places:
        if (place.slot, place.piece) not in missing:
            raise ModelError(f"the checkpoint holds {name!r}, which this model has no use for")
        missing.remove((place.slot, place.piece))
        shape, wanted = checkpoint.tensors[name].shape, slots[place.slot].shapes[place.piece]
        if shape != wanted:
            raise ModelError(f"{name!r} has shape {list(shape)}: the model's settings say {list(wanted)}")
    if missing:
        found = sorted(names.name_of(slot_name, piece) for slot_name, piece in missing)
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise ModelError(f"the checkpoint does not hold {', '.join(found[:5])}{more}")


def unpermute_rows(tensor: Tensor, num_heads: int) -> Tensor:
    """Undo the row order of Llama-family GGUF files: rows 0, 2, 4, ... of a head first, then rows 1, 3, 5, ..."""
    rows, rest = tensor.shape[0], tensor.shape[1:]
    return tensor.view(num_heads, rows // num_heads // 2, 2, *rest).transpose(1, 2).reshape(rows, *rest)
