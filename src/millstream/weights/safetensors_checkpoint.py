"""Tensors of a folder of safetensors files, sharded or not."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from millstream.errors import ModelError
from millstream.weights.checkpoint import CheckpointTensor, start_readahead

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


class SafetensorsCheckpoint:
    """The tensors of all shards. Raises ModelError when a shard is missing, cut off, or holds odd types."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        self._tensors: dict[str, CheckpointTensor] = {}
        index = self._read_index(folder)
        for file_name in sorted(set(index.values())) if index is not None else self._shards(folder):
            self._open(folder / file_name)
        for name, file_name in (index or {}).items():
            if self._file_of.get(name) != file_name:
                raise ModelError(f"{INDEX_FILE} says that {file_name} holds {name!r}, but it does not")

    @staticmethod
    def _shards(folder: Path) -> list[str]:
        names = sorted(p.name for p in folder.glob("*.safetensors"))
        if not names:
            raise ModelError(f"{folder} holds no .safetensors file")
        return [SINGLE_FILE] if SINGLE_FILE in names else names

    @staticmethod
    def _read_index(folder: Path) -> dict[str, str] | None:
        path = folder / INDEX_FILE
        if not path.exists():
            return None
        try:
            index = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            for name, file_name in index.items():
                # a name with a folder in it could lead to any file of the machine
                if Path(file_name).name != file_name or not isinstance(name, str):
                    raise ValueError(f"{file_name!r} is not a file name")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise ModelError(f"{path} is not an index of shards: {e}") from e
        return dict(index)

    def _open(self, path: Path) -> None:
        if not path.exists():
            raise ModelError(f"the shard {path} is missing")
        start_readahead(path)
        try:
            file = safe_open(path, framework="pt")
            for name in file.keys():  # noqa: SIM118 - it is not a dict
                part = file.get_slice(name)
                kind, shape = part.get_dtype(), tuple(part.get_shape())
                if kind not in _BYTES:
                    raise ModelError(f"{path}: {name!r} is of type {kind}: only {', '.join(_BYTES)} are supported")
                if name in self._tensors:
                    raise ModelError(f"{name!r} is in both {self._file_of[name]} and {path.name}")
                self._tensors[name] = CheckpointTensor(name, shape, math.prod(shape) * _BYTES[kind])
                self._file_of[name] = path.name
        except (SafetensorError, OSError) as e:
            raise ModelError(f"{path} is not a whole safetensors file: {e}") from e
        self._files[path.name] = file

    @property
    def tensors(self) -> Mapping[str, CheckpointTensor]:
        return self._tensors

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        tensor: torch.Tensor = self._files[self._file_of[name]].get_tensor(name)
        # copied even where the type is right: what comes back is a view of the file
        return tensor.to(dtype, copy=True)
