"""ForwardContext: what a forward pass needs besides its input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millstream.kernels.ops import LayerCache, StepTables


@dataclass(frozen=True)
class ForwardContext:
    """Where the tokens of a step belong, and the KV cache of each of the stage's layers."""

    tables: StepTables
    kv_caches: Sequence[LayerCache]
