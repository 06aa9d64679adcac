"""The NameMaps: what Hugging Face and GGUF checkpoints call the weights of a Decoder. Imports no torch."""

from __future__ import annotations

from millstream.models.arch import ModelArch
from millstream.weights.name_map import NameMap, Target

_HF_LAYER = "model.layers.{layer}."
_GGUF_LAYER = "blk.{layer}."
_SLOT = "layers.{layer}."

_HF_ATTENTION = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj"}
_HF_REST = {
    "input_layernorm.weight": Target(_SLOT + "attention_norm"),
    "post_attention_layernorm.weight": Target(_SLOT + "mlp_norm"),
    "self_attn.o_proj.weight": Target(_SLOT + "output"),
    "mlp.gate_proj.weight": Target(_SLOT + "gate_up", "gate.weight"),
    "mlp.up_proj.weight": Target(_SLOT + "gate_up", "up.weight"),
    "mlp.down_proj.weight": Target(_SLOT + "down"),
}
_GGUF_REST = {
    "attn_norm.weight": Target(_SLOT + "attention_norm"),
    "ffn_norm.weight": Target(_SLOT + "mlp_norm"),
    "attn_output.weight": Target(_SLOT + "output"),
    "ffn_gate.weight": Target(_SLOT + "gate_up", "gate.weight"),
    "ffn_up.weight": Target(_SLOT + "gate_up", "up.weight"),
    "ffn_down.weight": Target(_SLOT + "down"),
}


def hf_names(arch: ModelArch) -> NameMap:
    """Names in safetensors files."""
    targets = {"model.embed_tokens.weight": Target("embedding"), "model.norm.weight": Target("norm")}
    # a tied head may be in the file as well; it is the embedding again
    ignored = {_HF_LAYER + "self_attn.rotary_emb.inv_freq"}
    if arch.tie_word_embeddings:
        ignored.add("lm_head.weight")
    else:
        targets["lm_head.weight"] = Target("head")
    for piece, name in _HF_ATTENTION.items():
        targets[f"{_HF_LAYER}{name}.weight"] = Target(_SLOT + "qkv", f"{piece}.weight")
        if arch.has_qkv_bias:
            targets[f"{_HF_LAYER}{name}.bias"] = Target(_SLOT + "qkv", f"{piece}.bias")
    if arch.has_output_bias:
        targets[_HF_LAYER + "self_attn.o_proj.bias"] = Target(_SLOT + "output", "bias")
    if arch.has_qk_norm:
        targets[_HF_LAYER + "self_attn.q_norm.weight"] = Target(_SLOT + "q_norm")
        targets[_HF_LAYER + "self_attn.k_norm.weight"] = Target(_SLOT + "k_norm")
    targets |= {_HF_LAYER + name: target for name, target in _HF_REST.items()}
    return NameMap(targets=targets, num_layers=arch.num_layers, ignored=frozenset(ignored))


def gguf_names(arch: ModelArch, *, is_permuted: bool) -> NameMap:
    """Names in GGUF files; with `is_permuted`, the rows of q and k are put back in order."""
    targets = {"token_embd.weight": Target("embedding"), "output_norm.weight": Target("norm")}
    if not arch.tie_word_embeddings:
        targets["output.weight"] = Target("head")
    if arch.rope.has_freq_factors:
        targets["rope_freqs.weight"] = Target("rope_freqs")
    heads = {"q": arch.num_heads, "k": arch.num_kv_heads} if is_permuted else {}
    for piece in "qkv":
        name = f"{_GGUF_LAYER}attn_{piece}"
        targets[f"{name}.weight"] = Target(_SLOT + "qkv", f"{piece}.weight", heads.get(piece, 0))
        if arch.has_qkv_bias:
            targets[f"{name}.bias"] = Target(_SLOT + "qkv", f"{piece}.bias", heads.get(piece, 0))
    if arch.has_output_bias:
        targets[_GGUF_LAYER + "attn_output.bias"] = Target(_SLOT + "output", "bias")
    if arch.has_qk_norm:
        targets[_GGUF_LAYER + "attn_q_norm.weight"] = Target(_SLOT + "q_norm")
        targets[_GGUF_LAYER + "attn_k_norm.weight"] = Target(_SLOT + "k_norm")
    targets |= {_GGUF_LAYER + name: target for name, target in _GGUF_REST.items()}
    return NameMap(targets=targets, num_layers=arch.num_layers)
