"""NativeOps: the operations in C++ (csrc/), on CPU tensors.

Each call is one native call that takes addresses. Weights lie in panels of 32 output columns, the KV cache in the
layout that attention multiplies with (csrc/types.h); results are rounded once, from float32, at an operation's end.

Every result has the same bits whatever else is in the step: rows, chunks, batch and threads do not matter (they do
differ between instruction set levels).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from millstream.kernels.native_memory import Arena, allocate
from millstream.kernels.ops import LayerCache, LinearWeight, StepTables

try:
    from millstream.kernels import _native

    _import_error = ""
except ImportError as e:  # built without a compiler, or for another machine
    _import_error = f"the native kernels can't be loaded: {e}"

LEVELS = ("portable", "avx2", "avx512", "avx512_bf16", "amx")
"""Instruction sets, ascending: a processor that has one has those before it."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_CODES = {torch.float32: 0, torch.bfloat16: 1}
_INT8 = 2
_STORE, _ADD, _SILU_MUL, _STORE_F32, _ARGMAX = range(5)
_PANEL, _LANES = 32, 16
_MAX_HEAD_DIM = 256


def native_available() -> bool:
    """Whether NativeOps can be made here."""
    return not _import_error


def native_unavailable_reason() -> str:
    """Why not: a sentence; empty where it can."""
    return _import_error


def native_obstacle(*, dtype: str, head_dim: int, block_size: int) -> str:
    """Why the native kernels can't compute such a model; empty where they can."""
    if _import_error:
        return _import_error
    if dtype not in _DTYPES:
        return f"they compute in {' or '.join(_DTYPES)}, not in {dtype}"
    if head_dim % _LANES or not 0 < head_dim <= _MAX_HEAD_DIM:
        return f"heads are {head_dim} wide: it must be a multiple of {_LANES} up to {_MAX_HEAD_DIM}"
    if block_size % _LANES:
        return f"--block-size is {block_size}: it must be a multiple of {_LANES}"
    return ""


def native_level() -> str:
    """The best instruction set of this processor that the kernels are compiled for. ValueError where there are none."""
    if _import_error:
        raise ValueError(_import_error)
    return LEVELS[_native.best_level()]


@dataclass(frozen=True)
class NativeLinear:
    """A packed linear layer: N outputs of K inputs. Tensors are kept here, `handle` knows their addresses."""

    handle: _native.LinearWeight
    num_inputs: int
    num_outputs: int
    is_gate_up: bool
    words: Tensor
    bias: Tensor | None

    @property
    def num_bytes(self) -> int:
        """Memory of the weight as it is read in a step."""
        return self.words.nbytes


@dataclass(frozen=True)
class NativeKVCache:
    """One layer's keys and values, see csrc/types.h for how they lie in `data`."""

    handle: _native.KVCache
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    data: Tensor


class BufferSource(Protocol):
    """Where the results of recorded operations go (millstream.kernels.native_plan)."""

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor: ...

    def holds(self, tensor: Tensor) -> bool: ...


@dataclass(frozen=True)
class _Recording:
    buffers: BufferSource
    kept: list[object] = field(default_factory=list)
    """What the recorded addresses lie in."""


class NativeOps:
    """See `millstream.kernels.ops.Ops`.

    Args:
        dtype: "float32" or "bfloat16".
        threads: compute threads, the caller's included (default: one for each CPU that the process may use).
        level: one of LEVELS (default: the best).
        is_pinned: keep each thread, the caller's included, on one CPU.
        quantization: "int8": linear layers multiply 8-bit weights with 8-bit inputs, each with a scale for every 32.

    Raises ValueError for a dtype or level that does not run here. Remembers the latest step's tables, so one instance
    serves one model in one thread.
    """

    name = "native"

    def __init__(
        self,
        *,
        dtype: str,
        threads: int | None = None,
        level: str | None = None,
        is_pinned: bool = False,
        quantization: str | None = None,
    ) -> None:
        if _import_error:
            raise ValueError(_import_error)
        if dtype not in _DTYPES:
            raise ValueError(f"dtype is {dtype!r}: the native kernels compute in {' or '.join(_DTYPES)}")
        if level is not None and level not in LEVELS:
            raise ValueError(f"level is {level!r}: it must be one of {', '.join(LEVELS)}")
        if quantization not in (None, "int8"):
            raise ValueError(f"quantization is {quantization!r}: it must be 'int8' or None")
        self.dtype = _DTYPES[dtype]
        self.level = level or native_level()
        self.threads = threads or len(os.sched_getaffinity(0))
        self.runtime = _native.Runtime(LEVELS.index(self.level), self.threads, is_pinned)
        self._target: _native.Runtime | _native.Plan = self.runtime
        self._recording: _Recording | None = None
        self._code = _CODES[self.dtype]
        self._is_int8 = quantization == "int8"
        self._arena = Arena()
        self._tables: StepTables | None = None
        self._native_tables: _native.StepTables | None = None

    @contextmanager
    def recording(self, plan: _native.Plan, buffers: BufferSource) -> Iterator[list[object]]:
        """Within it, operations are written down in `plan` and not done. Yields what must live as long as the plan."""
        recording = _Recording(buffers)
        self._target, self._recording = plan, recording
        try:
            yield recording.kept
        finally:
            self._target, self._recording = self.runtime, None

    # -- weights and caches --------------------------------------------------------------------------------------

    def pack_linear(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> LinearWeight:
        return self._pack(weight_NK, None, bias_N, is_int8=self._is_int8)

    def pack_gate_up(self, gate_NK: Tensor, up_NK: Tensor) -> LinearWeight:
        return self._pack(gate_NK, up_NK, None, is_int8=self._is_int8)

    def _pack(self, weight_NK: Tensor, up_NK: Tensor | None, bias_N: Tensor | None, *, is_int8: bool) -> NativeLinear:
        num_outputs, num_inputs = weight_NK.shape
        weight_NK = self._constant(weight_NK)
        up_NK = None if up_NK is None else self._constant(up_NK)
        kind = _INT8 if is_int8 else self._code
        shape = _native.LinearWeight(kind, num_inputs, num_outputs, up_NK is not None, 0, 0)
        words = self._arena.take((shape.num_panels(), shape.panel_words()), torch.int32)
        bias = None
        if bias_N is not None:
            bias = torch.zeros(shape.num_panels() * _PANEL)
            bias[:num_outputs] = bias_N
        self.runtime.pack(
            kind, self._code, num_inputs, num_outputs, weight_NK.data_ptr(), _address(up_NK), words.data_ptr()
        )
        handle = _native.LinearWeight(
            kind, num_inputs, num_outputs, up_NK is not None, words.data_ptr(), _address(bias)
        )
        return NativeLinear(handle, num_inputs, num_outputs, up_NK is not None, words, bias)

    def allocate_kv_cache(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> LayerCache:
        """Raises ValueError where blocks or heads are no multiples of 16, or heads wider than 256."""
        if block_size % _LANES:
            raise ValueError(f"block_size is {block_size}: the native kernels need a multiple of {_LANES}")
        if head_dim % _LANES or not 0 < head_dim <= _MAX_HEAD_DIM:
            raise ValueError(
                f"head_dim is {head_dim}: the native kernels need a multiple of {_LANES} up to {_MAX_HEAD_DIM}"
            )
        data = allocate(2 * num_blocks * block_size * num_kv_heads * head_dim * self.dtype.itemsize)
        handle = _native.KVCache(self._code, num_blocks, block_size, num_kv_heads, head_dim, data.data_ptr())
        return NativeKVCache(handle, num_blocks, block_size, num_kv_heads, head_dim, data)

    # -- by token ------------------------------------------------------------------------------------------------

    def embedding(self, token_ids_T: Tensor, table_VD: Tensor) -> Tensor:
        """An id outside the table gives zeros."""
        return self.gather(token_ids_T, self._constant(table_VD))

    def gather(self, ids_R: Tensor, rows_TD: Tensor) -> Tensor:
        """The rows with these numbers: (R, D)."""
        ids_R = self._input(ids_R if ids_R.dtype == torch.int32 else ids_R.int())
        width = rows_TD.shape[1]
        out = self._empty((ids_R.shape[0], width))
        self._target.gather(
            ids_R.shape[0],
            width * self.dtype.itemsize,
            rows_TD.shape[0],
            ids_R.data_ptr(),
            rows_TD.data_ptr(),
            out.data_ptr(),
        )
        return out

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        x_TD, weight_D = self._rows(x_TD), self._constant(weight_D)
        out = self._empty(tuple(x_TD.shape))
        width = weight_D.shape[0]
        assert x_TD.shape[-1] == width, f"rows of {x_TD.shape[-1]} and weights of {width}"
        self._target.rms_norm(
            self._code, x_TD.numel() // width, width, eps, x_TD.data_ptr(), weight_D.data_ptr(), out.data_ptr()
        )
        return out

    # -- linear layers -------------------------------------------------------------------------------------------

    def linear(self, x_TK: Tensor, weight: LinearWeight) -> Tensor:
        return self._linear(x_TK, weight, _STORE, self._new(x_TK, weight))

    def linear_add(self, x_TK: Tensor, weight: LinearWeight, residual_TN: Tensor) -> Tensor:
        """Writes to the residual's memory."""
        residual_TN = self._rows(residual_TN)
        assert residual_TN.shape == (x_TK.shape[0], weight.num_outputs), f"residual of {tuple(residual_TN.shape)}"
        return self._linear(x_TK, weight, _ADD, residual_TN)

    def linear_silu_mul(self, x_TK: Tensor, weight: LinearWeight) -> Tensor:
        assert weight.is_gate_up, "the weight must come from pack_gate_up"
        return self._linear(x_TK, weight, _SILU_MUL, self._new(x_TK, weight))

    def logits(self, x_RD: Tensor, weight: LinearWeight) -> Tensor:
        out = self._empty((x_RD.shape[0], weight.num_outputs), torch.float32)
        return self._linear(x_RD, weight, _STORE_F32, out)

    def argmax(self, x_RD: Tensor, weight: LinearWeight) -> Tensor:
        """The column of the largest logit of each row, int32 (R,), without writing logits; the lowest among equals."""
        return self._linear(x_RD, weight, _ARGMAX, self._empty((x_RD.shape[0],), torch.int32))

    def _new(self, x_TK: Tensor, weight: NativeLinear) -> Tensor:
        return self._empty((x_TK.shape[0], weight.num_outputs))

    def _linear(self, x_TK: Tensor, weight: NativeLinear, epilogue: int, out: Tensor) -> Tensor:
        x_TK = self._rows(x_TK)
        assert x_TK.shape[1] == weight.num_inputs, f"rows of {x_TK.shape[1]} for {weight.num_inputs} inputs"
        self._keep(weight)
        address = out.data_ptr()
        self._target.linear(
            weight.handle,
            self._code,
            epilogue,
            x_TK.shape[0],
            x_TK.data_ptr(),
            weight.num_inputs,
            address,
            address,
            weight.num_outputs,
            address,
        )
        return out

    # -- attention -----------------------------------------------------------------------------------------------

    def rotary_and_cache(
        self,
        qkv_TN: Tensor,
        cache: LayerCache,
        tables: StepTables,
        cos_sin_PE: Tensor,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        q_norm_E: Tensor | None = None,
        k_norm_E: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        """Raises ValueError where the tables name blocks outside the cache."""
        self._check_cache(cache, num_kv_heads, head_dim)
        self._keep(cache)
        qkv_TN = self._rows(qkv_TN)
        assert qkv_TN.shape[1] == (num_heads + 2 * num_kv_heads) * head_dim, f"qkv of {tuple(qkv_TN.shape)}"
        cos_sin_PE = self._constant(cos_sin_PE, torch.float32)
        out = self._empty((qkv_TN.shape[0], num_heads * head_dim))
        q_norm_E = None if q_norm_E is None else self._constant(q_norm_E)
        k_norm_E = None if k_norm_E is None else self._constant(k_norm_E)
        self._target.rotary_and_cache(
            self.tables(tables),
            cache.handle,
            num_heads,
            qkv_TN.data_ptr(),
            cos_sin_PE.data_ptr(),
            cos_sin_PE.shape[0],
            _address(q_norm_E),
            _address(k_norm_E),
            eps,
            out.data_ptr(),
        )
        return out

    def attention(
        self,
        q_TN: Tensor,
        cache: LayerCache,
        tables: StepTables,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """Raises ValueError where the tables name blocks outside the cache."""
        self._check_cache(cache, num_kv_heads, head_dim)
        self._keep(cache)
        q_TN = self._rows(q_TN)
        assert q_TN.shape[1] == num_heads * head_dim, f"q of {tuple(q_TN.shape)}"
        assert num_heads % num_kv_heads == 0, f"{num_heads} heads for {num_kv_heads} of keys"
        out = self._empty(tuple(q_TN.shape))
        self._target.attention(
            self.tables(tables), cache.handle, num_heads, scale, window or 0, q_TN.data_ptr(), out.data_ptr()
        )
        return out

    def tables(self, tables: StepTables) -> _native.StepTables:
        """The step's tables as the kernels take them; they are the same object in every layer of a step."""
        if tables is not self._tables or self._native_tables is None:
            for table in (
                tables.positions_T,
                tables.slot_mapping_T,
                tables.query_start_R1,
                tables.context_len_R,
                tables.block_table_RB,
            ):
                assert table.dtype == torch.int32, f"a table of {table.dtype}: it must be int32"
                assert table.is_contiguous(), "a table is not contiguous"
            self._tables = tables
            self._native_tables = _native.StepTables(
                tables.positions_T.shape[0],
                tables.context_len_R.shape[0],
                tables.block_table_RB.shape[1],
                tables.positions_T.data_ptr(),
                tables.slot_mapping_T.data_ptr(),
                tables.query_start_R1.data_ptr(),
                tables.context_len_R.data_ptr(),
                tables.block_table_RB.data_ptr(),
            )
        return self._native_tables

    def _check_cache(self, cache: NativeKVCache, num_kv_heads: int, head_dim: int) -> None:
        assert (cache.num_kv_heads, cache.head_dim) == (num_kv_heads, head_dim), "the cache has other heads"

    # -- operands ------------------------------------------------------------------------------------------------

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Room for a result."""
        if self._recording is None:
            return torch.empty(shape, dtype=dtype or self.dtype)
        return self._recording.buffers.take(shape, dtype or self.dtype)

    def _rows(self, x: Tensor) -> Tensor:
        """What an operation has made, as the kernels read it."""
        assert x.dtype == self.dtype, f"a tensor of {x.dtype} for operations in {self.dtype}"
        return self._input(x)

    def _input(self, x: Tensor) -> Tensor:
        x = x if x.is_contiguous() else x.contiguous()
        if self._recording is not None and not self._recording.buffers.holds(x):
            raise ValueError(f"a tensor of shape {tuple(x.shape)} was not made by an operation: it can't be recorded")
        return x

    def _constant(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A weight or table, as the kernels read it."""
        assert x.dtype == (dtype or self.dtype), f"a weight of {x.dtype} for operations in {self.dtype}"
        x = x if x.is_contiguous() else x.contiguous()
        self._keep(x)
        return x

    def _keep(self, x: object) -> None:
        if self._recording is not None:
            self._recording.kept.append(x)


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
