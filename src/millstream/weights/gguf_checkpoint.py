"""Tensors of a GGUF file, mapped into memory and dequantised as they are read."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

from millstream.errors import ModelError
from millstream.hub.gguf import GGUFFile
from millstream.weights.checkpoint import CheckpointTensor, start_readahead
from millstream.weights.dequantize import dequantize, type_of


class GGUFCheckpoint:
    """The tensors of a GGUF file. Raises ModelError when one has an odd size or a type that is not supported."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        start_readahead(file.path)
        # copy-on-write, so that torch can take the memory without a copy; nothing is ever written to it
        self._data = np.memmap(file.path, dtype=np.uint8, mode="c")
        self._tensors = {}
        for tensor in sorted(file.tensors.values(), key=lambda t: t.offset):
            kind, count = type_of(tensor.type_name), math.prod(tensor.shape)
            expected = count // kind.num_values * kind.num_bytes
            if count % kind.num_values or tensor.num_bytes != expected or tensor.offset + expected > len(self._data):
                raise ModelError(
                    f"{file.path}: tensor {tensor.name!r} of shape {list(tensor.shape)} and type {tensor.type_name} "
                    f"takes {expected} bytes, but lies at {tensor.offset} to {tensor.offset + tensor.num_bytes} of a "
                    f"file of {len(self._data)} bytes"
                )
            self._tensors[tensor.name] = CheckpointTensor(tensor.name, tensor.shape, tensor.num_bytes)

    @property
    def tensors(self) -> Mapping[str, CheckpointTensor]:
        return self._tensors

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        tensor = self._file.tensors[name]
        data = np.asarray(self._data[tensor.offset : tensor.offset + tensor.num_bytes])
        return dequantize(data, tensor.type_name, dtype).view(tensor.shape)
