"""ModelArch: all numbers that tell one model from another, from a Hugging Face config or GGUF metadata.

Imports no torch: the server, the tokenizer and `millstream check` read it too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream.errors import ModelError
from millstream.hub.files import ModelFiles
from millstream.hub.gguf import GGUFFile
from millstream.models.family import Family
from millstream.models.fields import Fields
from millstream.models.llama import LLAMA
from millstream.models.mistral import MISTRAL
from millstream.models.qwen2 import QWEN2
from millstream.models.qwen3 import QWEN3
from millstream.models.rope import RopeConfig, rope_from_gguf, rope_from_hf

FAMILIES = {family.name: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3)}
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_GGUF_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_GGUF_CONTROL_TOKEN = 3
_END_OF_TURN_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>")


@dataclass(frozen=True, kw_only=True)
class ModelArch:
    """One model's architecture. Widths are in elements, `max_position` (the context) in tokens."""

    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    """Rows of the embedding; a tokenizer may know fewer tokens."""
    max_position: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_qk_norm: bool
    sliding_window: int | None
    """A token sees itself and this many less one before it; None: all."""
    full_attention_layers: frozenset[int]
    """Layers that see all although there is a sliding window."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Tokens that end an answer."""
    checkpoint_dtype: str
    """float32, bfloat16, float16, or the GGUF type that most of the weights have (Q4_1, ...)."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} query heads can't share {self.num_kv_heads} key/value heads")
        if self.head_dim % 2:
            raise ModelError(f"the width of a head is {self.head_dim}: it must be even to be rotated")
        bad = [i for i in self.eos_token_ids if i >= self.vocab_size]
        if bad:
            raise ModelError(f"the end-of-text token {bad[0]} is not in a vocabulary of {self.vocab_size}")

    @classmethod
    def from_files(cls, files: ModelFiles) -> ModelArch:
        """Read the architecture. Raises ModelError, naming the setting, for one that is odd or not supported."""
        if files.kind == "gguf":
            return arch_from_gguf(files.gguf)
        return arch_from_hf(_read_json(files.path / "config.json"), _read_json(files.path / "generation_config.json"))

    @property
    def is_quantized(self) -> bool:
        """Whether the checkpoint is; the model never computes in such a type."""
        return self.checkpoint_dtype not in DTYPE_BYTES

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def window_of(self, layer: int) -> int | None:
        """The sliding window of one layer."""
        return None if layer in self.full_attention_layers else self.sliding_window

    def compute_dtype(self, requested: str = "auto") -> str:
        """The type to compute in; auto: the checkpoint's 16-bit type, bfloat16 for all others."""
        if requested != "auto":
            return requested
        return self.checkpoint_dtype if self.checkpoint_dtype in ("bfloat16", "float16") else "bfloat16"

    def num_parameters(self) -> int:
        """Parameters of the whole model; a tied head counts once."""
        hidden, q_size = self.hidden_size, self.num_heads * self.head_dim
        attention = self.qkv_size * (hidden + self.has_qkv_bias) + hidden * (q_size + self.has_output_bias)
        norms = 2 * hidden + 2 * self.head_dim * self.has_qk_norm
        layer = attention + 3 * hidden * self.intermediate_size + norms
        tables = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + tables + hidden

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of the weights in `dtype`."""
        return self.num_parameters() * DTYPE_BYTES[dtype]

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes that a token's keys and values take in all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ModelError(f"{path} can't be read: {e}") from e
    if not isinstance(data, dict):
        raise ModelError(f"{path} must hold an object")
    return data


# -- Hugging Face ----------------------------------------------------------------------------------------------------


def _hf_family(config: Mapping[str, Any]) -> Family:
    names = config.get("architectures") or []
    if not isinstance(names, list):
        raise ModelError(f"config.json: architectures is {names!r}: it must be a list")
    for family in FAMILIES.values():
        if family.hf_class in names or (not names and family.hf_model_type == config.get("model_type")):
            return family
    name = names[0] if names else config.get("model_type")
    supported = ", ".join(family.hf_class for family in FAMILIES.values())
    raise ModelError(f"config.json: the architecture {name} is not supported: only {supported}")


def arch_from_hf(config: Mapping[str, Any] | None, generation_config: Mapping[str, Any] | None = None) -> ModelArch:
    """From the contents of config.json and, where there is one, generation_config.json. Raises ModelError."""
    if config is None:
        raise ModelError("the model's folder has no config.json")
    family = _hf_family(config)
    fields = Fields(config, source="config.json", defaults=family.hf_defaults)
    generation = Fields(generation_config or {}, source="generation_config.json")
    fields.refuse("quantization_config", why="quantised safetensors are not supported; quantised GGUF files are")
    fields.refuse("mlp_bias", why="biases in the MLP are not supported")
    if fields.get("hidden_act") not in (None, "silu"):
        raise fields.error("hidden_act", "silu: no other activation is supported")
    num_layers, num_heads = fields.positive_int("num_hidden_layers"), fields.positive_int("num_attention_heads")
    hidden_size = fields.positive_int("hidden_size")
    max_position = fields.positive_int("max_position_embeddings")
    attention_bias = family.qkv_bias == "attention_bias" and fields.flag("attention_bias")
    window, full_layers = _hf_window(fields, family, num_layers)
    bos = fields.token_ids("bos_token_id")
    eos = generation.token_ids("eos_token_id") + fields.token_ids("eos_token_id")
    return ModelArch(
        family=family.name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=fields.positive_int("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=fields.positive_int("num_key_value_heads", num_heads),
        head_dim=fields.positive_int("head_dim", hidden_size // num_heads),
        vocab_size=fields.positive_int("vocab_size"),
        max_position=max_position,
        rms_norm_eps=fields.positive_float("rms_norm_eps", 1e-6),
        rope=rope_from_hf(fields, max_position=max_position),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        has_qkv_bias=family.qkv_bias == "always" or attention_bias,
        has_output_bias=attention_bias,
        has_qk_norm=family.has_qk_norm,
        sliding_window=window,
        full_attention_layers=full_layers,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tuple(dict.fromkeys(eos)),
        checkpoint_dtype=_hf_dtype(fields),
    )


def _hf_dtype(fields: Fields) -> str:
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    value = fields.get(name) or "float32"
    if value not in DTYPE_BYTES:
        raise fields.error(name, f"one of {', '.join(DTYPE_BYTES)}")
    return str(value)


def _hf_window(fields: Fields, family: Family, num_layers: int) -> tuple[int | None, frozenset[int]]:
    """The sliding window, and the layers it does not hold for."""
    is_on = family.sliding_window == "always" or (
        family.sliding_window == "use_sliding_window" and fields.flag("use_sliding_window")
    )
    if not is_on or fields.get("sliding_window") is None:
        return None, frozenset()
    window = fields.positive_int("sliding_window")
    kinds = fields.get("layer_types")
    if kinds is None:
        first = fields.positive_int("max_window_layers") if fields.get("max_window_layers") else 0
        return window, frozenset(range(min(first, num_layers)))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise fields.error("layer_types", f"a list of {num_layers}, one for each layer")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelError(f"{fields.source}: layer_types has {kind!r}: only full_attention and sliding_attention")
    return window, frozenset(i for i, kind in enumerate(kinds) if kind == "full_attention")


# -- GGUF ------------------------------------------------------------------------------------------------------------


def _gguf_family(metadata: Mapping[str, Any]) -> Family:
    name = metadata.get("general.architecture")
    for family in FAMILIES.values():
        if name is not None and family.gguf_architecture == name:
            return family
    supported = ", ".join(f.gguf_architecture for f in FAMILIES.values() if f.gguf_architecture)
    raise ModelError(f"GGUF metadata: the architecture {name} is not supported: only {supported}")


def arch_from_gguf(file: GGUFFile) -> ModelArch:
    """From the metadata and the list of tensors of a GGUF file. Raises ModelError."""
    family = _gguf_family(file.metadata)
    fields, name = Fields(file.metadata, source="GGUF metadata"), family.gguf_architecture
    fields.refuse(f"{name}.expert_count", why="mixtures of experts are not supported")
    hidden_size = fields.positive_int(f"{name}.embedding_length")
    num_heads = fields.positive_int(f"{name}.attention.head_count")
    head_dim = fields.positive_int(f"{name}.attention.key_length", hidden_size // num_heads)
    for key in (f"{name}.attention.value_length", f"{name}.rope.dimension_count"):
        if fields.positive_int(key, head_dim) != head_dim:
            raise fields.error(key, f"{head_dim}, the width of a head")
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path} does not hold the tensor token_embd.weight")
    has_window = fields.get(f"{name}.attention.sliding_window")
    return ModelArch(
        family=family.name,
        num_layers=fields.positive_int(f"{name}.block_count"),
        hidden_size=hidden_size,
        intermediate_size=fields.positive_int(f"{name}.feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=fields.positive_int(f"{name}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        max_position=fields.positive_int(f"{name}.context_length"),
        rms_norm_eps=_float32(fields.positive_float(f"{name}.attention.layer_norm_rms_epsilon")),
        rope=rope_from_gguf(fields, str(name), has_freq_factors="rope_freqs.weight" in file.tensors),
        tie_word_embeddings="output.weight" not in file.tensors,
        has_qkv_bias="blk.0.attn_q.bias" in file.tensors,
        has_output_bias="blk.0.attn_output.bias" in file.tensors,
        has_qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        sliding_window=fields.positive_int(f"{name}.attention.sliding_window") if has_window else None,
        full_attention_layers=frozenset(),
        bos_token_id=next(iter(fields.token_ids("tokenizer.ggml.bos_token_id")), None),
        eos_token_ids=_gguf_eos(fields),
        checkpoint_dtype=_gguf_dtype(file),
    )


def _float32(value: float) -> float:
    """A number that was stored as float32, as it was meant: 9.99999974e-06 is 1e-05."""
    return float(f"{value:.7g}")


def _gguf_eos(fields: Fields) -> tuple[int, ...]:
    """The end-of-text, end-of-turn and end-of-message ids, and control tokens whose text says that they are one."""
    ids: list[int] = []
    for key in ("eos_token_id", "eot_token_id", "eom_token_id"):
        ids += fields.token_ids(f"tokenizer.ggml.{key}")
    tokens, kinds = fields.get("tokenizer.ggml.tokens") or [], fields.get("tokenizer.ggml.token_type") or []
    for text in _END_OF_TURN_TOKENS:
        if text in tokens and (i := tokens.index(text)) < len(kinds) and kinds[i] == _GGUF_CONTROL_TOKEN:
            ids.append(i)
    return tuple(dict.fromkeys(ids))


def _gguf_dtype(file: GGUFFile) -> str:
    num_bytes: dict[str, int] = {}
    for tensor in file.tensors.values():
        num_bytes[tensor.type_name] = num_bytes.get(tensor.type_name, 0) + tensor.num_bytes
    largest = max(num_bytes, key=lambda name: num_bytes[name])
    return _GGUF_DTYPES.get(largest, largest)
