"""How large the slots between stages are. Imports no torch: the executor makes the rings, the stages use them."""

from __future__ import annotations

from typing import NamedTuple

TOKEN_HEADER_BYTES = 16
_ALIGNMENT = 128


class StageTime(NamedTuple):
    """A stage's work on a step, told to the stages after it."""

    started: float
    """time.monotonic(), which all processes of a host share."""
    seconds: float
    """Computing; waiting and handing over not counted."""
    send_seconds: float
    """Handing over to the next stage."""


def hidden_header_bytes(num_stages: int) -> int:
    """Step id and StageTime of each stage, rounded up so that the hidden states begin on cache lines of their own."""
    return -(-8 * (1 + len(StageTime._fields) * num_stages) // _ALIGNMENT) * _ALIGNMENT


def hidden_slot_bytes(*, max_tokens: int, width: int, itemsize: int, num_stages: int) -> int:
    """A slot for the hidden states of a step of up to `max_tokens` tokens."""
    return hidden_header_bytes(num_stages) + max_tokens * width * itemsize


def token_slot_bytes(*, max_rows: int) -> int:
    """A slot for a step's sampled tokens."""
    return TOKEN_HEADER_BYTES + 4 * max_rows
