"""What stages hand to each other: hidden states to the next stage, sampled tokens from the last to the first.

A slot of a hidden link is a header (step id, when and how long each stage computed) and then the hidden states as they
are, so a stage computes with the very bits that the one before it made. Shapes: T tokens of the step, D model width.
"""

from __future__ import annotations

import struct
import time
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from millstream.messages import RingEnd
from millstream.parallel.layout import TOKEN_HEADER_BYTES, StageTime, hidden_header_bytes
from millstream.parallel.ring import RingReader, RingWriter


class HiddenSender:
    """To the next stage."""

    def __init__(self, end: RingEnd, *, width: int, dtype: torch.dtype, num_stages: int) -> None:
        self._ring = RingWriter(end)
        self._header = _header(num_stages)
        self._num_stages = num_stages
        self._hidden = _hidden_views(self._ring.slots, hidden_header_bytes(num_stages), width, dtype)

    def send(self, step_id: int, hidden_TD: Tensor, times: list[StageTime], *, started: float) -> None:
        """Copy a step's hidden states to the next stage; waits only while its ring is full.

        `times` are those of the stages before, `started` is when this one began to compute, which it has now done.
        """
        computed = time.monotonic()
        slot = self._ring.take()
        self._hidden[slot][: hidden_TD.shape[0]].copy_(hidden_TD)
        own = StageTime(started, computed - started, time.monotonic() - computed)
        unknown = [StageTime(0.0, 0.0, 0.0)] * (self._num_stages - len(times) - 1)
        self._header.pack_into(self._ring.slots[slot], 0, step_id, *chain(*times, own, *unknown))
        self._ring.commit()


class HiddenReceiver:
    """From the stage before."""

    def __init__(self, end: RingEnd, *, width: int, dtype: torch.dtype, num_stages: int, rank: int) -> None:
        self._ring = RingReader(end)
        self._header = _header(num_stages)
        self._rank = rank
        self._hidden = _hidden_views(self._ring.slots, hidden_header_bytes(num_stages), width, dtype)
        self._slot: int | None = None

    def next_step_id(self) -> int:
        """Of the step whose hidden states come next; waits for them."""
        if self._slot is None:
            self._slot = self._ring.take()
        step_id: int = self._header.unpack_from(self._ring.slots[self._slot])[0]
        return step_id

    def receive(self, step_id: int, num_tokens: int) -> tuple[Tensor, list[StageTime]]:
        """A step's hidden states (T, D), valid until `release`, and the times of the stages before."""
        slot = self._ring.take() if self._slot is None else self._slot
        self._slot = None
        found, *numbers = self._header.unpack_from(self._ring.slots[slot])
        assert found == step_id, f"hidden states of step {found} came for step {step_id}"
        width = len(StageTime._fields)
        times = [StageTime(*numbers[i * width : (i + 1) * width]) for i in range(self._rank)]
        return self._hidden[slot][:num_tokens], times

    def release(self) -> None:
        """The hidden states received last are no longer needed."""
        self._ring.release()


class TokenSender:
    """From the last stage to the first: what each sampled row of a step got."""

    def __init__(self, end: RingEnd) -> None:
        self._ring = RingWriter(end)

    def send(self, step_id: int, token_ids: list[int]) -> None:
        slot = self._ring.slots[self._ring.take()]
        struct.pack_into("qq", slot, 0, step_id, len(token_ids))
        np.frombuffer(slot, np.int32, len(token_ids), TOKEN_HEADER_BYTES)[:] = token_ids
        self._ring.commit()


class TokenReceiver:
    """The first stage's end."""

    def __init__(self, end: RingEnd) -> None:
        self._ring = RingReader(end)

    def is_ready(self) -> bool:
        """Whether tokens have come."""
        return self._ring.is_ready()

    def receive(self, step_id: int) -> list[int]:
        """The tokens of the oldest step that were not received yet, which must be `step_id`; waits for them."""
        slot = self._ring.slots[self._ring.take()]
        found, count = struct.unpack_from("qq", slot)
        assert found == step_id, f"tokens of step {found} came for step {step_id}"
        token_ids: list[int] = np.frombuffer(slot, np.int32, count, TOKEN_HEADER_BYTES).tolist()
        self._ring.release()
        return token_ids


def _header(num_stages: int) -> struct.Struct:
    return struct.Struct(f"q{len(StageTime._fields) * num_stages}d")


def _hidden_views(slots: list[memoryview], header_bytes: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    row_bytes = width * dtype.itemsize
    views = []
    for slot in slots:
        num_rows = (len(slot) - header_bytes) // row_bytes
        data = torch.frombuffer(slot[header_bytes : header_bytes + num_rows * row_bytes], dtype=dtype)
        views.append(data.view(num_rows, width))
    return views
