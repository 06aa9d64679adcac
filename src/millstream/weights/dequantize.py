"""Dequantises the blocks of a GGUF tensor to floats.

By the native kernels; where those were not built by the gguf package, which takes many times as long.

A quantised type packs rows of 32 values (legacy types) or 256 (K types) into blocks of a fixed number of bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from millstream.errors import ModelError
from millstream.hub.gguf_types import BY_NAME, GGMLType
from millstream.kernels.native_dequantize import native_dequantize

SLICE_VALUES = 2**15
"""Values that the package dequantises at a time: they stay in the cache."""

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SUPPORTED_TYPES = (*_PLAIN, "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")


def type_of(name: str) -> GGMLType:
    """A type by its name. Raises ModelError for one that is not supported."""
    if name not in SUPPORTED_TYPES:
        raise ModelError(f"tensors of GGUF type {name} are not supported: only {', '.join(SUPPORTED_TYPES)}")
    return BY_NAME[name]


def dequantize(data: np.ndarray[Any, np.dtype[np.uint8]], type_name: str, dtype: torch.dtype) -> Tensor:
    """All values of a tensor's bytes, in a row, as `dtype`. `data` is only read. May run in several threads at once."""
    if type_name in _PLAIN:
        return torch.from_numpy(data).view(_PLAIN[type_name]).to(dtype, copy=True)
    if dtype == torch.float16:  # the kernels have no such type
        return dequantize(data, type_name, torch.float32).to(dtype)
    kind = type_of(type_name)
    out_BV = torch.empty(len(data) // kind.num_bytes, kind.num_values, dtype=dtype)
    if not native_dequantize(data, kind.number, out_BV):
        _by_package(data, kind, out_BV)
    return out_BV.view(-1)


def _by_package(data: np.ndarray[Any, np.dtype[np.uint8]], kind: GGMLType, out_BV: Tensor) -> None:
    # importing it takes 0.1 s
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize as gguf_dequantize

    rows, step = data.reshape(-1, kind.num_bytes), SLICE_VALUES // kind.num_values
    for start in range(0, len(rows), step):
        values = gguf_dequantize(rows[start : start + step], GGMLQuantizationType(kind.number))
        out_BV[start : start + step] = torch.from_numpy(values)
