"""What the worker keeps of each request, and how a step's tensors are made of it.

A request has a slot: a row of `token_ids` (all its known tokens) and of `block_table`. A step is then a few numpy
expressions over the rows of its requests; nothing is done token by token in Python.

Shapes: C slots, L longest request, B blocks of it, R requests of the step, T tokens of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millstream.kernels.ops import StepTables
from millstream.messages import NewRequest, SchedulerOutput
from millstream.request import SamplingParams

IntArray = NDArray[np.int32]


@dataclass
class SlotState:
    """One request's scalars; its tokens and blocks are in the arrays, at row `slot`."""

    slot: int
    num_tokens: int
    num_prompt_tokens: int
    num_blocks: int
    params: SamplingParams
    stop_token_ids: list[int]


@dataclass(frozen=True)
class StepInput:
    """A step, ready for the model."""

    token_ids_T: Tensor
    tables: StepTables
    states: list[SlotState]
    """Of the step's requests, in order."""
    sampled_rows: list[int]
    """Which of the requests want a next token."""
    last_token_S: IntArray
    """The token of the step whose logits give it, for each of `sampled_rows`."""


class InputBatch:
    """Token ids and block tables of all requests that the worker knows."""

    def __init__(self, *, num_slots: int, max_model_len: int, block_size: int) -> None:
        self._block_size = block_size
        # zeros are mapped only when touched, so rows that nobody uses take no memory
        self.token_ids_CL: IntArray = np.zeros((num_slots, max_model_len + 1), np.int32)
        self.block_table_CB: IntArray = np.zeros((num_slots, -(-max_model_len // block_size)), np.int32)
        self._counting: IntArray = np.arange(num_slots + 1, dtype=np.int32)
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._states: dict[str, SlotState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def state(self, request_id: str) -> SlotState:
        return self._states[request_id]

    def is_current(self, request_id: str, state: SlotState) -> bool:
        """Whether `state` is still what is kept of this request: it was not forgotten since."""
        return self._states.get(request_id) is state

    def token_ids(self, state: SlotState) -> IntArray:
        """All known tokens of a request: a view, valid until the next one is appended."""
        return self.token_ids_CL[state.slot, : state.num_tokens]

    def append_token(self, state: SlotState, token_id: int) -> None:
        self.token_ids_CL[state.slot, state.num_tokens] = token_id
        state.num_tokens += 1

    def apply(self, step: SchedulerOutput) -> None:
        """Take over what changed since the last step."""
        self.forget(step.forget_ids)
        for new in step.new_requests:
            self._add(new)
        for request_id, block_ids in zip(step.request_ids, step.new_block_ids, strict=True):
            if block_ids:
                self._append_blocks(self._states[request_id], block_ids)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drop all that is kept of these requests."""
        for request_id in request_ids:
            if (state := self._states.pop(request_id, None)) is not None:
                self._free_slots.append(state.slot)

    def make_input(self, step: SchedulerOutput, device: torch.device) -> StepInput:
        """The tensors of a step whose changes were applied."""
        states = [self._states[i] for i in step.request_ids]
        num_rows, size = len(states), self._block_size
        slots_R = np.array([s.slot for s in states], np.intp)
        start_R = np.array(step.num_computed_tokens, np.int32)
        if step.num_tokens == num_rows:
            # a token of each request, as in most steps
            query_start_R1 = self._counting[: num_rows + 1]
            position_T, slot_T, context_len_R = start_R, slots_R, start_R + 1
        else:
            query_len_R = np.array(step.num_scheduled_tokens, np.int32)
            query_start_R1 = np.zeros(num_rows + 1, np.int32)
            np.cumsum(query_len_R, out=query_start_R1[1:])
            row_T = np.repeat(self._counting[:num_rows], query_len_R)
            position_T = np.arange(query_start_R1[-1], dtype=np.int32) - (query_start_R1[:-1] - start_R)[row_T]
            slot_T, context_len_R = slots_R[row_T], start_R + query_len_R
        num_blocks = -(-int(context_len_R.max(initial=0)) // size)
        block_T, offset_T = np.divmod(position_T, size)
        sampled_rows = [i for i, wanted in enumerate(step.num_sampled_tokens) if wanted]

        def on_device(array: IntArray) -> Tensor:
            return torch.from_numpy(array).to(device)

        return StepInput(
            token_ids_T=on_device(self.token_ids_CL[slot_T, position_T]),
            tables=StepTables(
                positions_T=on_device(position_T),
                slot_mapping_T=on_device(self.block_table_CB[slot_T, block_T] * size + offset_T),
                query_start_R1=on_device(query_start_R1),
                context_len_R=on_device(context_len_R),
                block_table_RB=on_device(self.block_table_CB[slots_R, :num_blocks]),
                query_lens=tuple(step.num_scheduled_tokens),
                context_lens=tuple(context_len_R.tolist()),
            ),
            states=states,
            sampled_rows=sampled_rows,
            last_token_S=query_start_R1[1:][sampled_rows] - 1,
        )

    def _add(self, new: NewRequest) -> None:
        assert new.request_id not in self._states, f"{new.request_id} is known already"
        state = SlotState(
            slot=self._free_slots.pop(),
            num_tokens=len(new.token_ids),
            num_prompt_tokens=new.num_prompt_tokens,
            num_blocks=0,
            params=new.sampling_params,
            stop_token_ids=new.stop_token_ids,
        )
        self._states[new.request_id] = state
        self.token_ids_CL[state.slot, : state.num_tokens] = new.token_ids
        self._append_blocks(state, new.block_ids)

    def _append_blocks(self, state: SlotState, block_ids: Sequence[int]) -> None:
        end = state.num_blocks + len(block_ids)
        self.block_table_CB[state.slot, state.num_blocks : end] = block_ids
        state.num_blocks = end
