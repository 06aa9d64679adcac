"""RopeConfig: how positions are turned into rotations. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from millstream.errors import ModelError
from millstream.models.fields import Fields


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Dimension pair i of a head of width E turns by position * theta^(-2i/E), scaled as `kind` says.

    linear: every frequency is divided by `factor`. llama3: low frequencies are, high ones are not, between the two
    bounds is a ramp (Llama 3.1). `has_freq_factors`: the checkpoint holds a divisor for each frequency.
    """

    theta: float = 10000.0
    kind: Literal["none", "linear", "llama3"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    has_freq_factors: bool = False


def rope_from_hf(config: Fields, *, max_position: int) -> RopeConfig:
    """From config.json: `rope_theta` and `rope_scaling`, or the one `rope_parameters` of transformers 5."""
    name = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    scaling = config.section(name) or Fields({}, source=f"{config.source}: {name}")
    theta = scaling.positive_float("rope_theta", config.positive_float("rope_theta", 10000.0))
    _refuse_partial(scaling)
    _refuse_partial(config)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        if any(isinstance(value, dict) for value in scaling.values.values()):
            raise ModelError(f"{scaling.source} differs by kind of layer: that is not supported")
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=scaling.positive_float("factor"))
    if kind == "llama3":
        rope = RopeConfig(
            theta=theta,
            kind="llama3",
            factor=scaling.positive_float("factor"),
            low_freq_factor=scaling.positive_float("low_freq_factor"),
            high_freq_factor=scaling.positive_float("high_freq_factor"),
            original_max_position=scaling.positive_int("original_max_position_embeddings", max_position),
        )
        if rope.low_freq_factor >= rope.high_freq_factor:
            raise scaling.error("high_freq_factor", f"more than low_freq_factor ({rope.low_freq_factor})")
        return rope
    raise ModelError(f"{scaling.source}: rope scaling {kind!r} is not supported: only linear and llama3")


def rope_from_gguf(metadata: Fields, prefix: str, *, has_freq_factors: bool) -> RopeConfig:
    """From GGUF metadata; Llama 3's scaling is not there but in a tensor of frequency factors."""
    theta = metadata.positive_float(f"{prefix}.rope.freq_base", 10000.0)
    kind: Any = metadata.get(f"{prefix}.rope.scaling.type") or "none"
    if kind not in ("none", "linear"):
        raise ModelError(f"{metadata.source}: rope scaling {kind!r} is not supported: only linear")
    # the older of the two spellings has no type
    old = metadata.positive_float(f"{prefix}.rope.scale_linear", 1.0)
    factor = metadata.positive_float(f"{prefix}.rope.scaling.factor", old) if kind == "linear" else old
    return RopeConfig(
        theta=theta,
        kind="linear" if factor != 1.0 else "none",
        factor=factor,
        has_freq_factors=has_freq_factors,
    )


def _refuse_partial(fields: Fields) -> None:
    if fields.positive_float("partial_rotary_factor", 1.0) != 1.0:
        raise fields.error("partial_rotary_factor", "1: heads that are rotated in part are not supported")
