"""Planned steps: a part of a model recorded once as a list of native operations, replayed by one native call.

    plan = record(ops, decoder_forward, max_rows=512, input_width=None)
    hidden_TD = plan.run(token_ids_T, tables)

Recording runs the model's own code once with `ops` writing down the operations instead of doing them. The tensors it
passes around are buffers of the plan, each used again as soon as the model's code has dropped it. What is recorded
must consist of operations of `ops` alone, with no other arithmetic on the tensors between them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from millstream.kernels import _native
from millstream.kernels.native import NativeOps
from millstream.kernels.native_memory import allocate
from millstream.kernels.ops import StepTables

_NO_INTS = torch.zeros(0, dtype=torch.int32)

RECORDING_TABLES = StepTables(
    positions_T=_NO_INTS,
    slot_mapping_T=_NO_INTS,
    query_start_R1=_NO_INTS,
    context_len_R=_NO_INTS,
    block_table_RB=_NO_INTS.view(0, 0),
    query_lens=(),
    context_lens=(),
)
"""What to hand to a model as its tables while it is recorded."""


class Buffers:
    """Memory for the results of recorded operations. A buffer is free again when its tensor is gone."""

    def __init__(self) -> None:
        self._memory: list[Tensor] = []
        self._free: list[int] = []
        self._live: set[int] = set()

    @property
    def num_bytes(self) -> int:
        return sum(len(m) for m in self._memory)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = max(1, torch.Size(shape).numel()) * dtype.itemsize
        fitting = [i for i in self._free if len(self._memory[i]) >= num_bytes]
        if fitting:
            index = min(fitting, key=lambda i: len(self._memory[i]))
            self._free.remove(index)
        else:
            index = len(self._memory)
            self._memory.append(allocate(num_bytes))
        tensor = self._memory[index][:num_bytes].view(dtype)[: torch.Size(shape).numel()].view(shape)
        self._live.add(tensor.data_ptr())
        weakref.finalize(tensor, self._release, index, tensor.data_ptr()).atexit = False
        return tensor

    def holds(self, tensor: Tensor) -> bool:
        """Whether it is a buffer in use."""
        return tensor.data_ptr() in self._live

    def _release(self, index: int, address: int) -> None:
        self._free.append(index)
        self._live.discard(address)


class Plan:
    """Recorded operations; made by `record`. Results lie in the plan's buffers, valid until its next run."""

    def __init__(self, ops: NativeOps, plan: _native.Plan, input: Tensor, output: Tensor, kept: list[object]) -> None:
        self._ops = ops
        self._plan = plan
        self._input = input
        self._output = output
        self._kept = kept
        self._greedy_ids = torch.empty(input.shape[0], dtype=torch.int32)

    @property
    def max_rows(self) -> int:
        return self._input.shape[0]

    def run(self, rows: Tensor, tables: StepTables | None = None) -> Tensor:
        """The recorded part on these rows (token ids or hidden states): as many rows of results.

        Raises ValueError for more than `max_rows` rows, or tables that name blocks outside the cache.
        """
        count = self._take_input(rows)
        self._plan.run(count, None if tables is None else self._ops.tables(tables), 0, 0)
        return self._output[:count]

    def run_greedy(self, rows: Tensor) -> Tensor:
        """For a plan that ends with logits: the id of each row's largest, int32, with no logits written."""
        count = self._take_input(rows)
        self._plan.run(count, None, self._greedy_ids.data_ptr(), 0)
        return self._greedy_ids[:count]

    def profile(self, rows: Tensor, tables: StepTables | None = None) -> list[tuple[str, float]]:
        """Runs, and says for each operation what it is and how many seconds it took, waiting included."""
        count = self._take_input(rows)
        seconds = torch.zeros(self._plan.num_ops(), dtype=torch.float64)
        self._plan.run(count, None if tables is None else self._ops.tables(tables), 0, seconds.data_ptr())
        return [(self._plan.op_name(i), s) for i, s in enumerate(seconds.tolist())]

    def _take_input(self, rows: Tensor) -> int:
        count = rows.shape[0]
        if count > self.max_rows:
            raise ValueError(f"the step has {count} rows: the plan holds {self.max_rows}")
        self._input[:count].copy_(rows)
        return count


def record(
    ops: NativeOps, compute: Callable[[Tensor], Tensor], *, max_rows: int, input_width: int | None = None
) -> Plan:
    """Record what `compute` does to its input.

    Args:
        ops: the operations that `compute` uses.
        compute: takes token ids (rows,), or hidden states (rows, input_width); gives the result.
        max_rows: rows of the largest step.
        input_width: None: the input are token ids.

    Raises ValueError where `compute` uses a tensor that no operation has made.
    """
    buffers = Buffers()
    if input_width is None:
        rows = buffers.take((max_rows,), torch.int32)
    else:
        rows = buffers.take((max_rows, input_width), ops.dtype)
    plan = _native.Plan(ops.runtime, max_rows)
    with ops.recording(plan, buffers) as kept:
        output = compute(rows)
    if not buffers.holds(output):
        raise ValueError("the recorded result was not made by an operation")
    return Plan(ops, plan, rows, output, kept)
