"""Dequantises the blocks of a GGUF tensor to floats.

The commonest types are done here by torch, several times as fast as by the gguf package: loading is most of the time
that a start takes. All other types are the package's. Either way in slices that stay in the cache, and so small that
torch starts no threads of its own: the loader reads several tensors at once instead.

A quantised type packs rows of 32 values (legacy types) or 256 (K types) into blocks of a fixed number of bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize
from torch import Tensor

from millstream.errors import ModelError

SLICE_VALUES = 2**15
"""Values dequantised at a time."""

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BY_PACKAGE = ("Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte `start` of every block, as float32: (blocks, 1)."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """16 bytes of 4-bit values per block as 32 floats: the low halves first."""
    values = torch.empty(packed.shape[0], 32)
    values[:, :16] = packed & 15
    values[:, 16:] = packed >> 4
    return values


def _q4_0(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 2:]).sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 4:]).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks, 0))


_BY_TORCH: dict[str, Callable[[Tensor], Tensor]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}
SUPPORTED_TYPES = (*_PLAIN, *_BY_TORCH, *_BY_PACKAGE)


def block_size(type_name: str) -> tuple[int, int]:
    """Values in a block of a type, and its bytes. Raises ModelError for a type that is not supported."""
    if type_name not in SUPPORTED_TYPES:
        raise ModelError(f"tensors of GGUF type {type_name} are not supported: only {', '.join(SUPPORTED_TYPES)}")
    values, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    return int(values), int(num_bytes)


def dequantize(data: np.ndarray[Any, np.dtype[np.uint8]], type_name: str, dtype: torch.dtype) -> Tensor:
    """All values of a tensor's bytes, in a row, as `dtype`. `data` is only read. May run in several threads at once."""
    if type_name in _PLAIN:
        return torch.from_numpy(data).view(_PLAIN[type_name]).to(dtype, copy=True)
    values, num_bytes = block_size(type_name)
    num_blocks = len(data) // num_bytes
    out = torch.empty(num_blocks, values, dtype=dtype)
    step = SLICE_VALUES // values
    by_torch = _BY_TORCH.get(type_name)
    if by_torch is not None:
        blocks = torch.from_numpy(data).view(num_blocks, num_bytes)
        for start in range(0, num_blocks, step):
            out[start : start + step] = by_torch(blocks[start : start + step])
    else:
        kind, rows = GGMLQuantizationType[type_name], data.reshape(num_blocks, num_bytes)
        for start in range(0, num_blocks, step):
            out[start : start + step] = torch.from_numpy(gguf_dequantize(rows[start : start + step], kind))
    return out.view(-1)
