"""Family: what tells one family of models from another, as a table. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Family:
    """All families are the one Decoder; they differ in what their files say and leave out."""

    name: str
    hf_class: str
    """The class that config.json names in `architectures`."""
    hf_model_type: str
    """What it says in `model_type`."""
    gguf_architecture: str | None
    """`general.architecture` of a GGUF file; None where those files go by another family's."""
    is_gguf_permuted: bool = False
    """Whether GGUF files hold the rows of q and k in another order (see `weights.name_map.Target`)."""
    qkv_bias: Literal["never", "always", "attention_bias"] = "never"
    """Whether q, k and v have a bias; with `attention_bias`, that setting says so, and for the output as well."""
    has_qk_norm: bool = False
    """Whether q and k are normalised head by head before they are rotated."""
    sliding_window: Literal["never", "always", "use_sliding_window"] = "never"
    """When the setting `sliding_window` counts: with `use_sliding_window`, where that setting is true."""
    hf_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Settings whose value, where config.json is silent, is not the usual one."""
