"""Llama 2, 3 and 3.x, and what is built like them: SmolLM2, TinyLlama, Yi, ..."""

from __future__ import annotations

from millstream.models.family import Family

LLAMA = Family(
    name="llama",
    hf_class="LlamaForCausalLM",
    hf_model_type="llama",
    gguf_architecture="llama",
    is_gguf_permuted=True,
    qkv_bias="attention_bias",
)
