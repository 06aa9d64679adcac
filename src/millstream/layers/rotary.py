"""The table of rotations by position."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor


class Rope(Protocol):
    """The numbers of `models.rope.RopeConfig`, which stands above this package."""

    @property
    def theta(self) -> float: ...
    @property
    def kind(self) -> str: ...
    @property
    def factor(self) -> float: ...
    @property
    def low_freq_factor(self) -> float: ...
    @property
    def high_freq_factor(self) -> float: ...
    @property
    def original_max_position(self) -> int: ...


def inverse_frequencies(rope: Rope, head_dim: int, freq_factors: Tensor | None = None) -> Tensor:
    """Radians per position for each pair of dimensions, scaled: (E/2,) float32.

    `freq_factors` (E/2,) divide them as well: so Llama 3's scaling comes in GGUF files.
    """
    inv_freq = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if freq_factors is not None:
        inv_freq = inv_freq / freq_factors.float()
    if rope.kind == "linear":
        return inv_freq / rope.factor
    if rope.kind == "llama3":
        return _llama3(inv_freq, rope)
    return inv_freq


def _llama3(inv_freq: Tensor, rope: Rope) -> Tensor:
    """Llama 3.1: long waves are stretched by the factor, short ones kept, those between blended."""
    turns = rope.original_max_position * inv_freq / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * inv_freq / rope.factor + kept * inv_freq


def cos_sin_table(
    rope: Rope, *, head_dim: int, max_len: int, freq_factors: Tensor | None = None, device: str = "cpu"
) -> Tensor:
    """E/2 cosines, then E/2 sines, for positions 0 to max_len - 1: (P, E) float32."""
    inv_freq = inverse_frequencies(rope, head_dim, None if freq_factors is None else freq_factors.cpu())
    angles = torch.outer(torch.arange(max_len).float(), inv_freq)
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(device)
