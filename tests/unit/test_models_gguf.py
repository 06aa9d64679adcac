"""GGUF files: tiny models written in many types, and the default model, against transformers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from torch import Tensor

from millstream.errors import ModelError
from millstream.hub.gguf import read_gguf
from tests.models_helpers import Driver, default_gguf, load  # noqa: F401 - a fixture
from tests.unit.test_models_hf import LLAMA3, MODELS, PROMPTS, hf_model

TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16", "F32")
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OTHER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in OTHER_NAMES:
        return f"{OTHER_NAMES[stem]}.{kind}"
    layer, _, rest = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{LAYER_NAMES[rest]}.{kind}"


def permuted(tensor: Tensor, num_heads: int) -> Tensor:
    """The row order of Llama-family files, as llama.cpp's converter makes it."""
    halves = tensor.reshape(num_heads, 2, tensor.shape[0] // num_heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def stored(tensor: Tensor, type_name: str) -> tuple[np.ndarray[Any, Any], Tensor]:
    """A tensor's bytes in a type, and the values that are left of it."""
    kind = gguf.GGMLQuantizationType[type_name]
    data = quantize(tensor.numpy(), kind)
    return data, torch.from_numpy(dequantize(data, kind).reshape(tensor.shape).copy())


def llama3_factors(config: Any) -> Tensor:
    """The divisors that llama.cpp's converter writes for Llama 3's rope scaling."""
    found = []
    for i in range(0, config.head_dim, 2):
        wave = 2 * math.pi * LLAMA3["rope_theta"] ** (i / config.head_dim)
        low = LLAMA3["original_max_position_embeddings"] / LLAMA3["low_freq_factor"]
        high = LLAMA3["original_max_position_embeddings"] / LLAMA3["high_freq_factor"]
        if wave < high:
            found.append(1.0)
        elif wave > low:
            found.append(LLAMA3["factor"])
        else:
            smooth = (LLAMA3["original_max_position_embeddings"] / wave - LLAMA3["low_freq_factor"]) / (
                LLAMA3["high_freq_factor"] - LLAMA3["low_freq_factor"]
            )
            found.append(1 / ((1 - smooth) / LLAMA3["factor"] + smooth))
    return torch.tensor(found)


def write_gguf(name: str, path: Path, types: Iterator[str]) -> dict[str, Tensor]:
    """Write transformers' model as a GGUF file; returns its state with the values that the file holds."""
    model = hf_model(name)
    config, family = model.config, MODELS[name][0].model_type
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if config.rope_parameters["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
    if config.rope_parameters["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(config).numpy())
    state = {}
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(key.split(".")[-2])
        is_permuted = family == "llama" and heads is not None
        type_name = next(types) if tensor.dim() == 2 else "F32"
        data, values = stored(permuted(tensor, heads) if is_permuted else tensor, type_name)
        writer.add_tensor(gguf_name(key), data, raw_dtype=gguf.GGMLQuantizationType[type_name])
        if is_permuted:
            # back from (head, pair, half) to (head, half, pair)
            width = values.shape[0] // heads
            values = values.reshape(heads, width // 2, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        state[key] = values
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return state


CASES = [name for name in MODELS if "window" not in name]


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_dequantised_model(name: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    state = write_gguf(name, path, cycle(TYPES))
    model = MODELS[name][1](hf_model(name).config).eval()
    model.load_state_dict(state)
    with torch.inference_mode():
        wanted = model(torch.tensor([PROMPTS[3]])).logits[0]
    decoder = load(path)
    logits = Driver(decoder).logits(PROMPTS[3], chunk=16)
    assert (logits - wanted).abs().max() / wanted.abs().max() < 1e-4
    assert decoder.arch.family == MODELS[name][0].model_type
    assert decoder.arch.head_dim == getattr(model.config, "head_dim", None) or 16


def test_missing_and_left_over_tensors_are_named(tmp_path: Path) -> None:
    write_gguf("llama", tmp_path / "a.gguf", cycle(["F32"]))
    raw = (tmp_path / "a.gguf").read_bytes()
    changed = tmp_path / "b.gguf"
    changed.write_bytes(raw.replace(b"blk.1.ffn_gate.weight", b"blk.1.ffn_gatX.weight"))
    with pytest.raises(ModelError, match=r"'blk.1.ffn_gatX.weight', which this model"):
        load(changed)
    changed.write_bytes(raw.replace(b"blk.1.ffn_gate.weight", b"blk.9.ffn_gate.weight"))
    with pytest.raises(ModelError, match=r"'blk.9.ffn_gate.weight', which this model of 3 layers"):
        load(changed)


# -- the default model -----------------------------------------------------------------------------------------------

SENTENCES = """
 the capital of France is the city
 water is made of two parts of hydrogen and one part
 once upon a time there was a small
 the best way to learn a new language is
 in the year after the war the people of the town
 she opened the door and saw
 a list of things to do before the end of the day
 the sum of two and three is
 I think that the most important thing in life
 to make bread you need
 the sun is a star and the moon
 he said that he would not come back until
 computer science is the study of
 my favorite book is about a young man who
 if you want to be happy you should
 the first step is to read the data from the file and then
 why do birds fly south in the
 there are many kinds of trees in the forest such as
 please write a short story about a king
 music and art are both forms of human
"""


def test_greedy_tokens_of_the_default_model(default_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """20 prompts, 64 tokens each, all in one batch here, by prompt length in transformers (so nothing is padded).

    transformers sees our tokens and says which it would have chosen at each place. If none differs, it would have
    generated the same.
    """
    import transformers

    # it asks for accelerate and then makes no use of it
    monkeypatch.setattr(transformers.modeling_utils, "is_accelerate_available", lambda *_: True)
    ids = {token: i for i, token in enumerate(read_gguf(default_gguf).metadata["tokenizer.ggml.tokens"])}
    prompts = [[ids["Ġ" + word] for word in line.split()] for line in SENTENCES.strip().splitlines()]
    # of three lengths only, which makes three batches
    prompts = [prompt[: 5 + (len(prompt) - 5) // 3 * 3] for prompt in prompts]
    assert [sum(len(prompt) == n for prompt in prompts) for n in (5, 8, 11)] == [6, 9, 5]
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        default_gguf.parent, gguf_file=default_gguf.name, dtype=torch.float32
    )
    driver = Driver(load(default_gguf), num_blocks=512, block_size=16)
    tokens = driver.generate(prompts, 64, chunk=7)
    for length in {len(prompt) for prompt in prompts}:
        batch = [(prompt, new) for prompt, new in zip(prompts, tokens, strict=True) if len(prompt) == length]
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt + new[:-1] for prompt, new in batch])).logits[:, length - 1 :]
        assert logits.argmax(-1).tolist() == [new for _, new in batch]
