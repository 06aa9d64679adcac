"""Where a rank stands among the ranks that hold one model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from millstream.parallel.stage import Stage, split_layers, stages_of


def let_openmp_sleep() -> None:
    """Keep torch's idle threads from spinning; call it before torch is loaded.

    While they spin on cores that another process wants (the API process, say), a step takes many times as long.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@dataclass(frozen=True)
class ParallelContext:
    """This rank of `world_size` ranks; rank r holds stage r. The default is a model in one piece.

    `layer_split` says how many layers each stage has; without it they are about equal.
    """

    rank: int = 0
    world_size: int = 1
    layer_split: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank is {self.rank}: it must be from 0 to {self.world_size - 1}")
        if self.layer_split is not None and len(self.layer_split) != self.world_size:
            raise ValueError(f"{len(self.layer_split)} stages for {self.world_size} ranks")

    def stage(self, num_layers: int) -> Stage:
        """The layers that this rank holds of a model of `num_layers`."""
        if self.layer_split is None:
            return split_layers(num_layers, self.world_size)[self.rank]
        if sum(self.layer_split) != num_layers:
            raise ValueError(f"stages of {sum(self.layer_split)} layers for a model of {num_layers}")
        return stages_of(self.layer_split)[self.rank]


def share_cores(cpus: Sequence[int], num_stages: int) -> list[list[int]]:
    """Cores for each stage: as many for one as for another, at least one, neighbours where the numbers are.

    Cores that are left over go to no stage; with fewer cores than stages, stages share them.
    """
    each = len(cpus) // num_stages
    if each == 0:
        return [[cpus[rank % len(cpus)]] for rank in range(num_stages)]
    return [list(cpus[rank * each : (rank + 1) * each]) for rank in range(num_stages)]
