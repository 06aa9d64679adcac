"""Mistral 7B and its like: Llama with a sliding window. Their GGUF files call themselves llama."""

from __future__ import annotations

from millstream.models.family import Family

MISTRAL = Family(
    name="mistral",
    hf_class="MistralForCausalLM",
    hf_model_type="mistral",
    gguf_architecture=None,
    sliding_window="always",
    hf_defaults={"sliding_window": 4096, "num_key_value_heads": 8},
)
