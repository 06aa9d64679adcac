"""ReferenceOps: the operations in plain torch. The oracle for all others, and what runs where there are none.

On a CPU, float32 and bfloat16 weights are brought into oneDNN's own layout: 1.3 to 3 times as fast as `F.linear` for
few rows, as fast for many. Everything else is torch as anyone would write it, with as few calls as possible.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from millstream.kernels.attention_plan import AttentionPlan, DecodeGroup, Piece, plan_attention
from millstream.kernels.native_memory import allocate
from millstream.kernels.ops import LayerCache, LinearWeight, StepTables

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MANY_ROWS = 4

_reorder = cast("Callable[..., Tensor]", torch.ops.mkldnn._reorder_linear_weight)
_linear = cast("Any", torch.ops.mkldnn._linear_pointwise)


@dataclass(frozen=True)
class _Weight:
    """A packed linear layer: (N, K), opaque where `is_onednn`."""

    weight: Tensor
    bias: Tensor | None
    is_onednn: bool


@dataclass(frozen=True)
class _Rotation:
    """What `rotary_and_cache` needs in every layer of a step."""

    cos_T1E: Tensor
    sin_T1E: Tensor
    """With the first half negated: x * cos + swapped halves of x * sin is the rotation."""
    key_rows_T: Tensor
    value_rows_T: Tensor
    """Rows of the cache taken as (blocks * 2 * S, G * E)."""


class ReferenceOps:
    """See `millstream.kernels.ops.Ops`. A KV cache is a tensor (blocks, 2, S, G, E).

    Remembers what it worked out from the latest step's tables, so one instance serves one model in one thread.
    """

    name = "reference"

    def __init__(self, *, dtype: str, device: str = "cpu") -> None:
        self._dtype = _DTYPES[dtype]
        self._device = device
        self._tables: StepTables | None = None
        self._rotation: _Rotation | None = None
        self._plans: dict[tuple[int, int | None], AttentionPlan] = {}

    # -- weights and caches --------------------------------------------------------------------------------------

    def pack_linear(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> LinearWeight:
        if _has_onednn(weight_NK):
            return _Weight(_reorder(weight_NK, None), bias_N, is_onednn=True)
        return _Weight(weight_NK, bias_N, is_onednn=False)

    def pack_gate_up(self, gate_NK: Tensor, up_NK: Tensor) -> LinearWeight:
        return self.pack_linear(torch.cat((gate_NK, up_NK)))

    def allocate_kv_cache(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> LayerCache:
        shape = (num_blocks, 2, block_size, num_kv_heads, head_dim)
        if self._device != "cpu":
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
        # its pages are mapped when they are written: gigabytes of zeros would cost seconds at the start
        return allocate(math.prod(shape) * self._dtype.itemsize).view(self._dtype).view(shape)

    # -- by token ------------------------------------------------------------------------------------------------

    def embedding(self, token_ids_T: Tensor, table_VD: Tensor) -> Tensor:
        return F.embedding(token_ids_T, table_VD)

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x_TD, (x_TD.shape[-1],), weight_D, eps)

    def linear(self, x_TK: Tensor, weight: LinearWeight) -> Tensor:
        w: _Weight = weight
        if w.is_onednn:
            return cast("Tensor", _linear(x_TK, w.weight, w.bias, "none", [], ""))
        if w.weight.dtype == torch.float16 and w.weight.device.type == "cpu" and x_TK.shape[0] > _MANY_ROWS:
            # few CPUs multiply float16, and torch's way around that is far slower than this one
            bias = None if w.bias is None else w.bias.float()
            return F.linear(x_TK.float(), w.weight.float(), bias).half()
        return F.linear(x_TK, w.weight, w.bias)

    def linear_add(self, x_TK: Tensor, weight: LinearWeight, residual_TN: Tensor) -> Tensor:
        w: _Weight = weight
        if w.is_onednn:
            return cast("Tensor", _linear.binary(x_TK, residual_TN, w.weight, w.bias, "add"))
        return residual_TN.add_(self.linear(x_TK, w))

    def linear_silu_mul(self, x_TK: Tensor, weight: LinearWeight) -> Tensor:
        gate_TN, up_TN = self.linear(x_TK, weight).chunk(2, dim=-1)
        return F.silu(gate_TN).mul_(up_TN)

    def logits(self, x_RD: Tensor, weight: LinearWeight) -> Tensor:
        # in 16 bits they are rounded to it first: torch has no product of 16-bit matrices in float32 on a CPU
        return self.linear(x_RD, weight).float()

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
        num_tokens, kv_size = qkv_TN.shape[0], num_kv_heads * head_dim
        block_size = cache.shape[2]
        rotation = self._rotation_of(tables, cos_sin_PE, block_size)
        qkv_TXE = qkv_TN.view(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
        qk_TXE: Tensor
        v_TGE: Tensor
        qk_TXE, v_TGE = qkv_TXE.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
        if q_norm_E is not None and k_norm_E is not None:
            q_THE, k_TGE = qk_TXE.split((num_heads, num_kv_heads), dim=1)
            q_THE, k_TGE = self.rms_norm(q_THE, q_norm_E, eps), self.rms_norm(k_TGE, k_norm_E, eps)
            qk_TXE = torch.cat((q_THE, k_TGE), dim=1)
        half = head_dim // 2
        swapped_TXE = torch.cat((qk_TXE[..., half:], qk_TXE[..., :half]), dim=-1)
        # in float32 where the inputs are 16 bits wide: cos and sin are float32
        rotated_TXE = (qk_TXE * rotation.cos_T1E).addcmul_(swapped_TXE, rotation.sin_T1E).to(qkv_TN.dtype)
        rows = cache.view(-1, kv_size)
        rows.index_copy_(0, rotation.key_rows_T, rotated_TXE[:, num_heads:].reshape(num_tokens, kv_size))
        rows.index_copy_(0, rotation.value_rows_T, v_TGE.reshape(num_tokens, kv_size))
        return rotated_TXE[:, :num_heads].reshape(num_tokens, num_heads * head_dim)

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
        block_size = cache.shape[2]
        self._see(tables)
        plan = self._plans.get((block_size, window))
        if plan is None:
            plan = plan_attention(tables, block_size=block_size, window=window, dtype=q_TN.dtype)
            self._plans[block_size, window] = plan
        q_TGJE = q_TN.view(-1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        rows = cache.view(cache.shape[0] * 2, -1)
        if len(plan.groups) == 1 and not plan.pieces and plan.groups[0].rows_R is None:
            return _decode(q_TGJE, rows, plan.groups[0], scale).reshape(q_TN.shape)
        out_TGJE = torch.empty_like(q_TGJE)
        for group in plan.groups:
            q_RGJE = q_TGJE if group.rows_R is None else q_TGJE.index_select(0, group.rows_R)
            out_RGJE = _decode(q_RGJE, rows, group, scale)
            if group.rows_R is None:
                out_TGJE.copy_(out_RGJE)
            else:
                out_TGJE.index_copy_(0, group.rows_R, out_RGJE)
        for piece in plan.pieces:
            out_TGJE[piece.start : piece.end] = _chunk(q_TGJE[piece.start : piece.end], rows, piece, scale)
        return out_TGJE.view(q_TN.shape)

    # -- once a step ---------------------------------------------------------------------------------------------

    def _see(self, tables: StepTables) -> None:
        """Forget what was worked out for another step."""
        if tables is not self._tables:
            self._tables, self._rotation, self._plans = tables, None, {}

    def _rotation_of(self, tables: StepTables, cos_sin_PE: Tensor, block_size: int) -> _Rotation:
        self._see(tables)
        if self._rotation is None:
            cos_TE, sin_TE = cos_sin_PE.index_select(0, tables.positions_T).chunk(2, dim=1)
            slots_T = tables.slot_mapping_T.long()
            key_rows_T = slots_T + slots_T.div(block_size, rounding_mode="floor") * block_size
            self._rotation = _Rotation(
                cos_T1E=torch.cat((cos_TE, cos_TE), dim=1).unsqueeze(1),
                sin_T1E=torch.cat((-sin_TE, sin_TE), dim=1).unsqueeze(1),
                key_rows_T=key_rows_T,
                value_rows_T=key_rows_T + block_size,
            )
        return self._rotation


def _has_onednn(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def _decode(q_RGJE: Tensor, cache_rows: Tensor, group: DecodeGroup, scale: float) -> Tensor:
    """One token of each of R requests: (R, G, J, E), J query heads to a key head.

    The J heads that share keys are taken as J rows of one head, so keys need not be repeated.
    """
    num_kv_heads, head_dim = q_RGJE.shape[1], q_RGJE.shape[3]
    kv = cache_rows.index_select(0, group.cache_rows).view(2, group.num_requests, -1, num_kv_heads, head_dim)
    k_RGLE, v_RGLE = kv[:, :, : group.context_len].transpose(2, 3).unbind(0)
    mask = None if group.mask is None else group.mask.expand(-1, -1, q_RGJE.shape[2], -1)
    return F.scaled_dot_product_attention(q_RGJE, k_RGLE, v_RGLE, attn_mask=mask, scale=scale)


def _chunk(q_TGJE: Tensor, cache_rows: Tensor, piece: Piece, scale: float) -> Tensor:
    """Several tokens of one request: (T, G, J, E)."""
    num_tokens, num_kv_heads, group_size, head_dim = q_TGJE.shape
    kv = cache_rows.index_select(0, piece.cache_rows).view(2, -1, num_kv_heads, 1, head_dim)[:, : piece.context_len]
    kv = kv.permute(0, 2, 3, 1, 4).expand(-1, -1, group_size, -1, -1)
    k_HLE, v_HLE = kv.reshape(2, 1, num_kv_heads * group_size, piece.context_len, head_dim).unbind(0)
    q_HTE = q_TGJE.reshape(1, num_tokens, -1, head_dim).transpose(1, 2)
    out_HTE = F.scaled_dot_product_attention(
        q_HTE, k_HLE, v_HLE, attn_mask=piece.mask, is_causal=piece.is_causal, scale=scale
    )
    return out_HTE.transpose(1, 2).reshape(q_TGJE.shape)
