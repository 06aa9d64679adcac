"""Every family against transformers, for tiny random checkpoints: the same logits and the same greedy tokens."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from millstream.hub.files import ModelFiles
from millstream.kernels.ops import make_ops
from millstream.layers.context import ForwardContext
from millstream.models.arch import ModelArch
from millstream.models.load import load_decoder
from millstream.parallel.stage import split_layers
from tests.models_helpers import Driver, load, step_tables

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama-tied-wide-heads-biases": (
        LlamaConfig,
        LlamaForCausalLM,
        {"tie_word_embeddings": True, "head_dim": 32, "attention_bias": True, "num_key_value_heads": 1},
    ),
    "llama3-scaling": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-linear-scaling": (
        LlamaConfig,
        LlamaForCausalLM,
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1000.0}},
    ),
    "mistral-window": (MistralConfig, MistralForCausalLM, {"sliding_window": 9}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen2-window-from-layer-1": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32}),
    "qwen3-tied": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16, "tie_word_embeddings": True}),
}
PROMPTS = [
    torch.randint(3, 160, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (1, 2, 29, 40, 17, 8)
]


@cache
def hf_model(name: str) -> Any:
    """A model whose biases and norms, which start as zeros and ones, are random too."""
    config_class, model_class, changes = MODELS[name]
    generator = torch.Generator().manual_seed(len(name))
    torch.manual_seed(len(name))
    model = model_class(config_class(**SIZES | changes)).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias") or "norm" in parameter_name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


@cache
def hf_tokens(name: str, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    found = hf_model(name).generate(
        torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return list(found[0, len(prompt) :].tolist())


def saved(name: str, folder: Path, *, is_sharded: bool = False) -> Path:
    hf_model(name).save_pretrained(folder, max_shard_size="100KB" if is_sharded else "5GB")
    assert len(list(folder.glob("*.safetensors"))) > 1 if is_sharded else True
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    driver = Driver(load(saved(name, tmp_path)))
    with torch.inference_mode():
        wanted = hf_model(name)(torch.tensor([PROMPTS[3]])).logits[0]
    for chunk in (100, 16, 7, 1):
        error = (driver.logits(PROMPTS[3], chunk=chunk) - wanted).abs().max() / wanted.abs().max()
        assert error < 1e-4, f"chunks of {chunk}"


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    driver = Driver(load(saved(name, tmp_path, is_sharded=True)))
    wanted = [hf_tokens(name, tuple(prompt), 64) for prompt in PROMPTS]
    assert driver.generate(PROMPTS, 64) == wanted
    assert driver.generate(PROMPTS, 64, chunk=6) == wanted
    assert driver.generate(PROMPTS[2:3], 64) == wanted[2:3]


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_stages_give_what_the_whole_model_gives(name: str, tmp_path: Path) -> None:
    files = ModelFiles(name=name, kind="safetensors", path=saved(name, tmp_path))
    arch = ModelArch.from_files(files)
    wanted = Driver(load(tmp_path)).logits(PROMPTS[2])
    hidden = torch.tensor(PROMPTS[2], dtype=torch.int32)
    stages = split_layers(arch.num_layers, 3)
    for stage in stages:
        ops = make_ops("reference", dtype="float32")
        decoder = load_decoder(files, arch, ops, dtype="float32", stage=stage)
        assert len(decoder.blocks) == 1
        assert ("embedding" in decoder.slots) == (stage.is_first or (stage.is_last and arch.tie_word_embeddings))
        length = len(PROMPTS[2])
        tables = step_tables([(length, length, range(1, 9))], block_size=4)
        hidden = decoder.forward(hidden, ForwardContext(tables, decoder.allocate_kv_caches(9, 4)))
    assert torch.allclose(decoder.logits(hidden), wanted, atol=1e-5)


def test_sixteen_bit_models_come_near(tmp_path: Path) -> None:
    hf_model("llama").save_pretrained(tmp_path)
    with torch.inference_mode():
        wanted = hf_model("llama")(torch.tensor([PROMPTS[3]])).logits[0]
    for dtype, tolerance in (("bfloat16", 0.05), ("float16", 0.006)):
        logits = Driver(load(tmp_path, dtype=dtype)).logits(PROMPTS[3], chunk=9)
        assert (logits - wanted).abs().max() / wanted.abs().max() < tolerance
