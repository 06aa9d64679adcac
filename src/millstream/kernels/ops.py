"""The operations a model is made of, and where their implementations are chosen.

Shapes: T tokens of the step, R requests, D model width, K/N inputs/outputs of a linear layer, H query heads,
G key/value heads, E head width, V vocabulary, B blocks of a table, S tokens of a block.

Every implementation (reference: plain torch) follows the same contract, and a model calls nothing else: what a
model does to a tensor can therefore be recorded as a list of operations and replayed. Operations never look at
requests or settings. How weights and the KV cache lie in memory is the implementation's own business: it makes
them with `pack_linear` and `allocate_kv_cache` and is handed them back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from millstream.errors import ConfigError
from millstream.log import log

if TYPE_CHECKING:
    from torch import Tensor

LinearWeight = Any
"""What `pack_linear` made of a weight (and bias)."""

LayerCache = Any
"""What `allocate_kv_cache` made for one layer."""


@dataclass(frozen=True)
class StepTables:
    """Where the tokens of a step belong: built once for a step, used by every layer. All int32, on the device.

    The T tokens are the requests' tokens one request after the other. Request r owns tokens
    `query_start_R1[r]` to `query_start_R1[r + 1]`; they stand at the end of a context of `context_len_R[r]` tokens
    (their own included), whose keys and values lie in the blocks of `block_table_RB[r]`, in order.
    """

    positions_T: Tensor
    slot_mapping_T: Tensor
    """Where each token's key and value go: block id * S + offset."""
    query_start_R1: Tensor
    context_len_R: Tensor
    block_table_RB: Tensor
    """Padded with 0; only the first ceil(context_len / S) entries of a row count."""
    query_lens: tuple[int, ...]
    """The same counts on the host, for implementations that plan there."""
    context_lens: tuple[int, ...]


class Ops(Protocol):
    """The operations. Results are new tensors in the type of the inputs unless said otherwise."""

    name: str

    def pack_linear(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> LinearWeight:
        """Bring a linear layer's weight into the form that `linear` wants."""
        ...

    def pack_gate_up(self, gate_NK: Tensor, up_NK: Tensor) -> LinearWeight:
        """Bring a gated MLP's two input weights into the form that `linear_silu_mul` wants."""
        ...

    def allocate_kv_cache(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> LayerCache:
        """Zeroed room for one layer's keys and values."""
        ...

    def embedding(self, token_ids_T: Tensor, table_VD: Tensor) -> Tensor:
        """Rows of the table: (T, D)."""
        ...

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32."""
        ...

    def linear(self, x_TK: Tensor, weight: LinearWeight) -> Tensor:
        """x W^T + bias: (T, N)."""
        ...

    def linear_add(self, x_TK: Tensor, weight: LinearWeight, residual_TN: Tensor) -> Tensor:
        """residual + x W^T + bias: (T, N). May reuse the residual's memory."""
        ...

    def linear_silu_mul(self, x_TK: Tensor, weight: LinearWeight) -> Tensor:
        """silu(x Wgate^T) * (x Wup^T), of a weight from `pack_gate_up`: (T, N)."""
        ...

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
        """Split a fused (q, k, v) row, norm q and k by head where weights are given, rotate both by their position,
        write k and v into the cache; returns the rotated q: (T, H * E).

        `cos_sin_PE` is float32 by position: E/2 cosines, then E/2 sines. Rotation pairs dimension i with i + E/2.
        """
        ...

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
        """Causal attention of each token over its request's context in the cache: (T, H * E).

        With a window, a token at position p sees positions p - window + 1 to p.
        """
        ...

    def logits(self, x_RD: Tensor, weight: LinearWeight) -> Tensor:
        """x W^T in float32, for the rows that need it: (R, V)."""
        ...


def make_ops(
    name: str,
    *,
    dtype: str,
    threads: int | None = None,
    head_dim: int = 64,
    block_size: int = 32,
    quantization: str | None = None,
    is_pinned: bool = False,
) -> Ops:
    """The operations called `name` for tensors of `dtype` ("float32", "bfloat16", "float16").

    "native" are the ones in C++, "reference" those in torch; "auto" takes the native ones where they can compute what
    is asked for, and says in the log why not otherwise. Raises ConfigError where "native", `quantization` or pinned
    threads can't be had.
    """
    from millstream.kernels.native import NativeOps, native_obstacle
    from millstream.kernels.reference import ReferenceOps

    if name == "reference":
        obstacle = "--kernels is reference"
    else:
        obstacle = native_obstacle(dtype=dtype, head_dim=head_dim, block_size=block_size)
    if not obstacle:
        return NativeOps(dtype=dtype, threads=threads, quantization=quantization, is_pinned=is_pinned)
    if quantization is not None:
        raise ConfigError(f"--quantization is {quantization}: only the native kernels have it, but {obstacle}")
    if is_pinned:
        raise ConfigError(f"--pin-threads is on: only the native kernels pin their threads, but {obstacle}")
    if name == "native":
        raise ConfigError(f"--kernels is native, but {obstacle}")
    if name == "auto":
        log.warning("Computing with torch, which is slower than the native kernels: %s", obstacle)
    return ReferenceOps(dtype=dtype)
