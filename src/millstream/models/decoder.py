"""Decoder: the one model. Embedding, blocks of attention and MLP, norm, head; a stage builds only its own part.

Shapes: T tokens of the step, R rows whose next token is wanted, D model width, V vocabulary, P positions, E head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millstream.kernels.ops import LayerCache, LinearWeight, Ops, StepTables
from millstream.layers.attention import Attention, AttentionShape
from millstream.layers.context import ForwardContext
from millstream.layers.mlp import MLP
from millstream.layers.norm import RMSNorm
from millstream.layers.rotary import cos_sin_table
from millstream.layers.slot import Slot
from millstream.models.arch import ModelArch
from millstream.parallel.stage import Stage


class Block:
    """One layer: attention, then MLP, each on the normed hidden state and added to it."""

    def __init__(self, arch: ModelArch, layer: int, ops: Ops) -> None:
        self.attention_norm = RMSNorm(ops, arch.hidden_size, eps=arch.rms_norm_eps)
        self.attention = Attention(
            ops,
            AttentionShape(
                hidden_size=arch.hidden_size,
                num_heads=arch.num_heads,
                num_kv_heads=arch.num_kv_heads,
                head_dim=arch.head_dim,
                has_qkv_bias=arch.has_qkv_bias,
                has_output_bias=arch.has_output_bias,
                has_qk_norm=arch.has_qk_norm,
                eps=arch.rms_norm_eps,
                window=arch.window_of(layer),
            ),
        )
        self.mlp_norm = RMSNorm(ops, arch.hidden_size, eps=arch.rms_norm_eps)
        self.mlp = MLP(ops, hidden_size=arch.hidden_size, intermediate_size=arch.intermediate_size)

    def slots(self) -> dict[str, Slot]:
        """The weights by name."""
        norms = {"attention_norm": self.attention_norm.slot, "mlp_norm": self.mlp_norm.slot}
        return norms | self.attention.slots() | self.mlp.slots()

    def forward(self, hidden_TD: Tensor, cache: LayerCache, tables: StepTables, cos_sin_PE: Tensor) -> Tensor:
        normed_TD = self.attention_norm.forward(hidden_TD)
        hidden_TD = self.attention.forward(normed_TD, hidden_TD, cache, tables, cos_sin_PE)
        return self.mlp.forward(self.mlp_norm.forward(hidden_TD), hidden_TD)


class Decoder:
    """A stage of a model. Its weights come through `slots`; it can run once they are all filled.

    `max_len` bounds the positions it will see (default: the model's context).
    """

    def __init__(
        self, arch: ModelArch, stage: Stage, ops: Ops, *, max_len: int | None = None, device: str = "cpu"
    ) -> None:
        self.arch = arch
        self.stage = stage
        self._ops = ops
        self._device = device
        self._max_len = max_len or arch.max_position
        self.blocks = [Block(arch, layer, ops) for layer in stage.layers]
        self.slots: dict[str, Slot] = {}
        """Every weight of this stage by name: embedding, norm, head, rope_freqs, layers.N.qkv, ..."""
        self._table_VD: Tensor
        self._head: LinearWeight
        self._cos_sin_PE: Tensor
        if stage.is_first or (stage.is_last and arch.tie_word_embeddings):
            self.slots["embedding"] = Slot({"weight": (arch.vocab_size, arch.hidden_size)}, self._take_embedding)
        for layer, block in zip(stage.layers, self.blocks, strict=True):
            self.slots |= {f"layers.{layer}.{name}": slot for name, slot in block.slots().items()}
        if stage.is_last:
            self.norm = RMSNorm(ops, arch.hidden_size, eps=arch.rms_norm_eps)
            self.slots["norm"] = self.norm.slot
            if not arch.tie_word_embeddings:
                self.slots["head"] = Slot({"weight": (arch.vocab_size, arch.hidden_size)}, self._take_head)
        if arch.rope.has_freq_factors:
            self.slots["rope_freqs"] = Slot({"weight": (arch.head_dim // 2,)}, self._take_factors, is_float32=True)
        else:
            self._set_rotary(None)

    def _take_embedding(self, pieces: dict[str, Tensor]) -> None:
        if self.stage.is_first:
            self._table_VD = pieces["weight"]
        if self.stage.is_last and self.arch.tie_word_embeddings:
            self._take_head(pieces)

    def _take_head(self, pieces: dict[str, Tensor]) -> None:
        self._head = self._ops.pack_linear(pieces["weight"])

    def _take_factors(self, pieces: dict[str, Tensor]) -> None:
        self._set_rotary(pieces["weight"])

    def _set_rotary(self, freq_factors: Tensor | None) -> None:
        self._cos_sin_PE = cos_sin_table(
            self.arch.rope,
            head_dim=self.arch.head_dim,
            max_len=self._max_len,
            freq_factors=freq_factors,
            device=self._device,
        )

    def allocate_kv_caches(self, num_blocks: int, block_size: int) -> list[LayerCache]:
        """Zeroed KV caches for the stage's layers, for blocks of `block_size` tokens."""
        return [
            self._ops.allocate_kv_cache(num_blocks, block_size, self.arch.num_kv_heads, self.arch.head_dim)
            for _ in self.blocks
        ]

    @torch.inference_mode()
    def forward(self, input: Tensor, context: ForwardContext) -> Tensor:
        """Token ids (T,) on the first stage, else the hidden states (T, D) of the stage before; gives hidden states
        (T, D), which the last stage hands to `logits`. May reuse the memory of hidden states it is given."""
        tables = context.tables
        hidden_TD = self._ops.embedding(input, self._table_VD) if self.stage.is_first else input
        for block, cache in zip(self.blocks, context.kv_caches, strict=True):
            hidden_TD = block.forward(hidden_TD, cache, tables, self._cos_sin_PE)
        return hidden_TD

    @torch.inference_mode()
    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Float32 logits (R, V) of rows picked from what the last stage's `forward` gave. The norm is applied here,
        so that it costs nothing for tokens whose logits nobody wants."""
        return self._ops.logits(self.norm.forward(hidden_RD), self._head)
