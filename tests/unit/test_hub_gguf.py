"""The header of GGUF files: values, tensor places, and that damaged files end as a ModelError."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millstream.errors import ModelError
from millstream.hub.gguf import read_gguf
from millstream.hub.gguf_types import BY_NUMBER


def write_sample(path: Path) -> bytes:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -5)
    writer.add_uint16("a.u16", 65000)
    writer.add_int16("a.i16", -300)
    writer.add_uint32("a.u32", 4_000_000_000)
    writer.add_int32("a.i32", -70000)
    writer.add_uint64("a.u64", 2**63 + 1)
    writer.add_int64("a.i64", -(2**40))
    writer.add_float32("a.f32", 0.5)
    writer.add_float64("a.f64", 1e300)
    writer.add_bool("a.yes", True)
    writer.add_string("a.text", "naïve 漢字")
    writer.add_array("a.ints", [1, 2, 3])
    writer.add_array("a.texts", ["x", "", "ÿ"])
    writer.add_tensor("plain", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("half", np.ones(5, dtype=np.float16))
    packed = gguf.quants.quantize(np.ones((4, 64), dtype=np.float32), gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("packed", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = tmp_path_factory.mktemp("gguf") / "sample.gguf"
    return path, write_sample(path)


def test_metadata_values(sample: tuple[Path, bytes]) -> None:
    assert read_gguf(sample[0]).metadata == {
        "general.architecture": "llama",
        "a.u8": 200,
        "a.i8": -5,
        "a.u16": 65000,
        "a.i16": -300,
        "a.u32": 4_000_000_000,
        "a.i32": -70000,
        "a.u64": 2**63 + 1,
        "a.i64": -(2**40),
        "a.f32": 0.5,
        "a.f64": 1e300,
        "a.yes": True,
        "a.text": "naïve 漢字",
        "a.ints": [1, 2, 3],
        "a.texts": ["x", "", "ÿ"],
    }


def test_the_types_are_those_of_the_gguf_package() -> None:
    package = {int(t): (int(t), t.name, *sizes) for t, sizes in gguf.constants.GGML_QUANT_SIZES.items()}
    assert package == BY_NUMBER


def test_tensors_lie_where_the_header_says(sample: tuple[Path, bytes]) -> None:
    path, data = sample
    tensors = read_gguf(path).tensors
    plain, half, packed = tensors["plain"], tensors["half"], tensors["packed"]
    assert (plain.type, plain.type_name, plain.shape, plain.num_bytes) == (0, "F32", (2, 3), 24)
    assert data[plain.offset : plain.offset + 24] == struct.pack("<6f", 0, 1, 2, 3, 4, 5)
    assert (half.type_name, half.shape, half.num_bytes) == ("F16", (5,), 10)
    assert data[half.offset : half.offset + 10] == np.ones(5, dtype="<f2").tobytes()
    assert (packed.type, packed.type_name, packed.shape, packed.num_bytes) == (3, "Q4_1", (4, 64), 4 * 2 * 20)
    assert all(t.offset % 32 == 0 for t in tensors.values())


def test_version_2_is_read(sample: tuple[Path, bytes], tmp_path: Path) -> None:
    path = tmp_path / "v2.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 2) + sample[1][8:])
    assert read_gguf(path).metadata == read_gguf(sample[0]).metadata


def _header(num_tensors: int, num_metadata: int, *rest: bytes, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_metadata) + b"".join(rest)


def _text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _tensor(name: bytes, dims: list[int], kind: int, offset: int) -> bytes:
    return _text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


NESTED = b"".join(struct.pack("<IQ", 9, 1) for _ in range(50))

BAD_FILES = {
    "empty": (b"", "not a GGUF file"),
    "other magic": (b"PK\3\4" + bytes(100), "begins with b'PK"),
    "only the magic": (b"GGUF", "can't fit"),
    "version 1": (_header(0, 0, version=1), "version is 1"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big endian"),
    "huge tensor count": (_header(2**63, 0), "can't fit"),
    "huge key count": (_header(0, 2**64 - 1), "can't fit"),
    "huge key": (_header(0, 1, struct.pack("<Q", 2**62), bytes(50)), "can't fit"),
    "huge array": (_header(0, 1, _text(b"k"), struct.pack("<IIQ", 9, 4, 2**61), bytes(50)), "can't fit"),
    "huge string array": (_header(0, 1, _text(b"k"), struct.pack("<IIQ", 9, 8, 2**61), bytes(50)), "can't fit"),
    "long string in array": (
        _header(0, 1, _text(b"k"), struct.pack("<IIQQ", 9, 8, 1, 2**64 - 1), bytes(50)),
        "longer than the file",
    ),
    "deep arrays": (_header(0, 1, _text(b"k"), struct.pack("<I", 9), NESTED, bytes(50)), "deep"),
    "unknown value kind": (_header(0, 1, _text(b"k"), struct.pack("<I", 77), bytes(50)), "unknown kind 77"),
    "key not UTF-8": (_header(0, 1, _text(b"\xff"), struct.pack("<IB", 0, 1)), "not UTF-8"),
    "key twice": (_header(0, 2, *[_text(b"k") + struct.pack("<IQ", 10, 1)] * 2), "'k' occurs twice"),
    "bad alignment": (
        _header(0, 1, _text(b"general.alignment"), struct.pack("<II", 4, 3)),
        "general.alignment is 3",
    ),
    "split": (_header(0, 1, _text(b"split.count"), struct.pack("<IH", 2, 3)), "one part of a model in 3 files"),
    "tensor twice": (_header(2, 0, *[_tensor(b"t", [1], 0, 0)] * 2, bytes(64)), "'t' occurs twice"),
    "five dimensions": (_header(1, 0, _tensor(b"t", [1] * 5, 0, 0), bytes(64)), "5 dimensions"),
    "no dimensions": (_header(1, 0, _tensor(b"t", [], 0, 0), bytes(64)), "0 dimensions"),
    "empty dimension": (_header(1, 0, _tensor(b"t", [4, 0], 0, 0), bytes(64)), "empty"),
    "overflowing shape": (_header(1, 0, _tensor(b"t", [2**62, 2**62, 4], 0, 0), bytes(64)), "cut off"),
    "offset outside": (_header(1, 0, _tensor(b"t", [4], 0, 2**63), bytes(64)), "cut off"),
    "unknown type": (_header(1, 0, _tensor(b"t", [4], 999, 0), bytes(64)), "unknown type number 999"),
    "broken block": (_header(1, 0, _tensor(b"t", [33], 2, 0), bytes(64)), "Q4_0 needs a multiple of 32"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_file_is_refused(name: str, tmp_path: Path) -> None:
    data, words = BAD_FILES[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=words):
        read_gguf(path)


def test_missing_file_and_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ModelError, match="can't be read"):
            read_gguf(path)


def test_file_cut_off_in_its_data_is_refused(sample: tuple[Path, bytes], tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(sample[1][:-100])
    with pytest.raises(ModelError, match="cut off"):
        read_gguf(path)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_bytes_end_as_model_error(sample: tuple[Path, bytes], tmp_path: Path, data: st.DataObject) -> None:
    damaged = bytearray(sample[1])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(4, 900))
        new = data.draw(st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from([b"\xff" * 8, bytes(8)])))
        damaged[at : at + len(new)] = new
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged[: data.draw(st.integers(4, len(damaged)))])
    try:
        file = read_gguf(path)
    except ModelError:
        return
    size = path.stat().st_size
    assert all(t.offset > 0 and t.offset + t.num_bytes <= size for t in file.tensors.values())
