"""Hardware profiles: what a device can do at most, and what share of that a good engine gets.

A profile is a JSON file: one of those in `data/hardware/`, or the user's own (`--hardware FILE.json`), such as the one
that `millstream simulate --calibrate` writes for this machine (`this-cpu`).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

import msgspec

from millstream.errors import ConfigError
from millstream.hub.local import default_cache_dir

THIS_CPU = "this-cpu"
GIB = 2**30

Points = list[tuple[float, float]]
"""(rows, share of the peak), by rising rows."""


class HardwareProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device and its links. A share is a number over 0, usually at most 1; a time is in microseconds."""

    name: str
    description: str
    sources: list[str]
    """Where each figure comes from."""
    peak_tflops: dict[str, float]
    """By type, dense; 10^12 multiplications and additions a second, each counted. "int8" is that of linear layers of
    8-bit weights; where it is missing they get the peak of the type that the model is computed in."""
    memory_gib: float
    memory_share: float = 0.9
    """How much of the memory weights and KV cache may take together."""
    bandwidth_gbs: float
    """Of the memory, in 10^9 bytes a second."""
    link: str
    """What joins two devices, in words."""
    link_gbs: float
    """From one device to the next, one direction."""
    link_latency_us: float
    linear_compute: Points
    """Share of the peak that linear layers get, by the rows (tokens) of the batch."""
    linear_bandwidth: Points
    """Share of the bandwidth with which weights are read, by rows."""
    attention_compute: float
    attention_bandwidth: float
    compute_scale: float = 1.0
    """Multiplies every share of the peak: what a fit may change."""
    bandwidth_scale: float = 1.0
    """Multiplies every share of the bandwidth."""
    layer_us: float
    """Of each layer, whatever the batch: launches, synchronisation."""
    step_us: float
    """Of each step on each stage: inputs, embedding, the sampler's launch."""
    sampled_row_us: float
    """The sampler, for each row it samples."""
    host_step_us: float
    """The engine process for each step: scheduling, messages, settling. No other step shares this time."""
    host_row_us: float
    """The same for each row of the step."""
    return_us: float
    """From the last stage until the engine process has the tokens."""
    front_end_us: float
    """HTTP, tokenizer, detokenizer: half of it before the engine gets a request, half after it sent a token."""

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            if isinstance(value, (int, float)):
                self._check(name, value)
        for kind, peak in self.peak_tflops.items():
            self._check(f"peak_tflops of {kind}", peak)
        for name, points in (("linear_compute", self.linear_compute), ("linear_bandwidth", self.linear_bandwidth)):
            rows = [at for at, _ in points]
            if not rows or rows[0] < 1 or rows != sorted(set(rows)):
                raise ConfigError(f"hardware profile {self.name}: the rows of {name} must begin at 1 or more and rise")
            for at, share in points:
                self._check(f"{name} at {at:g} rows", share)

    def _check(self, name: str, value: float) -> None:
        is_time = name.endswith("_us")
        if not (value >= 0 if is_time else value > 0) or math.isinf(value):
            limit = "at least 0" if is_time else "over 0"
            raise ConfigError(f"hardware profile {self.name}: {name} is {value}: it must be {limit} and finite")

    def peak(self, dtype: str) -> float:
        """Operations per second in `dtype`. Raises ConfigError where the profile does not tell."""
        if dtype not in self.peak_tflops:
            known = ", ".join(self.peak_tflops)
            raise ConfigError(f"--dtype {dtype}: the hardware profile {self.name} tells the speed of {known} only")
        return self.peak_tflops[dtype] * 1e12 * self.compute_scale

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return self.bandwidth_gbs * 1e9 * self.bandwidth_scale

    @property
    def usable_bytes(self) -> int:
        return int(self.memory_gib * GIB * self.memory_share)


@dataclasses.dataclass(slots=True)
class ShareTable:
    """Shares by rows: between two points it runs straight over the logarithm of the rows, outside it is level."""

    points: Sequence[tuple[float, float]]
    _known: dict[int, float] = dataclasses.field(default_factory=dict)

    def __call__(self, rows: int) -> float:
        share = self._known.get(rows)
        if share is None:
            share = self._known[rows] = self._interpolate(rows)
        return share

    def _interpolate(self, rows: int) -> float:
        left = self.points[0]
        if rows <= left[0]:
            return left[1]
        for right in self.points[1:]:
            if rows <= right[0]:
                at = math.log(rows / left[0]) / math.log(right[0] / left[0])
                return left[1] + at * (right[1] - left[1])
            left = right
        return left[1]


def built_in_names() -> list[str]:
    folder = resources.files("millstream.sim") / "data" / "hardware"
    return sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json"))


def calibrated_path(threads: int | None = None, quantization: str | None = None) -> Path:
    """Where `--calibrate` writes this machine's profile: with so many threads, or with one for each core."""
    parts = [THIS_CPU, *([] if threads is None else [str(threads)]), *([] if quantization is None else [quantization])]
    return default_cache_dir() / f"{'-'.join(parts)}.json"


def load_hardware(name: str, overrides: Mapping[str, str] | None = None) -> HardwareProfile:
    """The profile called `name`, or in the file `name`, with some of its numbers replaced.

    Raises ConfigError where there is no such profile, or a number in it can't be.
    """
    data = _read(name)
    for key, text in (overrides or {}).items():
        value = data.get(key)
        if not isinstance(value, (int, float)) and key not in ("compute_scale", "bandwidth_scale", "memory_share"):
            known = ", ".join(k for k, v in data.items() if isinstance(v, (int, float)))
            raise ConfigError(f"--set {key}: the hardware profile has no such number, only {known}")
        try:
            data[key] = float(text)
        except ValueError:
            raise ConfigError(f"--set {key}={text}: it must be a number") from None
    try:
        return msgspec.convert(data, HardwareProfile)
    except msgspec.ValidationError as e:
        raise ConfigError(f"--hardware {name} is not a hardware profile: {e}") from e


def _read(name: str) -> dict[str, object]:
    try:
        if name in built_in_names():
            text = (resources.files("millstream.sim") / "data" / "hardware" / f"{name}.json").read_bytes()
        elif match := re.fullmatch(rf"{THIS_CPU}(?:-(\d+))?(?:-(int8))?", name):
            text = calibrated_path(int(match[1]) if match[1] else None, match[2]).read_bytes()
        elif name.endswith(".json"):
            text = Path(name).read_bytes()
        else:
            known = ", ".join([*built_in_names(), THIS_CPU])
            raise ConfigError(f"--hardware is {name!r}: it must be one of {known}, or a .json file")
        return msgspec.json.decode(text, type=dict[str, object])
    except OSError as e:
        hint = " (make it with: millstream simulate --calibrate)" if name.startswith(THIS_CPU) else ""
        raise ConfigError(f"--hardware {name} can't be read: {e.strerror or e}{hint}") from e
    except msgspec.MsgspecError as e:
        raise ConfigError(f"--hardware {name} is not a JSON object: {e}") from e
