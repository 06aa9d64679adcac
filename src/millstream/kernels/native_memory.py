"""Memory for weights and KV caches: large pages where the system has them, untouched pages until they are used."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

_LARGE_PAGE = 2 * 2**20
_CHUNK = 64 * 2**20
_ALIGNMENT = 128


def allocate(num_bytes: int) -> Tensor:
    """Zeroed bytes of their own mapping, starting at a large page. Pages take memory once they are written."""
    size = _round_up(num_bytes, _LARGE_PAGE) + _LARGE_PAGE
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    data = torch.frombuffer(memory, dtype=torch.uint8)
    start = -data.data_ptr() % _LARGE_PAGE
    return data[start : start + num_bytes]


class Arena:
    """Hands out pieces of large mappings, so that small weights share large pages and lie one after the other."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A zeroed tensor. Its memory is given back when all tensors of its mapping are gone."""
        num_bytes = math.prod(shape) * dtype.itemsize
        begin = _round_up(self._used, _ALIGNMENT)
        if begin + num_bytes > len(self._chunk):
            self._chunk, begin = allocate(max(_CHUNK, num_bytes)), 0
        self._used = begin + num_bytes
        return self._chunk[begin : self._used].view(dtype).view(shape)


def _round_up(n: int, to: int) -> int:
    return -(-n // to) * to
