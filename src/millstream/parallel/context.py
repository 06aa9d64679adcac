"""Where a rank stands among the ranks that hold one model."""

from __future__ import annotations

import os
from dataclasses import dataclass

from millstream.parallel.stage import Stage, split_layers


def let_openmp_sleep() -> None:
    """Keep torch's idle threads from spinning; call it before torch is loaded.

    While they spin on cores that another process wants (the API process, say), a step takes many times as long.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@dataclass(frozen=True)
class ParallelContext:
    """This rank of `world_size` ranks; rank r holds stage r. The default is a model in one piece."""

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank is {self.rank}: it must be from 0 to {self.world_size - 1}")

    def stage(self, num_layers: int) -> Stage:
        """The layers that this rank holds of a model of `num_layers`."""
        return split_layers(num_layers, self.world_size)[self.rank]
