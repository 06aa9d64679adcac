"""Qwen2 and Qwen2.5, dense: q, k and v have a bias; the sliding window is off unless switched on."""

from __future__ import annotations

from millstream.models.family import Family

QWEN2 = Family(
    name="qwen2",
    hf_class="Qwen2ForCausalLM",
    hf_model_type="qwen2",
    gguf_architecture="qwen2",
    qkv_bias="always",
    sliding_window="use_sliding_window",
    hf_defaults={"sliding_window": 4096, "max_window_layers": 28},
)
