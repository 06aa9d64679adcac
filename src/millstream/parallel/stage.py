"""A stage: the slice of a model's layers that one rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT_HEAD_COST = 0.5


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Layers `first_layer` to `last_layer`, both included. The first stage embeds, the last one makes logits."""

    first_layer: int
    last_layer: int
    is_first: bool
    is_last: bool

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.last_layer + 1)

    @property
    def num_layers(self) -> int:
        return len(self.layers)


def whole_model(num_layers: int) -> Stage:
    """The one stage of a model that is not cut."""
    return split_layers(num_layers, 1)[0]


def split_layers(num_layers: int, num_stages: int, *, head_cost: float = DEFAULT_HEAD_COST) -> list[Stage]:
    """Cut `num_layers` into stages such that the slowest takes the least time; see `balanced_sizes`."""
    return stages_of(balanced_sizes(num_layers, num_stages, head_cost=head_cost))


def balanced_sizes(num_layers: int, num_stages: int, *, head_cost: float = DEFAULT_HEAD_COST) -> list[int]:
    """Layers of each stage such that the slowest takes the least time. Later stages get the extra layers.

    All layers take the same time; the last stage also computes the head, which takes `head_cost` times a layer's.
    Raises ValueError when there are fewer layers than stages.
    """
    if not 1 <= num_stages <= num_layers:
        raise ValueError(f"{num_layers} layers can't be cut into {num_stages} stages")
    num_others = num_stages - 1
    if num_others == 0:
        return [num_layers]

    def slowest(last: int) -> float:
        return max(last + head_cost, -(-(num_layers - last) // num_others))

    # among equals the largest last stage: the others, which are more, have less to do
    last = min(range(num_layers - num_others, 0, -1), key=slowest)
    base, extra = divmod(num_layers - last, num_others)
    return [base] * (num_others - extra) + [base + 1] * extra + [last]


def stages_of(sizes: Sequence[int]) -> list[Stage]:
    """The stages that hold so many layers, first to last."""
    stages, first = [], 0
    for rank, size in enumerate(sizes):
        stages.append(
            Stage(
                first_layer=first,
                last_layer=first + size - 1,
                is_first=rank == 0,
                is_last=rank == len(sizes) - 1,
            )
        )
        first += size
    return stages
