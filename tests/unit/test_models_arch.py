"""ModelArch: what is read from config.json and GGUF metadata, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from millstream.errors import ModelError
from millstream.hub.files import ModelFiles
from millstream.hub.gguf import GGUFFile, GGUFTensor
from millstream.layers.rotary import inverse_frequencies
from millstream.models.arch import ModelArch, arch_from_gguf, arch_from_hf
from millstream.models.rope import RopeConfig
from millstream.parallel.context import ParallelContext
from millstream.parallel.stage import split_layers
from tests.models_helpers import default_gguf  # noqa: F401 - a fixture

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}
LLAMA3_SCALING = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
LLAMA3_ROPE = RopeConfig(
    theta=500000.0,
    kind="llama3",
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position=8192,
)


def test_llama_3_2_1b() -> None:
    arch = arch_from_hf(LLAMA | {"rope_scaling": LLAMA3_SCALING | {"rope_type": "llama3"}})
    assert (arch.family, arch.num_layers, arch.qkv_size, arch.max_position) == ("llama", 16, 3072, 131072)
    assert arch.rope == LLAMA3_ROPE
    assert arch.num_parameters() == 1_235_814_400  # as its model card says
    assert arch.weight_bytes("bfloat16") == 2 * 1_235_814_400
    assert arch.kv_bytes_per_token("bfloat16") == 16 * 2 * 8 * 64 * 2
    assert arch.eos_token_ids == (128001, 128008, 128009)
    assert (arch.compute_dtype(), arch.compute_dtype("float32")) == ("bfloat16", "float32")


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_scaling": LLAMA3_SCALING | {"rope_type": "llama3"}},
        {"rope_scaling": LLAMA3_SCALING | {"type": "llama3"}},
        {"rope_theta": None, "rope_parameters": LLAMA3_SCALING | {"rope_type": "llama3", "rope_theta": 500000.0}},
    ],
)
def test_the_spellings_of_rope_scaling(spelling: dict[str, Any]) -> None:
    assert arch_from_hf(LLAMA | spelling).rope == LLAMA3_ROPE


def test_rope_without_scaling_and_linear() -> None:
    assert arch_from_hf(LLAMA).rope == RopeConfig(theta=500000.0)
    default = {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
    assert arch_from_hf(LLAMA | default).rope == RopeConfig(theta=7.0)
    linear = arch_from_hf(LLAMA | {"rope_scaling": {"type": "linear", "factor": 4}}).rope
    assert linear == RopeConfig(theta=500000.0, kind="linear", factor=4.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn' is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "'dynamic' is not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling: factor is 0: it must be a positive number"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear': it must be an object"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differs by kind of layer"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is .*gptq.*not supported"),
        ({"architectures": ["Qwen2MoeForCausalLM"]}, "Qwen2MoeForCausalLM is not supported: only LlamaForCausalLM"),
        ({"architectures": None, "model_type": "gemma3"}, "gemma3 is not supported"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM': it must be a list"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"hidden_size": None}, "hidden_size is missing: it must be a positive integer"),
        ({"num_hidden_layers": "16"}, "num_hidden_layers is '16': it must be a positive integer"),
        ({"num_attention_heads": -4}, "num_attention_heads is -4"),
        ({"num_key_value_heads": 5}, "32 query heads can't share 5"),
        ({"head_dim": 63}, "width of a head is 63"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype is 'float8_e4m3fn'"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"eos_token_id": 128256}, "128256 is not in a vocabulary of 128256"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes': it must be true or false"),
    ],
)
def test_what_is_odd_or_unsupported_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        arch_from_hf(LLAMA | change)


def test_end_tokens_of_both_files_count() -> None:
    config = LLAMA | {"eos_token_id": 9}
    assert arch_from_hf(config, {"eos_token_id": [7, 9]}).eos_token_ids == (7, 9)
    assert arch_from_hf(config, {}).eos_token_ids == (9,)


def test_sliding_windows() -> None:
    mistral = LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": 512}
    assert arch_from_hf(mistral).window_of(3) == 512
    assert arch_from_hf(mistral | {"sliding_window": None}).window_of(3) is None
    assert arch_from_hf(LLAMA | {"sliding_window": 512, "use_sliding_window": True}).window_of(3) is None
    qwen = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 512, "max_window_layers": 2}
    assert arch_from_hf(qwen).window_of(3) is None
    used = qwen | {"use_sliding_window": True}
    assert [arch_from_hf(used).window_of(i) for i in range(4)] == [None, None, 512, 512]
    kinds = ["sliding_attention", "full_attention"] * 8
    assert [arch_from_hf(used | {"layer_types": kinds}).window_of(i) for i in range(3)] == [512, None, 512]
    with pytest.raises(ModelError, match="layer_types has 'chunked_attention'"):
        arch_from_hf(used | {"layer_types": ["chunked_attention"] * 16})


def test_from_files_reads_both_files(tmp_path: Path) -> None:
    files = ModelFiles(name="x", kind="safetensors", path=tmp_path)
    with pytest.raises(ModelError, match=r"no config.json"):
        ModelArch.from_files(files)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config.json can't be read"):
        ModelArch.from_files(files)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert ModelArch.from_files(files).eos_token_ids[0] == 5


@pytest.mark.parametrize(
    ("config_class", "model_class"),
    [(LlamaConfig, LlamaForCausalLM), (Qwen2Config, Qwen2ForCausalLM), (Qwen3Config, Qwen3ForCausalLM)],
)
@pytest.mark.parametrize("is_tied", [False, True])
def test_parameters_are_counted_as_transformers_does(config_class: Any, model_class: Any, is_tied: bool) -> None:
    config = config_class(
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=99,
        tie_word_embeddings=is_tied,
    )
    with torch.device("meta"):
        model = model_class(config)
    arch = arch_from_hf(config.to_dict() | {"architectures": [model_class.__name__]})
    assert arch.num_parameters() == model.num_parameters()


# -- GGUF ------------------------------------------------------------------------------------------------------------


def gguf(architecture: str = "llama", tensors: tuple[str, ...] = (), **changes: Any) -> GGUFFile:
    metadata = {
        "general.architecture": architecture,
        f"{architecture}.block_count": 2,
        f"{architecture}.context_length": 512,
        f"{architecture}.embedding_length": 64,
        f"{architecture}.feed_forward_length": 96,
        f"{architecture}.attention.head_count": 4,
        f"{architecture}.attention.head_count_kv": 2,
        f"{architecture}.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.tokens": ["a", "<|eot_id|>", "c", "<|im_end|>"],
        "tokenizer.ggml.token_type": [1, 3, 3, 1],
    }
    metadata |= {k.replace("__", "."): v for k, v in changes.items()}
    names = ("token_embd.weight", *tensors)
    made = {n: GGUFTensor(name=n, type=3, type_name="Q4_1", shape=(100, 64), offset=0, num_bytes=4000) for n in names}
    return GGUFFile(Path("x.gguf"), metadata, made)


def test_gguf_metadata() -> None:
    arch = arch_from_gguf(gguf())
    assert (arch.family, arch.vocab_size, arch.head_dim, arch.rms_norm_eps) == ("llama", 100, 16, 1e-5)
    assert arch.tie_word_embeddings
    assert not (arch.has_qkv_bias or arch.has_qk_norm or arch.has_output_bias)
    # the end of text; and the control token that is called an end of turn, but not the plain text that looks so
    assert arch.eos_token_ids == (2, 1)
    assert (arch.checkpoint_dtype, arch.is_quantized, arch.compute_dtype()) == ("Q4_1", True, "bfloat16")
    more = arch_from_gguf(gguf(tensors=("output.weight", "rope_freqs.weight")))
    assert not more.tie_word_embeddings
    assert more.rope.has_freq_factors
    qwen3 = arch_from_gguf(gguf("qwen3", ("blk.0.attn_q_norm.weight",), qwen3__attention__key_length=32))
    assert (qwen3.family, qwen3.has_qk_norm, qwen3.head_dim) == ("qwen3", True, 32)
    assert arch_from_gguf(gguf("qwen2", ("blk.0.attn_q.bias",))).has_qkv_bias
    linear = gguf(llama__rope__scaling__type="linear", llama__rope__scaling__factor=2.0)
    assert arch_from_gguf(linear).rope == RopeConfig(theta=10000.0, kind="linear", factor=2.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general__architecture": "gemma3"}, "gemma3 is not supported: only llama, qwen2, qwen3"),
        ({"llama__expert_count": 8}, "llama.expert_count is 8: mixtures of experts"),
        ({"llama__rope__scaling__type": "yarn"}, "'yarn' is not supported"),
        ({"llama__rope__dimension_count": 8}, "llama.rope.dimension_count is 8: it must be 16"),
        ({"llama__block_count": None}, "llama.block_count is missing"),
    ],
)
def test_unsupported_gguf_metadata_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        arch_from_gguf(gguf(**changes))


def test_default_model(default_gguf: Path) -> None:  # noqa: F811
    arch = ModelArch.from_files(ModelFiles(name="smollm2", kind="gguf", path=default_gguf))
    assert (arch.num_layers, arch.hidden_size, arch.num_heads, arch.num_kv_heads) == (30, 576, 9, 3)
    assert (arch.vocab_size, arch.max_position, arch.rope) == (49152, 8192, RopeConfig(theta=100000.0))
    assert arch.num_parameters() == 134_515_008
    assert arch.kv_bytes_per_token("bfloat16") == 23040
    assert 2 in arch.eos_token_ids


# -- rotary frequencies and stages -----------------------------------------------------------------------------------


def test_scaled_frequencies() -> None:
    plain = inverse_frequencies(RopeConfig(theta=10000.0), 8)
    assert torch.allclose(plain, torch.tensor([1.0, 0.1, 0.01, 0.001]))
    factors = torch.tensor([1.0, 2.0, 4.0, 8.0])
    assert torch.equal(inverse_frequencies(RopeConfig(theta=10000.0), 8, factors), plain / factors)
    assert torch.equal(inverse_frequencies(RopeConfig(theta=10000.0, kind="linear", factor=4.0), 8), plain / 4)
    rope = RopeConfig(
        theta=10000.0, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=128
    )
    scaled = inverse_frequencies(rope, 8)
    # 128 positions turn 20.4, 2.04, 0.2 and 0.02 times: kept, blended, divided, divided
    blend = (128 * 0.1 / (2 * math.pi) - 1) / 3
    wanted = torch.tensor([1.0, (1 - blend) * 0.1 / 8 + blend * 0.1, 0.01 / 8, 0.001 / 8])
    assert torch.allclose(scaled, wanted)


def test_stages_cover_all_layers() -> None:
    assert [list(s.layers) for s in split_layers(7, 3)] == [[0, 1], [2, 3, 4], [5, 6]]
    for num_layers in range(1, 12):
        for num_stages in range(1, num_layers + 1):
            stages = split_layers(num_layers, num_stages)
            assert [i for s in stages for i in s.layers] == list(range(num_layers))
            assert [s.is_first for s in stages] == [i == 0 for i in range(num_stages)]
            assert [s.is_last for s in stages] == [i == num_stages - 1 for i in range(num_stages)]
            assert max(s.num_layers for s in stages) - min(s.num_layers for s in stages) <= 1
            assert [ParallelContext(r, num_stages).stage(num_layers) for r in range(num_stages)] == stages
    with pytest.raises(ValueError, match="2 layers can't be cut into 3"):
        split_layers(2, 3)
    with pytest.raises(ValueError, match="rank is 2: it must be from 0 to 1"):
        ParallelContext(2, 2)
