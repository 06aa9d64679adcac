"""What a model, or a stage of it, weighs. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.models.arch import DTYPE_BYTES, ModelArch
from millstream.parallel.stage import Stage

INT8_GROUP = 32
"""8-bit weights with one scale, of 2 bytes."""


def layer_parameters(arch: ModelArch) -> int:
    """Parameters of one layer."""
    return (arch.num_parameters() - _table_parameters(arch) - arch.hidden_size) // arch.num_layers


def stage_bytes(
    arch: ModelArch, stage: Stage, dtype: str, *, quantization: str | None = None, is_head_shared: bool = False
) -> int:
    """Bytes of a stage's weights as they lie in memory, computing in `dtype`.

    `quantization` is that of the linear layers and the head; embedding and norms stay in `dtype`. The kernels pack the
    head, so a tied table is held twice: as the embedding and as the head, unless `is_head_shared`.
    """
    num_matrix = stage.num_layers * _matrix_parameters(arch)
    num_other = stage.num_layers * layer_parameters(arch) - num_matrix + arch.hidden_size * stage.is_last
    table = arch.vocab_size * arch.hidden_size
    num_other += table * stage.is_first
    if not (is_head_shared and stage.is_first and arch.tie_word_embeddings):
        num_matrix += table * stage.is_last
    if quantization == "int8":
        return num_matrix + num_matrix // INT8_GROUP * 2 + num_other * DTYPE_BYTES[dtype]
    return (num_matrix + num_other) * DTYPE_BYTES[dtype]


def model_bytes(arch: ModelArch, stages: Sequence[Stage], dtype: str, *, quantization: str | None = None) -> int:
    """Bytes of the weights of all stages together."""
    return sum(stage_bytes(arch, stage, dtype, quantization=quantization) for stage in stages)


def _matrix_parameters(arch: ModelArch) -> int:
    """Those of one layer's matrices: all but biases and norms."""
    return arch.hidden_size * (arch.qkv_size + arch.num_heads * arch.head_dim + 3 * arch.intermediate_size)


def _table_parameters(arch: ModelArch) -> int:
    return arch.vocab_size * arch.hidden_size * (1 if arch.tie_word_embeddings else 2)
