"""Checkpoints: dequantised values, names, and all that can be wrong with files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as package_dequantize
from gguf.quants import quantize
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from millstream.errors import ModelError
from millstream.hub.gguf import GGUFFile, GGUFTensor
from millstream.hub.gguf_types import BY_NAME
from millstream.kernels.native import native_available, native_unavailable_reason
from millstream.kernels.native_dequantize import native_dequantize
from millstream.layers.slot import Slot
from millstream.weights.dequantize import SLICE_VALUES, SUPPORTED_TYPES, dequantize
from millstream.weights.gguf_checkpoint import GGUFCheckpoint
from millstream.weights.loader import load_weights, unpermute_rows
from millstream.weights.name_map import NameMap, Target
from millstream.weights.safetensors_checkpoint import INDEX_FILE, SafetensorsCheckpoint

QUANTISED_BY_US = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F32", "F16", "BF16")


def quantised(type_name: str, shape: tuple[int, int]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes of a tensor of a type: real values where the package can quantise, any sane blocks where it can't."""
    kind = GGMLQuantizationType[type_name]
    rng = np.random.default_rng(1)
    if type_name in QUANTISED_BY_US:
        values = rng.standard_normal(shape, dtype=np.float32)
        return np.ascontiguousarray(quantize(values, kind)).view(np.uint8).reshape(-1)
    values_of, bytes_of = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // values_of, bytes_of), dtype=np.uint8)
    scale = np.array([0.01], np.float16).view(np.uint8)
    if type_name == "Q6_K":
        blocks[:, -2:] = scale
    else:
        blocks[:, 0:2] = blocks[:, 2:4] = scale
    return blocks.reshape(-1)


@pytest.mark.parametrize("has_native", [True, False])
@pytest.mark.parametrize("type_name", SUPPORTED_TYPES)
def test_dequantised_values_are_the_gguf_packages(
    type_name: str, has_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_native:
        monkeypatch.setattr("millstream.kernels.native_dequantize.native_available", lambda: False)
    shape = (5, SLICE_VALUES // 2)  # several slices, the last of them short
    data = quantised(type_name, shape)
    wanted = torch.from_numpy(package_dequantize(data, GGMLQuantizationType[type_name]).reshape(-1).copy())
    assert wanted.abs().max() > 1
    assert torch.equal(dequantize(data, type_name, torch.float32), wanted)
    assert torch.equal(dequantize(data, type_name, torch.bfloat16), wanted.bfloat16())
    assert torch.equal(dequantize(data, type_name, torch.float16), wanted.half())


@pytest.mark.skipif(not native_available(), reason=native_unavailable_reason())
def test_the_kernels_know_all_quantised_types_and_odd_scales() -> None:
    # zeros, denormal, largest, infinite, not a number; of both signs; and every 37th float16
    odd = np.array([0, 1, 0x3FF, 0x400, 0x7BFF, 0x7C00, 0x7C01, 0x7E00], dtype=np.uint16)
    scales = np.concatenate([odd, odd | 0x8000, np.arange(0, 2**16, 37, dtype=np.uint16)]).view(np.uint8).reshape(-1, 2)
    for name in SUPPORTED_TYPES[3:]:
        kind = BY_NAME[name]
        blocks = np.random.default_rng(2).integers(0, 256, (len(scales), kind.num_bytes), dtype=np.uint8)
        at = kind.num_bytes - 2 if name == "Q6_K" else 0
        blocks[:, at : at + 2] = scales
        for dtype in (torch.float32, torch.bfloat16):
            found = torch.empty(len(blocks), kind.num_values, dtype=dtype)
            assert native_dequantize(blocks.reshape(-1), kind.number, found)
            with np.errstate(all="ignore"):
                wanted = torch.from_numpy(package_dequantize(blocks, GGMLQuantizationType[name])).to(dtype)
            assert torch.equal(found.nan_to_num(0.5), wanted.nan_to_num(0.5))
            assert torch.equal(found.isnan(), wanted.isnan())


def test_other_types_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(bytes(1000))
    tensor = GGUFTensor(name="x", type=16, type_name="IQ2_XXS", shape=(1, 256), offset=0, num_bytes=66)
    with pytest.raises(ModelError, match=r"IQ2_XXS are not supported.*Q4_K"):
        GGUFCheckpoint(GGUFFile(path, {}, {"x": tensor}))


@pytest.mark.parametrize(("offset", "num_bytes"), [(900, 128), (0, 127), (2**40, 128)])
def test_gguf_tensors_must_lie_in_the_file(tmp_path: Path, offset: int, num_bytes: int) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(bytes(1000))
    tensor = GGUFTensor(name="x", type=0, type_name="F32", shape=(4, 8), offset=offset, num_bytes=num_bytes)
    with pytest.raises(ModelError, match=r"'x' of shape \[4, 8\].*takes 128 bytes"):
        GGUFCheckpoint(GGUFFile(path, {}, {"x": tensor}))


@given(heads=st.integers(1, 5), half=st.integers(1, 6), columns=st.integers(0, 3))
def test_unpermute_undoes_llama_cpps_order(heads: int, half: int, columns: int) -> None:
    rows = heads * half * 2
    tensor = torch.arange(rows * max(columns, 1)).view((rows, columns) if columns else (rows,))
    rest = tensor.shape[1:]
    # as convert_hf_to_gguf permutes: (head, 2, half) -> (head, half, 2)
    permuted = tensor.reshape(heads, 2, half, *rest).transpose(1, 2).reshape(rows, *rest)
    assert torch.equal(unpermute_rows(permuted, heads), tensor)


# -- names and loading ------------------------------------------------------------------------------------------------

NAMES = NameMap(
    targets={
        "emb": Target("embedding"),
        "blk.{layer}.q": Target("layers.{layer}.qk", "q"),
        "blk.{layer}.k": Target("layers.{layer}.qk", "k"),
    },
    num_layers=2,
    ignored=frozenset({"blk.{layer}.freq"}),
)


def tensors(*, layers: int = 2) -> dict[str, torch.Tensor]:
    found = {"emb": torch.arange(6.0).view(3, 2)}
    for i in range(layers):
        found[f"blk.{i}.q"] = torch.full((4, 2), i + 0.5)
        found[f"blk.{i}.k"] = torch.full((2, 2), i + 0.25)
        found[f"blk.{i}.freq"] = torch.zeros(1)
    return found


class Model:
    def __init__(self, layers: range = range(2), *, has_embedding: bool = True) -> None:
        self.packed: dict[str, dict[str, torch.Tensor]] = {}
        self.slots = {f"layers.{i}.qk": self._slot(f"layers.{i}.qk", {"q": (4, 2), "k": (2, 2)}) for i in layers}
        if has_embedding:
            self.slots["embedding"] = self._slot("embedding", {"weight": (3, 2)})

    def _slot(self, name: str, shapes: dict[str, tuple[int, ...]]) -> Slot:
        return Slot(shapes, lambda pieces: self.packed.__setitem__(name, pieces))


def saved(tmp_path: Path, values: dict[str, torch.Tensor]) -> SafetensorsCheckpoint:
    save_file(values, tmp_path / "model.safetensors")
    return SafetensorsCheckpoint(tmp_path)


def test_every_tensor_finds_its_slot_and_progress_is_told(tmp_path: Path) -> None:
    model, told = Model(), []
    load_weights(
        model.slots,
        saved(tmp_path, tensors()),
        NAMES,
        dtype=torch.bfloat16,
        progress=lambda done, total: told.append((done, total)),
    )
    assert model.packed["layers.1.qk"]["q"].dtype == torch.bfloat16
    assert model.packed["layers.1.qk"]["q"].unique().tolist() == [1.5]
    assert model.packed["layers.0.qk"]["k"].unique().tolist() == [0.25]
    assert model.packed["embedding"]["weight"].tolist() == [[0, 1], [2, 3], [4, 5]]
    total = (6 + 2 * (8 + 4)) * 4
    assert [t for _, t in told] == [total] * 5
    assert [d for d, _ in told][-1] == total
    assert [d for d, _ in told] == sorted(d for d, _ in told)


def test_a_stage_loads_only_its_layers(tmp_path: Path) -> None:
    model = Model(range(1, 2), has_embedding=False)
    load_weights(model.slots, saved(tmp_path, tensors()), NAMES, dtype=torch.float32)
    assert list(model.packed) == ["layers.1.qk"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blk.1.q": None}, "does not hold blk.1.q"),
        ({"blk.1.q": None, "emb": None}, "does not hold blk.1.q, emb"),
        ({"blk.0.gate": torch.zeros(1)}, "'blk.0.gate', which this model of 2 layers has no use for"),
        ({"blk.2.q": torch.zeros(4, 2)}, "'blk.2.q', which"),
        ({"blk.{layer}.q": torch.zeros(4, 2)}, "'blk.{layer}.q', which"),
        ({"blk." + "1" * 5000 + ".q": torch.zeros(4, 2)}, "'blk.111.*', which"),
        ({"extra": torch.zeros(1)}, "'extra', which"),
        ({"blk.0.k": torch.zeros(2, 3)}, r"'blk.0.k' has shape \[2, 3\].*\[2, 2\]"),
        ({"blk.0.k": torch.zeros(2, 2, dtype=torch.int32)}, "'blk.0.k' is of type I32"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, change: dict[str, torch.Tensor | None], message: str) -> None:
    values = {name: t for name, t in (tensors() | change).items() if t is not None}
    with pytest.raises(ModelError, match=message):
        load_weights(Model().slots, saved(tmp_path, values), NAMES, dtype=torch.float32)


def test_a_cut_off_file_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, tensors())
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ModelError, match=r"model.safetensors is not a whole safetensors file"):
        SafetensorsCheckpoint(tmp_path)


def sharded(tmp_path: Path, weight_map: dict[str, str] | None = None) -> None:
    values = tensors()
    first = {name: values.pop(name) for name in ("emb", "blk.0.q")}
    save_file(first, tmp_path / "a.safetensors")
    save_file(values, tmp_path / "b.safetensors")
    index = dict.fromkeys(first, "a.safetensors") | dict.fromkeys(values, "b.safetensors")
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": index | (weight_map or {})}))


def test_shards_are_read_by_their_index(tmp_path: Path) -> None:
    sharded(tmp_path)
    save_file({"stray": torch.zeros(1)}, tmp_path / "c.safetensors")
    model = Model()
    load_weights(model.slots, SafetensorsCheckpoint(tmp_path), NAMES, dtype=torch.float32)
    assert model.packed["layers.0.qk"]["q"].unique().tolist() == [0.5]
    assert model.packed["layers.0.qk"]["k"].unique().tolist() == [0.25]


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"blk.1.k": "a.safetensors"}, "says that a.safetensors holds 'blk.1.k'"),
        ({"blk.1.k": "z.safetensors"}, "shard .*z.safetensors is missing"),
        ({"blk.1.k": "../b.safetensors"}, "is not a file name"),
        ({"blk.1.k": 3}, "is not an index of shards"),
    ],
)
def test_an_odd_index_is_refused(tmp_path: Path, weight_map: dict[str, Any], message: str) -> None:
    sharded(tmp_path, weight_map)
    with pytest.raises(ModelError, match=message):
        SafetensorsCheckpoint(tmp_path)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no \.safetensors file"):
        SafetensorsCheckpoint(tmp_path)
