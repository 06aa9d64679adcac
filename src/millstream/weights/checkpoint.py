"""A checkpoint: named tensors on disk that are read one at a time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from millstream.errors import ModelError


@dataclass(frozen=True)
class CheckpointTensor:
    """What is known of a tensor before it is read: its name, shape (rows first) and size on disk."""

    name: str
    shape: tuple[int, ...]
    num_bytes: int


class Checkpoint(Protocol):
    """Tensors by name, in the order they lie on disk."""

    @property
    def tensors(self) -> Mapping[str, CheckpointTensor]: ...

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """One tensor, in memory of its own, dequantised and converted to `dtype`.

        Raises ModelError when the file does not hold it as its header says.
        """
        ...


def start_readahead(path: Path) -> None:
    """Ask the system to read a file into its page cache in the background."""
    if not hasattr(os, "posix_fadvise"):
        return
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError as e:
        raise ModelError(f"{path} can't be read: {e}") from e
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
    finally:
        os.close(fd)
