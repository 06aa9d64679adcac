"""Qwen3, dense: q and k are normalised head by head; heads may be wider than hidden size / heads."""

from __future__ import annotations

from millstream.models.family import Family

QWEN3 = Family(
    name="qwen3",
    hf_class="Qwen3ForCausalLM",
    hf_model_type="qwen3",
    gguf_architecture="qwen3",
    qkv_bias="attention_bias",
    has_qk_norm=True,
    sliding_window="use_sliding_window",
    hf_defaults={"sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
)
