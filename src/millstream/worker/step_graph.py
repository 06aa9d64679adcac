"""How a step's forward pass is driven: operation by operation, or as a plan recorded once and replayed.

The same verbs, two ways. A plan (`kernels/native_plan.py`) is the list of native operations that the model's own code
has written down; replaying it is one native call, whatever the step's rows. CUDA graphs have their place here too.

A graph is of one stage: the first takes token ids, the others hidden states; only the last has logits.

T tokens of the step, S rows whose logits are wanted, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from millstream.kernels.native import NativeOps
from millstream.kernels.ops import LayerCache, Ops, StepTables
from millstream.layers.context import ForwardContext
from millstream.models.decoder import Decoder


class StepGraph(Protocol):
    """Runs the model's parts. What a method returns is valid until it is called again."""

    def forward(self, rows: Tensor, tables: StepTables) -> Tensor:
        """Hidden states (T, D) from token ids (T,) or hidden states (T, D), whose memory may be used."""
        ...

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """Float32 logits (S, V)."""
        ...

    def argmax(self, hidden_SD: Tensor) -> list[int]:
        """The likeliest token of each row; the lowest id among equals."""
        ...


class EagerGraph:
    """Calls the model's code for every step."""

    def __init__(self, model: Decoder, kv_caches: Sequence[LayerCache]) -> None:
        self._model = model
        self._kv_caches = kv_caches

    def forward(self, rows: Tensor, tables: StepTables) -> Tensor:
        return self._model.forward(rows, ForwardContext(tables=tables, kv_caches=self._kv_caches))

    def logits(self, hidden_SD: Tensor) -> Tensor:
        return self._model.logits(hidden_SD)

    def argmax(self, hidden_SD: Tensor) -> list[int]:
        # torch's argmax takes milliseconds over a vocabulary, numpy's does not
        found: list[int] = self.logits(hidden_SD).cpu().numpy().argmax(axis=1).tolist()
        return found


class PlannedGraph:
    """Replays what was recorded; steps of up to `max_tokens` tokens, `max_rows` rows of logits."""

    def __init__(
        self, model: Decoder, ops: NativeOps, kv_caches: Sequence[LayerCache], *, max_tokens: int, max_rows: int
    ) -> None:
        from millstream.kernels.native_plan import RECORDING_TABLES, record

        context = ForwardContext(tables=RECORDING_TABLES, kv_caches=kv_caches)
        width = model.arch.hidden_size
        self._forward = record(
            ops,
            lambda rows: model.forward(rows, context),
            max_rows=max_tokens,
            input_width=None if model.stage.is_first else width,
        )
        self._head = record(ops, model.logits, max_rows=max_rows, input_width=width) if model.stage.is_last else None

    def forward(self, rows: Tensor, tables: StepTables) -> Tensor:
        return self._forward.run(rows, tables)

    def logits(self, hidden_SD: Tensor) -> Tensor:
        assert self._head is not None, "only the last stage has logits"
        return self._head.run(hidden_SD)

    def argmax(self, hidden_SD: Tensor) -> list[int]:
        assert self._head is not None, "only the last stage has logits"
        found: list[int] = self._head.run_greedy(hidden_SD).tolist()
        return found


@torch.inference_mode()
def make_graph(
    model: Decoder, ops: Ops, kv_caches: Sequence[LayerCache], *, max_tokens: int, max_rows: int
) -> StepGraph:
    """A planned graph where the operations can be recorded."""
    if isinstance(ops, NativeOps):
        return PlannedGraph(model, ops, kv_caches, max_tokens=max_tokens, max_rows=max_rows)
    return EagerGraph(model, kv_caches)
