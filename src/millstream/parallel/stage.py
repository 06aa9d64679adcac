"""A stage: the slice of a model's layers that one rank holds."""

from __future__ import annotations

from dataclasses import dataclass


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


def split_layers(num_layers: int, num_stages: int) -> list[Stage]:
    """Cut `num_layers` into `num_stages` stages that differ by at most one layer.

    Later stages get the extra layers, but for the last, which has the head to compute as well.
    Raises ValueError when there are fewer layers than stages.
    """
    if not 1 <= num_stages <= num_layers:
        raise ValueError(f"{num_layers} layers can't be cut into {num_stages} stages")
    base, extra = divmod(num_layers, num_stages)
    sizes = [base] * num_stages
    for i in range(extra):
        sizes[num_stages - 2 - i] += 1
    stages, first = [], 0
    for rank, size in enumerate(sizes):
        stages.append(
            Stage(
                first_layer=first,
                last_layer=first + size - 1,
                is_first=rank == 0,
                is_last=rank == num_stages - 1,
            )
        )
        first += size
    return stages
